"""The actor: trains the policy and publishes it.

    one step:  claim ready groups as they come -> columns that no role has made -> forward and backward at once -> ... until
               `prompts_per_step` groups -> optimizer step -> acknowledge the rows -> snapshot -> publish in the background
      consumes: rows of rollout, with columns of other roles    waits for: rollout, advantages (reference, actor_fwd)
      produces: policy versions, step metrics, checkpoints      unblocks:  admission, engines

Version `n` is the policy after `n` optimizer updates, `updates_per_step` of them each step. Gradients of sums accumulate while
groups stream in; the count over the whole batch divides them at the end of the update.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from relax.algorithms.table import has_critic
from relax.bus.transfer_queue import Lease, TransferQueue
from relax.config.run import RunConfig
from relax.errors import WaitTimeout
from relax.roles.columns import ColumnMaker
from relax.roles.role import MakeBackend, Role
from relax.roles.rows import Rows, taught
from relax.roles.step_metrics import StepMetrics
from relax.roles.topology import actor_claims, actor_columns, takes_turns
from relax.train.backend import TrainBackend, TrainBatch
from relax.train.checkpoint import CheckpointStore
from relax.weights.publisher import WeightPublisher

BACKEND_FOLDER, QUEUE_FILE, META_FILE = "actor", "queue.bin", "step.json"

_NUM_ROWS = 500  # of metrics in a checkpoint

MakeInside = Callable[[TrainBackend], Sequence[ColumnMaker]]


class Actor(Role):
    """Owns the back end. `resume`: folder of the checkpoint to continue from; `make_inside`: what it computes for others."""

    def __init__(
        self,
        config: RunConfig,
        bus: TransferQueue,
        run_dir: Path,
        resume: Path | None,
        make_backend: MakeBackend,
        make_inside: MakeInside,
    ) -> None:
        super().__init__("actor", config, bus)
        self.step = 0
        self._run_dir, self._resume = run_dir, resume
        self._make_backend, self._make_inside = make_backend, make_inside
        self._columns, self._claims = actor_columns(config), actor_claims(config)
        self._takes_turns = takes_turns(config)
        self._num_warmup_steps = config.critic.warmup_steps if has_critic(config.algorithm) else 0
        self._checkpoints = CheckpointStore(run_dir / "checkpoints", config.train.checkpoint.keep)
        self._publisher = WeightPublisher(bus, run_id=config.run.name)
        self._publications: set[asyncio.Task[bool]] = set()
        self._backend: TrainBackend | None = None
        self._inside: Sequence[ColumnMaker] = ()
        self._last_rows: deque[dict[str, Any]] = deque(maxlen=_NUM_ROWS)  # metrics of steps

    @property
    def version(self) -> int:
        """Optimizer updates that made the policy."""
        return self.step * self.config.train.updates_per_step

    async def start(self) -> None:
        self._backend = await asyncio.to_thread(self._load)

    def _load(self) -> TrainBackend:
        backend = self._make_backend(self.config)
        self._inside = self._make_inside(backend)
        for maker in self._inside:
            maker.load()
        if self._resume is not None:
            backend.load(self._resume / BACKEND_FOLDER)
            self.step = read_step(self._resume)
            self._last_rows.extend(read_metrics(self._resume))
            for maker in self._inside:
                maker.load_saved(self._resume)
        for maker in self._inside:
            maker.resumed(self.version)
        return backend

    async def run(self) -> None:
        num_steps = self.config.train.num_steps
        await self._publish()
        while self.step < num_steps:
            await self._one_step()
            every = self.config.train.checkpoint.every
            if self.step == num_steps or (every and self.step % every == 0):
                await self._save()
        await self._published()
        await self._export()
        await self.bus.emit({"kind": "done", "step": self.step})

    async def stop(self) -> None:
        for maker in self._inside:
            maker.stop()
        for task in self._publications:
            task.cancel()
        await asyncio.gather(*self._publications, return_exceptions=True)
        await self._publisher.close()

    def status(self) -> dict[str, Any]:
        inside = {f"{maker.columns[0]}_version": maker.version for maker in self._inside if maker.version is not None}
        return super().status() | {"step": self.step, "version": self.version} | inside

    # -- one step -----------------------------------------------------------------------------------------------------
    async def _one_step(self) -> None:
        size, num_updates = self.config.rollout.prompts_per_step, self.config.train.updates_per_step
        metrics = StepMetrics(self.step, self.version + num_updates - 1, asyncio.get_running_loop().time())
        leases: list[Lease] = []
        batches: list[TrainBatch] = []
        taken = 0
        while taken < size:
            lease = await self._take(size - taken, metrics)
            leases.append(lease)
            with metrics.timed("train"):
                rows = await asyncio.to_thread(self._completed, lease)
            metrics.add_rows(rows)
            for part in rows.parts(self._claims.part):
                self.activity = f"step {self.step}: training on {taken} to {taken + part.num_groups} of {size} groups"
                with metrics.timed("train"):
                    batches.append(await asyncio.to_thread(self._train_on, part, metrics))
                taken += part.num_groups
                self.progress += 1
            if num_updates == 1:
                batches.clear()
        self.activity = f"step {self.step}: optimizer"
        with metrics.timed("train"):
            finished = await asyncio.to_thread(self._finish_update)
            for _ in range(num_updates - 1):
                finished = await asyncio.to_thread(self._once_more, batches, metrics)
        await self.settle(leases, self.step)
        self.step += 1
        if self.step % self.config.train.publish_every == 0 or self.step == self.config.train.num_steps:
            with metrics.timed("snapshot"):
                await self._publish()
        row = metrics.finish(finished, asyncio.get_running_loop().time())
        self._last_rows.append(row)
        await self.bus.emit({"kind": "step", "metrics": row})

    async def _take(self, left: int, metrics: StepMetrics) -> Lease:
        """The step's next groups, and the devices if they are shared."""
        self.activity = f"step {self.step}: waiting for {left} groups"
        at_least, at_most = min(left, self._claims.at_least), min(left, self._claims.at_most)
        with metrics.timed("wait"):
            lease = await self.claim(self._columns, num_groups=at_most, at_least=at_least, step=self.step, shared=True)
            while self._takes_turns:
                try:
                    await self.bus.recall(wait_s=60.0)
                    break
                except WaitTimeout as timeout:
                    self.activity = f"step {self.step}: waiting for {timeout.reason}"
        return lease

    def _completed(self, lease: Lease) -> Rows:
        """The rows with every column that is to be made here."""
        rows = Rows(dict(lease.columns), np.asarray(lease.group_ids, np.int64), lease.shared)
        if self.config.rollout.on_stale == "mask":
            last_update = self.version + self.config.train.updates_per_step - 1
            rows = rows.masked_before(last_update - self.config.rollout.max_staleness)
        for maker in self._inside:
            rows.columns.update(maker.make(rows.columns, rows.group_ids, rows.features))
        return replace(rows, columns=taught(rows.columns))

    def _train_on(self, rows: Rows, metrics: StepMetrics) -> TrainBatch:
        batch = rows.to_batch()
        self._learn(batch, metrics)
        return batch

    def _learn(self, batch: TrainBatch, metrics: StepMetrics) -> None:
        assert self._backend is not None
        for maker in self._inside:
            metrics.sums.add(maker.learn(batch))
        if self.step >= self._num_warmup_steps:
            metrics.sums.add(self._backend.forward_backward(batch))

    def _finish_update(self) -> dict[str, float]:
        """Without gradients, in the critic's warm-up, the schedule alone moves on."""
        assert self._backend is not None
        finished = dict(self._backend.finish_step())
        for maker in self._inside:
            finished |= maker.finish_step()
        return finished

    def _once_more(self, batches: Sequence[TrainBatch], metrics: StepMetrics) -> dict[str, float]:
        """Another update on the same rows."""
        for batch in batches:
            self._learn(batch, metrics)
        return self._finish_update()

    # -- weights ------------------------------------------------------------------------------------------------------
    async def _publish(self) -> None:
        """Takes the snapshot now; the rest travels while training goes on. A version that is overtaken before is left out."""
        assert self._backend is not None
        backend, version = self._backend, self.version
        for maker in self._inside:
            await asyncio.to_thread(maker.published, version)
        snapshot = await self._publisher.snapshot_with_retries(version, backend.weights, backend.canary)
        for task in [task for task in self._publications if task.done()]:
            self._publications.remove(task)
            task.result()  # raises what no retry has mended
        send = self._publisher.publish_with_retries(snapshot)
        self._publications.add(asyncio.create_task(send, name="relax-publication"))

    async def _published(self) -> None:
        """Waits until every receiver computes with the newest version."""
        await asyncio.gather(*self._publications)
        while True:
            try:
                await self.bus.wait_acknowledged(self.version, wait_s=60.0)
                return
            except WaitTimeout as timeout:
                self.activity = f"waiting for {timeout.reason}"

    # -- checkpoints --------------------------------------------------------------------------------------------------
    async def _save(self) -> None:
        """Everything that a resumed run needs, taken between two steps: no lease of the actor is open."""
        assert self._backend is not None
        backend, loop, step = self._backend, asyncio.get_running_loop(), self.step
        self.activity = f"saving checkpoint {step}"

        def write(folder: Path) -> None:
            backend.save(folder / BACKEND_FOLDER)
            for maker in self._inside:
                maker.save(folder)
            asyncio.run_coroutine_threadsafe(self.bus.snapshot(str(folder / QUEUE_FILE)), loop).result()
            meta = {"step": step, "metrics": list(self._last_rows)}
            (folder / META_FILE).write_text(json.dumps(meta), "utf-8")

        await asyncio.to_thread(self._checkpoints.write, step, write)
        await self.bus.emit({"kind": "checkpoint", "step": step, "path": f"checkpoints/step_{step}"})

    async def _export(self) -> None:
        assert self._backend is not None
        self.activity = "exporting the model"
        await asyncio.to_thread(self._backend.export, self._run_dir / "hf")


def read_step(checkpoint: Path) -> int:
    """The step at which a checkpoint folder was written."""
    return int(json.loads((checkpoint / META_FILE).read_text("utf-8"))["step"])


def read_metrics(checkpoint: Path) -> list[dict[str, Any]]:
    """Metrics of the last steps before a checkpoint: the actor may have outlived whoever recorded them."""
    return list(json.loads((checkpoint / META_FILE).read_text("utf-8")).get("metrics", []))
