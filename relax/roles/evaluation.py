"""Held-out evaluation: greedy or sampled responses to the first rows of the eval data, scored by a reward."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from relax.bus.transfer_queue import TransferQueue
from relax.config.data import DataConfig
from relax.config.run import RunConfig
from relax.data.media.source import Spool
from relax.data.prompts import PromptSource, check_lengths, kinds_of, open_prompts
from relax.data.render import Renderer
from relax.engines.pool import EnginePool
from relax.envs.single_turn import play_single_turn
from relax.errors import DataError, EngineError, WaitTimeout
from relax.models.folder import read_model_folder
from relax.models.preparer import Preparer
from relax.rewards.pool import RewardPool
from relax.types import Prompt, Sample, Sampling

_EVAL_IDS = 1 << 40  # request ids of evaluation are apart from those of training groups
_CONCURRENT_PROMPTS = 64
log = logging.getLogger("relax.roles")

_HOLDER, _WAIT_S = "evaluation", 60.0


class Evaluation:
    """Shares engines and reward workers with training; asks for few prompts at a time so that training goes on."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Any,
        rewards: RewardPool,
        engines: EnginePool,
        bus: TransferQueue,
        spool: Spool | None = None,
    ) -> None:
        assert config.eval is not None
        self._spool = spool  # that of the rewards
        self._run, self._eval, self._bus = config, config.eval, bus
        self._renderer = Renderer(tokenizer, config.eval.data)
        self._rewards, self._engines = rewards, engines
        self.kinds: list[str] = []  # what the column `eval.by` says of each prompt
        self._source: PromptSource | None = None
        self._preparer: Preparer | None = None

    async def start(self) -> None:
        longest = self._eval.max_new_tokens or self._run.rollout.max_new_tokens
        room = longest_prompt(self._run, self._eval.data, longest)
        opened = (self._eval.data, self._run.run.seed, self._renderer, room, self._spool)
        self._source = await asyncio.to_thread(open_checked, *opened)
        self._preparer = Preparer(self._run.model, self._eval.data, self._renderer, spool=self._source.spool, max_tokens=room)
        await self._preparer.start()
        if self._eval.by is not None:
            count = min(self._eval.num_prompts, len(self._source))
            self.kinds = kinds_of([self._source.row(index) for index in range(count)], self._eval.by)

    async def close(self) -> None:
        if self._preparer is not None:
            await self._preparer.close()

    async def follow(self, first_step: int) -> None:
        """Evaluates every `eval.every` steps, skipping what is overtaken meanwhile, and once more at the last step."""
        last, every = self._run.train.num_steps, self._eval.every
        step = first_step
        while step < last:
            due = min(last, (step // every + 1) * every) if every else last
            step = await self.at(due)

    async def at(self, step: int) -> int:
        """Waits until the engines hold the policy of `step` or a newer one, evaluates, emits the metrics; returns that step."""
        updates = self._run.train.updates_per_step
        await self._wait(lambda: self._bus.wait_acknowledged(step * updates, wait_s=_WAIT_S))
        await self._wait(
            lambda: self._bus.hold_engines(_HOLDER, wait_s=_WAIT_S)
        )  # one version answers all, where turns are taken
        try:
            versions = [stats.version for stats in (await self._engines.stats()).values() if stats.version >= 0]
            # no engine answers while all of them are down: requests will wait for one
            evaluated = min(versions, default=step * updates) // updates
            metrics = await self.run(evaluated)
        finally:
            await self._bus.let_go(_HOLDER)
        await self._bus.emit({"kind": "eval", "metrics": metrics})
        return evaluated

    @staticmethod
    async def _wait(call: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await call()
            except WaitTimeout:
                continue

    async def run(self, step: int) -> dict[str, Any]:
        """Metrics: `eval/accuracy` (mean reward), `eval/pass@k`, lengths, failures, and the policy versions that answered."""
        return summarise(step, await self.answers(step), self.kinds)

    def prompt(self, row: int) -> Prompt:
        """The prompt of that row of the data."""
        assert self._source is not None
        return self._source.row(row)

    async def answers(self, step: int) -> list[list[Sample] | None]:
        """The scored samples of each prompt, in the order of the data; None where the engine failed."""
        assert self._source is not None
        gate = asyncio.Semaphore(_CONCURRENT_PROMPTS)
        count = min(self._eval.num_prompts, len(self._source))
        return await asyncio.gather(*(self._answer(step, row, gate) for row in range(count)))

    async def _answer(self, step: int, row: int, gate: asyncio.Semaphore) -> list[Sample] | None:
        assert self._preparer is not None
        prompt = self.prompt(row)
        rollout = self._run.rollout
        sampling = Sampling(self._eval.max_new_tokens or rollout.max_new_tokens, self._eval.temperature, stop=rollout.stop)
        group = _EVAL_IDS + step * (1 << 24) + row
        async with gate:
            try:
                ready = await self._preparer.prepare(prompt)
                return await play_single_turn(
                    prompt=prompt,
                    group_id=group,
                    prompt_ids=ready.ids,
                    features=ready.features,
                    seeds=[row * 1009 + index for index in range(self._eval.samples_per_prompt)],
                    sampling=sampling,
                    generate=self._engines.generate,
                    score=self._rewards.score,
                    to_text=self._renderer.text,
                )
            except (EngineError, DataError) as error:
                log.warning("no answer to held-out prompt %s: %s", prompt.key, error)
                return None


def longest_prompt(config: RunConfig, data: DataConfig, max_new_tokens: int) -> int:
    """Tokens that a prompt may have: what the setting says, or what the context leaves beside the longest response."""
    context = config.model.max_context or read_model_folder(config.model).context
    room = context - max_new_tokens if context else 1 << 30
    return min(room, data.max_prompt_tokens or room)


def open_checked(data: DataConfig, seed: int, renderer: Renderer, room: int, spool: Spool | None) -> PromptSource:
    """Opens the prompts and treats those longer than `room` tokens as bad rows. `spool`: takes bytes of media."""
    return check_lengths(open_prompts(data, seed=seed, spool=spool), renderer, room)


def summarise(step: int, groups: list[list[Sample] | None], kinds: Sequence[str] = ()) -> dict[str, Any]:
    """Means over scored samples, all and by the prompts' `kinds`; prompts without one are counted under `eval/failed`, not as
    zeros."""
    scored = [[s for s in group if s.reward is not None] for group in groups if group]
    scored = [group for group in scored if group]
    samples = [sample for group in scored for sample in group]
    metrics: dict[str, Any] = {"step": step, "eval/prompts": len(scored), "eval/failed": len(groups) - len(scored)}
    if not samples:
        return metrics
    versions = [segment.version for sample in samples for segment in sample.versions]
    metrics |= {
        "eval/accuracy": float(np.mean([sample.reward for sample in samples])),
        "eval/length_mean": float(np.mean([int(sample.loss_mask.sum()) for sample in samples])),
        "eval/version_min": min(versions),
        "eval/version_max": max(versions),
    }
    for kind in sorted(set(kinds)):
        of_kind = [s.reward for group, its in zip(groups, kinds, strict=True) for s in group or () if its == kind]
        if found := [reward for reward in of_kind if reward is not None]:
            metrics[f"eval/accuracy/{kind}"] = float(np.mean(found))
    k = max(len(group) for group in scored)
    if k > 1:
        metrics[f"eval/pass@{k}"] = float(np.mean([max(s.reward or 0.0 for s in group) >= 1.0 for group in scored]))
    return metrics
