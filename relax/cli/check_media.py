"""What `relax check` can say about images, audio clips and videos: how many, that the model reads them, and of a few rows what
they come to."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from relax.cli.check_judges import shown_findings
from relax.cli.findings import Finding, error, ok, warning
from relax.cli.memory import human_bytes
from relax.config import RunConfig
from relax.config.data import DataConfig
from relax.config.media import MediaConfig
from relax.config.model import ModelConfig
from relax.config.reward import reward_model_of
from relax.data.media.cost import media_cost
from relax.data.media.rows import forgotten_media
from relax.data.prompts import PromptSource
from relax.errors import ConfigError, DataError, ModelError
from relax.models.folder import ModelFolder, read_model_folder
from relax.models.preparer import ReadyPrompt, open_pool
from relax.types import Prompt

FEW = 8  # prompts whose media are decoded where not all are
_SHOWN = 10  # of those that cannot be read
_NAMES = {"image": "images", "audio": "audio clips", "video": "videos"}


def media_findings(
    config: RunConfig,
    data: DataConfig,
    key: str,
    model: ModelFolder,
    source: PromptSource,
    rows: Sequence[Prompt],
    *,
    num_decoded: int | None,
) -> Iterator[Finding]:
    """On the media of `rows`. Those of the first `num_decoded` are decoded, as the run does it; None: those of all rows."""
    if data.media is None:
        if fault := next(filter(None, (forgotten_media(row.metadata, model.media) for row in rows)), None):
            yield error(f"{key}.media", fault)
        elif found := [name for name in MediaConfig().columns.values() if any(row.metadata.get(name) for row in rows)]:
            yield warning(
                f"{key}.media", f"is not set: {model.path} ({model.model_type}) does not read {found[0]!r} of the rows"
            )
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
    if num_decoded is None:
        try:
            rows = [source.row(index) for index in range(len(source))]
        except DataError as failure:
            yield error(key, str(failure))
            return
    if tried := [row for row in rows if row.media][:num_decoded]:
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
        found = asyncio.run(_prepare(config, data, model, source, rows))
    except ConfigError as failure:
        yield error(f"{key}.media", str(failure))
        return
    bad = [one for one in found if isinstance(one, DataError)]
    good = [one for one in found if isinstance(one, _Size)]
    if bad:
        level = error if not good else warning
        yield level(f"{key}.media", f"{len(bad)} of the first {len(rows)} prompts with media cannot be read, as {bad[0]}")
        yield from (level(f"{key}.media", str(other)) for other in bad[1:_SHOWN])
    if not good:
        return
    lengths = [size.num_tokens for size in good]
    yield ok(
        f"{key}.media",
        f"{len(good)} prompts decoded: {min(lengths)} to {max(lengths)} tokens, up to "
        f"{human_bytes(max(size.num_bytes for size in good))} of features, which cost the encoders as much as up to "
        f"{max(size.cost for size in good):,.0f} tokens of text",
    )
    room = (config.model.max_context or model.context) - config.rollout.max_new_tokens
    fit = min(room, data.max_prompt_tokens or room)
    if max(lengths) > fit:
        hint = f"{key}.media.image.max_pixels makes images smaller, and video.max_frames videos shorter"
        yield warning(f"{key}.media", f"a prompt has {max(lengths)} tokens with its media, and {fit} fit: {hint}")


class _Size(NamedTuple):
    """What a prompt comes to: `cost` is that of encoding its media, in tokens of text."""

    num_tokens: int
    num_bytes: int
    cost: float


async def _prepare(
    config: RunConfig, data: DataConfig, model: ModelFolder, source: PromptSource, rows: Sequence[Prompt]
) -> list[_Size | DataError]:
    assert data.media is not None
    num_workers = data.media.num_workers if len(rows) > FEW else 1
    data = data.model_copy(update={"media": data.media.model_copy(update={"num_workers": num_workers})})
    pool = open_pool(config.model, data, source.spool)
    assert pool is not None
    places = asyncio.Semaphore(2 * num_workers)  # so that no more are held than are looked at

    async def one(row: Prompt) -> _Size | DataError:
        try:
            async with places:
                ready = ReadyPrompt.of((await pool.prepare(row)).features)
        except DataError as failure:
            return failure
        num_bytes = sum(array.nbytes for array in ready.features.values())
        return _Size(len(ready.ids), num_bytes, media_cost(ready.features, model.row_costs))

    await pool.start()
    try:
        return await asyncio.gather(*map(one, rows))
    finally:
        await pool.close()
