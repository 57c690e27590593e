"""What `relax check` can say about images, audio clips and videos: how many, that the model reads them, and of a few rows what
they come to."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

from relax.cli.check_judges import shown_findings
from relax.cli.findings import Finding, error, ok, warning
from relax.cli.memory import human_bytes
from relax.config import RunConfig
from relax.config.data import DataConfig
from relax.config.model import ModelConfig
from relax.config.reward import reward_model_of
from relax.data.media.cost import media_cost
from relax.data.media.pool import MediaPool
from relax.data.media.rows import forgotten_media
from relax.data.prompts import PromptSource
from relax.errors import ConfigError, DataError, ModelError
from relax.models.folder import ModelFolder, read_model_folder
from relax.models.preparer import ReadyPrompt, open_pool
from relax.types import Prompt

_ROWS_DECODED = 8
_NAMES = {"image": "images", "audio": "audio clips", "video": "videos"}


def media_findings(
    config: RunConfig,
    data: DataConfig,
    key: str,
    model: ModelFolder,
    source: PromptSource,
    rows: Sequence[Prompt],
    *,
    decode: bool,
) -> Iterator[Finding]:
    """On the media of `rows`. `decode`: those of the first few are decoded, in a process as the run has them."""
    if data.media is None:
        if fault := next(filter(None, (forgotten_media(row.metadata, model.media) for row in rows)), None):
            yield error(f"{key}.media", fault)
        return
    counts = Counter(item.kind for row in rows for item in row.media)
    shown = ", ".join(f"{counts[kind]} {name}" for kind, name in _NAMES.items() if counts[kind])
    if strange := [kind for kind in counts if kind not in model.media]:
        reads = " and ".join(("text", *(_NAMES[kind] for kind in model.media)))
        yield error(f"{key}.media", f"the rows have {_NAMES[strange[0]]}, and {model.path} ({model.model_type}) reads {reads}")
        return
    if data.media.video.audio and "audio" not in model.media:
        yield error(f"{key}.media.video.audio", f"is true, and {model.path} ({model.model_type}) does not hear: leave it out")
        return
    yield ok(f"{key}.media", f"{shown or 'none'} in {len(rows)} rows")
    held_out = config.eval.reward if key == "eval.data" and config.eval is not None else None
    yield from shown_findings(config, held_out or config.reward, {kind: name for kind, name in _NAMES.items() if counts[kind]})
    reward_model = reward_model_of(config.rewards.values())
    if reward_model is not None and _is_blind(reward_model.model):
        yield warning(f"{key}.media", "the reward model reads text: it is shown prompts without their media")
    tried = [row for row in rows if row.media][:_ROWS_DECODED]
    if decode and tried:
        yield from _decoded(config, data, key, model, source, tried)


def _is_blind(model: ModelConfig) -> bool:
    try:
        return not read_model_folder(model).media
    except ModelError:
        return False  # which is said where its folder is looked into


def _decoded(
    config: RunConfig, data: DataConfig, key: str, model: ModelFolder, source: PromptSource, rows: Sequence[Prompt]
) -> Iterator[Finding]:
    try:
        found = asyncio.run(_prepare(config, data, source, rows))
    except ConfigError as failure:
        yield error(f"{key}.media", str(failure))
        return
    bad = [one for one in found if isinstance(one, DataError)]
    good = [one for one in found if isinstance(one, ReadyPrompt)]
    if bad:
        level = error if not good else warning
        yield level(f"{key}.media", f"{len(bad)} of the first {len(rows)} prompts with media cannot be read, as {bad[0]}")
    if not good:
        return
    lengths = [len(ready.ids) for ready in good]
    size = max(sum(array.nbytes for array in ready.features.values()) for ready in good)
    most = max(media_cost(ready.features, model.row_costs) for ready in good)
    yield ok(
        f"{key}.media",
        f"{len(good)} prompts decoded: {min(lengths)} to {max(lengths)} tokens, up to {human_bytes(size)} of features, "
        f"which cost the encoders as much as up to {most:,.0f} tokens of text",
    )
    room = (config.model.max_context or model.context) - config.rollout.max_new_tokens
    fit = min(room, data.max_prompt_tokens or room)
    if max(lengths) > fit:
        hint = f"{key}.media.image.max_pixels makes images smaller, and video.max_frames videos shorter"
        yield warning(f"{key}.media", f"a prompt has {max(lengths)} tokens with its media, and {fit} fit: {hint}")


async def _prepare(
    config: RunConfig, data: DataConfig, source: PromptSource, rows: Sequence[Prompt]
) -> list[ReadyPrompt | DataError]:
    assert data.media is not None
    few = data.model_copy(update={"media": data.media.model_copy(update={"num_workers": 1})})
    pool = open_pool(config.model, few, source.spool)
    assert pool is not None
    await pool.start()
    try:
        return [await _one(pool, row) for row in rows]
    finally:
        await pool.close()


async def _one(pool: MediaPool, row: Prompt) -> ReadyPrompt | DataError:
    try:
        return ReadyPrompt.of((await pool.prepare(row)).features)
    except DataError as failure:
        return failure
