"""The critic: values of the rows on their way to the actor, learned from what the rewards came to.

inside the actor:  values for the step -> advantages, returns -> learns beside the policy -> saved in the actor's checkpoint
role of its own:   claims groups -> writes `values` -> makes their returns -> gradients -> one update every `prompts_per_step`
                   groups -> acknowledges them; its checkpoints lie in the run folder under `critic/`
      consumes: rows of rollout, with columns that the estimator reads     waits for: rollout (reference, actor_fwd)
      produces: `values`, metrics, checkpoints                             unblocks:  advantages, actor
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.algorithms.advantages import advantages
from relax.algorithms.table import estimator_columns
from relax.bus.transfer_queue import Lease, TransferQueue
from relax.config.run import RunConfig
from relax.errors import CheckpointError, StaleHandle
from relax.roles.columns import ColumnMaker
from relax.roles.logprobs import to_rows
from relax.roles.role import Role
from relax.roles.rows import Rows, taught
from relax.roles.topology import actor_claims
from relax.train.backend import NO_FEATURES, GroupFeatures, StepSums, TrainBatch, ValueBackend
from relax.train.checkpoint import CheckpointStore
from relax.types import Column

# What makes the back end that a critic computes with; tests hand in one that computes nothing.
MakeCritic = Callable[[RunConfig], ValueBackend]

_FOLDER = "critic"

log = logging.getLogger("relax.roles")


def critic_config(config: RunConfig) -> RunConfig:
    """The run as the critic's back end sees it: its model, its learning rate."""
    train = config.train.model_copy(update={"lr": config.critic.lr})
    return config.model_copy(update={"model": config.critic.model or config.model, "train": train})


class Critic(ColumnMaker):
    """`values` for the actor that it lives in; it learns with every update of the policy, and before, in the warm-up."""

    columns = ("values",)
    needs = ("tokens", "loss_mask")

    def __init__(self, config: RunConfig, make_critic: MakeCritic) -> None:
        self._config, self._make_critic = config, make_critic
        self._backend: ValueBackend | None = None

    @property
    def backend(self) -> ValueBackend:
        assert self._backend is not None, "the critic is not loaded"
        return self._backend

    def load(self) -> None:
        self._backend = self._make_critic(critic_config(self._config))

    def make(
        self, columns: Mapping[str, Column], group_ids: NDArray[np.int64], features: GroupFeatures = NO_FEATURES
    ) -> dict[str, Column]:
        return {"values": self.backend.values(to_rows(columns, group_ids, features))}

    def learn(self, batch: TrainBatch) -> StepSums:
        return self.backend.forward_backward(batch)

    def finish_step(self) -> dict[str, float]:
        return _named(self.backend.finish_step())

    def save(self, checkpoint: Path) -> None:
        self.backend.save(checkpoint / _FOLDER)

    def load_saved(self, checkpoint: Path) -> None:
        if not (checkpoint / _FOLDER).is_dir():
            raise CheckpointError(
                f"{checkpoint}: no critic in it; where the critic is a role of its own, its checkpoints lie elsewhere: "
                "continue the run with the resources.mode that it had"
            )
        self.backend.load(checkpoint / _FOLDER)


class CriticRole(Role):
    """`first_step`: the run goes on from there, and the critic from its newest checkpoint until then; `is_restart`: an earlier
    critic of the same run came to its end, and this one takes up its newest checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        bus: TransferQueue,
        run_dir: Path,
        make_critic: MakeCritic,
        first_step: int = 0,
        *,
        is_restart: bool = False,
    ) -> None:
        super().__init__("critic", config, bus)
        self.step = 0
        self._first_step, self._is_restart = first_step, is_restart
        self._maker = Critic(config, make_critic)
        self._store = CheckpointStore(run_dir / _FOLDER, config.train.checkpoint.keep)
        others = (name for name in estimator_columns(config.algorithm) if name != "values")
        self._columns = tuple(dict.fromkeys(("tokens", "loss_mask", "reward", "num_sampled", *others)))
        self._size, self._part = config.rollout.prompts_per_step, actor_claims(config).part
        # on-policy, a whole step at once makes sums that do not depend on timing
        self._is_fixed = config.run.deterministic and config.rollout.max_staleness == 0
        self._lock = threading.Lock()  # a thread outlives the task that waits for it
        self._leases: list[Lease] = []
        self._batches: list[TrainBatch] = []
        self._sums = StepSums()
        self._taken = 0
        self._saved: int | None = None

    async def start(self) -> None:
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        self._maker.load()
        found = self._store.all()
        step = max(found, default=None) if self._is_restart else _step_before(sorted(found), self._first_step)
        if not self._is_restart:
            self._store.forget_after(step or 0)
        if step is not None:
            self._maker.backend.load(found[step])
            self.step = self._saved = step

    async def run(self) -> None:
        while True:
            self.activity = f"step {self.step}: waiting for rows"
            left = self._size - self._taken
            lease = await self.claim(self._columns, num_groups=left, at_least=left if self._is_fixed else 1, shared=True)
            self.activity = f"step {self.step}: computing {len(lease.row_ids)} rows"
            try:
                await self._take(lease)
            except StaleHandle:
                self.forget(lease)  # the trainer went back: these rows are of a future that is lost

    async def stop(self) -> None:
        await asyncio.to_thread(self._close)

    def status(self) -> dict[str, Any]:
        return super().status() | {"step": self.step}

    async def _take(self, lease: Lease) -> None:
        rows = Rows(taught(lease.columns), np.asarray(lease.group_ids, np.int64), lease.shared)
        values = await asyncio.to_thread(self._value, rows)
        await self.bus.write(lease.row_ids, values)
        self._leases.append(lease)
        rows.columns.update(values)
        metrics = await asyncio.to_thread(self._learn, rows)
        if metrics is None:
            return
        leases, self._leases = self._leases, []
        for done in leases:
            with contextlib.suppress(StaleHandle):  # the trainer went back meanwhile; the others of the step are settled
                await self.settle([done])
        await self.bus.emit({"kind": "metrics", "role": self.name, "metrics": metrics})

    # -- in threads ---------------------------------------------------------------------------------------------------
    def _value(self, rows: Rows) -> dict[str, Column]:
        with self._lock:
            return self._maker.make(rows.columns, rows.group_ids, rows.features)

    def _learn(self, rows: Rows) -> dict[str, float] | None:
        """The metrics of a step, if these rows complete one."""
        algorithm, longest = self.config.algorithm, self.config.rollout.max_new_tokens
        with self._lock:
            made = advantages(algorithm, rows.columns, group_ids=rows.group_ids, length_budget=longest)
            learned = replace(rows, columns=rows.columns | {"returns": made["returns"]})
            for part in learned.parts(self._part):
                batch = part.to_batch()
                self._sums.add(self._maker.learn(batch))
                if self.config.train.updates_per_step > 1:
                    self._batches.append(batch)
            self._taken += rows.num_groups
            return self._finish() if self._taken >= self._size else None

    def _finish(self) -> dict[str, float]:
        finished = self._maker.finish_step()
        for _ in range(self.config.train.updates_per_step - 1):
            for batch in self._batches:
                self._sums.add(self._maker.learn(batch))
            finished = self._maker.finish_step()
        metrics = self._sums.values() | finished
        self._sums, self._taken = StepSums(), 0
        self._batches.clear()
        self.step += 1
        every = self.config.train.checkpoint.every
        if every and self.step % every == 0:
            self._save()
        return metrics

    def _save(self) -> None:
        self._store.write(self.step, self._maker.backend.save)
        self._saved = self.step

    def _close(self) -> None:
        """What was learned since the last checkpoint is kept, up to the last whole step."""
        with self._lock:
            if self.step == 0 or self._saved == self.step:
                return
            self._maker.backend.forget_gradients()
            try:
                self._save()
            except CheckpointError as error:
                log.warning("critic: its last steps are lost: %s", error)


def _step_before(steps: Sequence[int], first_step: int) -> int | None:
    """The last of `steps` until `first_step`. A run that is under way would rather have a later one than none."""
    before = [step for step in steps if step <= first_step]
    return before[-1] if before else steps[0] if steps and first_step else None


def _named(finished: Mapping[str, float]) -> dict[str, float]:
    return {f"critic/{name}": value for name, value in finished.items()}
