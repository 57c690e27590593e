"""Held-out evaluation of a policy in training: it answers through the embedded engine, and the run's reward scores it.

back end's weights -> publisher -> engine, proven as in a run -> responses -> reward workers -> mean reward
"""

import asyncio
from typing import Any

import numpy as np

from relax.bus.core import Core
from relax.bus.transfer_queue import QueueLimits
from relax.config.reward import RewardConfig
from relax.config.run import RunConfig
from relax.config.sft import SFTEvalConfig
from relax.data.prompts import open_prompts
from relax.data.render import Renderer
from relax.engines.local import LocalEngine
from relax.envs.single_turn import play_single_turn
from relax.errors import DataError, RewardError
from relax.models.folder import longest_sequence, read_model_folder
from relax.models.preparer import Preparer
from relax.rewards.pool import RewardPool
from relax.train.backend import TrainBackend
from relax.train.conversations import refuse_forgotten
from relax.types import Sample, Sampling
from relax.weights.publisher import WeightPublisher

_NAME = "exam"


class Exam:
    """Made in an event loop, which all its calls stay in; `close` ends the reward workers and frees the engine."""

    name = "reward"

    def __init__(self, config: SFTEvalConfig, reward: RewardConfig, run: RunConfig, tokenizer: Any) -> None:
        self._config, self._seed = config, run.run.seed
        self._renderer = Renderer(tokenizer, config.data)
        self._prompts = open_prompts(config.data, seed=run.run.seed)
        if config.data.media is None:
            first = self._prompts.row(0)
            refuse_forgotten(first.metadata, read_model_folder(run.model).media, first.key, "eval.data")
        room = longest_sequence(run.model) - config.max_new_tokens
        self._preparer = Preparer(run.model, config.data, self._renderer, spool=self._prompts.spool, max_tokens=room)
        self._engine = LocalEngine(run.model, run.rollout.engine, name=_NAME)
        self._rewards = RewardPool(reward)
        self._bus = Core(QueueLimits(prompts_per_step=1, max_staleness=0, num_steps=1))
        self._publisher = WeightPublisher(self._bus, run_id=_NAME)
        self._is_started = False

    async def score(self, backend: TrainBackend, version: int) -> float:
        """Mean reward of the back end's weights as they are now. Raises `RewardError` when no response could be scored."""
        if not self._is_started:
            await self._rewards.start()
            await self._preparer.start()
            await self._bus.subscribe(_NAME)
            self._is_started = True
        await self._publisher.publish(self._publisher.snapshot(version, backend.weights(), backend.canary()))
        manifest = await self._bus.next_manifest(_NAME, wait_s=60.0)
        assert manifest is not None, "nobody recalls the weights of an exam"
        await self._engine.load_weights(manifest)
        await self._bus.acknowledge(_NAME, version)
        count = min(self._config.num_prompts, len(self._prompts))
        groups = await asyncio.gather(*(self._answer(row) for row in range(count)))
        samples = [sample for group in groups for sample in group]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        if not samples:
            raise DataError(f"eval.data: the media of none of {count} rows can be read")
        if not rewards:
            raise RewardError(
                f"none of {len(samples)} responses could be scored: {samples[0].metadata.get('error', 'no reason')}"
            )
        return float(np.mean(rewards))

    async def _answer(self, row: int) -> list[Sample]:
        prompt = self._prompts.row(row)
        try:
            ready = await self._preparer.prepare(prompt)
        except DataError as bad:
            if self._config.data.on_bad_row == "error":
                raise DataError(f'{bad}; eval.data.on_bad_row = "skip" leaves such rows out') from bad
            return []
        first = (self._seed * 1_000_003 + row) * self._config.samples_per_prompt
        return await play_single_turn(
            prompt=prompt,
            group_id=row,
            prompt_ids=ready.ids,
            features=ready.features,
            seeds=[first + index for index in range(self._config.samples_per_prompt)],
            sampling=Sampling(self._config.max_new_tokens, self._config.temperature),
            generate=self._engine.generate,
            score=self._rewards.score,
            to_text=self._renderer.text,
        )

    async def close(self) -> None:
        if self._is_started:
            await self._rewards.close()
            await self._preparer.close()
        await self._engine.close()
        await self._publisher.close()
        await self._bus.close()
