"""Prompts as a policy reads them: token ids and, where a row has media, what the model's processor made of them.

    prompt of text    --Renderer, at once------------------------------------------------> ids
    prompt with media --media workers, ahead of need: decode, template, processor--> expanded ids, features

Whoever asks a policy something asks here first: rollout, evaluation, supervised training.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.config.data import DataSection
from relax.config.model import ModelConfig
from relax.data.media.decoded import Decoded
from relax.data.media.pool import MediaPool
from relax.data.media.source import Spool
from relax.data.render import Renderer
from relax.errors import ConfigError, DataError
from relax.models.processor import without_repeats
from relax.models.whisper_processor import load_processor
from relax.types import Prompt

Features = Mapping[str, NDArray[Any]]
_IDS, _RUNS, _MEDIA_IDS = "ids", "runs", "media_ids"  # among the arrays of a media worker, beside the features


@dataclass(frozen=True, slots=True)
class ReadyPrompt:
    """`ids [P]`: with a token for each embedding of a medium. `features`: see `models/processor.py`; empty for text.

    `runs`: for each medium, in order, the ids that stand for it; `media_ids`: the token of a place, by which one that is not
    yet expanded is known.
    """

    ids: Sequence[int]
    features: Features = field(default_factory=dict)
    runs: tuple[NDArray[np.int32], ...] = ()
    media_ids: frozenset[int] = frozenset()

    @staticmethod
    def of(arrays: Features) -> "ReadyPrompt":
        """What a media worker has made (`load_reader`)."""
        features = dict(arrays)
        ids, runs, media_ids = features.pop(_IDS), features.pop(_RUNS), features.pop(_MEDIA_IDS)
        spans = tuple(ids[start : start + length] for start, length in runs.tolist())
        return ReadyPrompt(ids.tolist(), features, spans, frozenset(media_ids.tolist()))

    def expand(self, ids: Sequence[int], mask: Sequence[int]) -> tuple[list[int], list[int]]:
        """The same media in other ids `[Q]`, which have one place for each, and their loss mask, 0 on media.

        Raises `DataError` where there are more or fewer places than media.
        """
        runs, out, kept = iter(self.runs), list[int](), list[int]()
        if (places := sum(token in self.media_ids for token in ids)) != len(self.runs):
            raise DataError(f"it has {places} places for {len(self.runs)} media")
        for token, learned in zip(ids, mask, strict=True):
            run = next(runs).tolist() if token in self.media_ids else None
            out += [token] if run is None else run
            kept += [learned] if run is None else [0] * len(run)
        return out, kept


class Preparer:
    """Makes prompts of one data section ready, each when it is asked for or a little before. One event loop uses it.

    `spool`: of the section's rows (`PromptSource.spool`). Prompts with more tokens than `max_tokens` are refused, their media
    counted.
    """

    def __init__(
        self, model: ModelConfig, data: DataSection, renderer: Renderer, *, spool: Spool | None, max_tokens: int
    ) -> None:
        self._renderer, self.max_tokens = renderer, max_tokens
        self.look_ahead = data.media.look_ahead if data.media is not None else 0
        self._pool = open_pool(model, data, spool)

    async def start(self) -> None:
        """Starts the workers, if rows have media. Raises `ConfigError` when packages or the model's processor are missing."""
        if self._pool is not None:
            await self._pool.start()

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    @property
    def totals(self) -> dict[str, float]:
        """Metrics since the start, if rows have media."""
        if self._pool is None:
            return {}
        stats = self._pool.stats
        return {
            "media/prompts": stats.num_prepared,
            "media/bytes": stats.num_bytes,
            "media/lost_workers": stats.num_lost_workers,
        }

    async def prepare(self, prompt: Prompt, following: Sequence[Prompt] = ()) -> ReadyPrompt:
        """The prompt, and a beginning of those that are `following`.

        Raises `DataError` that names the row and what is wrong with it or with its media.
        """
        if self._pool is not None and following:
            self._pool.expect([prompt, *following])
        if self._pool is None or not prompt.media:
            return ReadyPrompt(self._renderer.prompt_ids(prompt))
        ready = ReadyPrompt.of((await self._pool.prepare(prompt)).features)
        if len(ready.ids) > self.max_tokens:
            raise DataError(f"{prompt.key}: with its media the prompt has {len(ready.ids)} tokens, and {self.max_tokens} fit")
        return ready


def open_pool(model: ModelConfig, data: DataSection, spool: Spool | None) -> MediaPool | None:
    """Workers, not yet started, of which each gives what `load_reader` makes of a prompt; none where rows are of text."""
    if data.media is None:
        return None
    options = {
        "folder": model.tokenizer_path or model.path,
        "trust_remote_code": model.trust_remote_code,
        "system_prompt": data.system_prompt,
        "template_options": data.template_options,
        "hears_videos": data.media.video.audio,
    }
    return MediaPool(data.media, spool=spool, processor=f"{__name__}:load_reader", options=options)


def load_reader(
    *,
    folder: str,
    trust_remote_code: bool,
    system_prompt: str | None,
    template_options: dict[str, Any],
    hears_videos: bool = False,
) -> Callable[[Sequence[Mapping[str, Any]], Sequence[Decoded]], dict[str, NDArray[Any]]]:
    """What a media worker does with a prompt once its media are decoded. Messages that end with the assistant's turn are taken
    as they are, for supervised training. Raises `ConfigError` for `hears_videos` where the model does not."""
    import torch  # here, since only workers need it

    torch.set_num_threads(1)  # there is a worker for each core
    processor = load_processor(folder, trust_remote_code=trust_remote_code)
    if hears_videos and not processor.hears_videos:
        raise ConfigError("media.video.audio = true, and the model does not hear videos: leave it out")
    renderer = Renderer(processor.tokenizer, DataSection(system_prompt=system_prompt, template_options=template_options))

    def read(messages: Sequence[Mapping[str, Any]], items: Sequence[Decoded]) -> dict[str, NDArray[Any]]:
        made = processor.prepare(renderer.rendered(messages), items)
        for name, array in made.features.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():  # of sounds far beyond full scale, for example
                raise DataError(f"the model's processor makes NaN or infinity of its media (in {name})")
        runs = np.asarray([(run.start, run.length) for run in made.expansions], np.int64).reshape(-1, 2)
        media_ids = np.asarray(sorted(processor.token_ids.values()), np.int64)
        features = without_repeats(made.features, processor.frames_per_patch)
        return {**features, _IDS: made.ids, _RUNS: runs, _MEDIA_IDS: media_ids}

    return read
