"""What `relax check` can say about the data and the reward: rows that can be read, prompts that fit, answers that are there."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from relax.cli.check_media import media_findings
from relax.cli.findings import Finding, error, ok, warning
from relax.config import RunConfig
from relax.config.data import DataConfig
from relax.config.reward import RewardConfig
from relax.errors import RelaxError
from relax.models.folder import ModelFolder
from relax.types import Prompt

_MADE_ROWS_TRIED = 16
_FILE_ROWS_TRIED = 10_000
_REWARD_START_S = 60.0


def data_findings(
    config: RunConfig, data: DataConfig, key: str, model: ModelFolder | None, *, num_decoded: int | None = 0
) -> Iterator[Finding]:
    """On one source of prompts; `key` is `data` or `eval.data`. Without a model, lengths are left out. `num_decoded`:
    of how many prompts the media are decoded; None: of all."""
    # here, since the readers may load parquet and generator libraries, which the other checks do without
    from relax.data.prompts import kinds_of, open_prompts

    try:
        source = open_prompts(data, seed=config.run.seed)
        size = len(source)
        tried = min(size, _FILE_ROWS_TRIED if data.type == "file" else _MADE_ROWS_TRIED)
        rows = [source.row(index) for index in range(tried)]
    except RelaxError as failure:
        yield error(key, str(failure))
        return
    yield ok(key, f"{size} rows" if tried == size else f"{size} rows, of which the first {tried} were read")
    if source.num_skipped:
        yield warning(key, f'{source.num_skipped} malformed rows are left out (on_bad_row = "skip")')
    yield from _unscorable(config, key, rows)
    if model is not None:
        yield from _lengths(config, data, key, model, rows)
        yield from media_findings(config, data, key, model, source, rows, num_decoded=num_decoded)
    yield from _size(config, data, key, size)
    if key == "eval.data" and config.eval is not None and config.eval.by is not None:
        try:
            kinds = Counter(kinds_of(rows[: config.eval.num_prompts], config.eval.by))
            yield ok("eval.by", ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
        except RelaxError as failure:
            yield error("eval.by", str(failure))


def _unscorable(config: RunConfig, key: str, rows: Sequence[Prompt]) -> Iterator[Finding]:
    """Rows whose every response would be a reward error."""
    # here, since it may load what the row's reward needs
    from relax.rewards.row_check import fault_of

    reward = config.rewards.get("eval.reward", config.reward) if key == "eval.data" else config.reward
    faults = {row.key: fault for row in rows if (fault := fault_of(reward, row))}
    if faults:
        level = error if len(faults) == len(rows) else warning
        first, why = next(iter(faults.items()))
        yield level(key, f"{len(faults)} of {len(rows)} rows cannot be scored, as {first}: {why}")


def _size(config: RunConfig, data: DataConfig, key: str, size: int) -> Iterator[Finding]:
    if key == "data":
        groups = config.rollout.prompts_per_step
        if size < groups:
            yield warning(
                key, f"{size} rows are fewer than rollout.prompts_per_step = {groups}: a step sees some of them twice"
            )
        return
    assert config.eval is not None
    if size < config.eval.num_prompts and "num_prompts" in config.eval.model_fields_set:
        yield warning("eval.num_prompts", f"{config.eval.num_prompts}, and eval.data has {size} rows: those are used")
    if data.model_dump() == config.data.model_dump():
        yield warning("eval.data", "is the training data: the evaluation says nothing about unseen prompts")


def _lengths(config: RunConfig, data: DataConfig, key: str, model: ModelFolder, rows: Sequence[Prompt]) -> Iterator[Finding]:
    """Prompts that are too long even without the chat template's own tokens."""
    context = config.model.max_context or model.context
    limit = data.max_prompt_tokens or context - config.rollout.max_new_tokens
    path = model.tokenizer_path / "tokenizer.json"
    # A token is at least one byte, so only these can be too long.
    suspects = [row for row in rows if len(_content(row).encode()) > limit]
    if not suspects or limit < 1 or not path.is_file():
        return
    # here, since most data need no tokenizer to be checked
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as failure:  # noqa: BLE001 - the library raises nothing narrower
        yield error("model.path", f"{path}: cannot be read: {failure}")
        return
    lengths = {row.key: len(tokenizer.encode(_content(row)).ids) for row in suspects}
    long = [name for name, length in lengths.items() if length > limit]
    if not long:
        return
    first = f"{len(long)} of {len(rows)} prompts are too long, as {long[0]} with {lengths[long[0]]} tokens where {limit} fit"
    if data.on_bad_row == "error":
        hint = f'raise model.max_context or lower rollout.max_new_tokens, or leave them out with {key}.on_bad_row = "skip"'
        yield error(f"{key}.max_prompt_tokens", f"{first}: {hint}")
    else:
        yield warning(f"{key}.max_prompt_tokens", f"{first}: they are left out")


def _content(row: Prompt) -> str:
    return row.text or " ".join(_said(message.get("content")) for message in row.messages)


def _said(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return str(content or "")


def reward_findings(config: RunConfig) -> Iterator[Finding]:
    """On each reward: it can be made, and a function of the user's own can be imported and called.

    A worker process tries it, as in the run: what a user's module does while it is imported (exit, hang) cannot end this one.
    """
    # here, since the other checks need no process
    from relax.rewards.pool import RewardPool

    async def start_one(reward: RewardConfig) -> list[str]:
        pool = RewardPool(reward.model_copy(update={"num_workers": 1}), start_limit_s=_REWARD_START_S)
        await pool.start()
        await pool.close()
        return pool.notes

    for key, reward in config.rewards.items():
        try:
            notes = asyncio.run(start_one(reward))
        except RelaxError as failure:
            yield error(key, str(failure))
        else:
            yield ok(key, "; ".join([f"{reward.type} can be called", *notes]))
