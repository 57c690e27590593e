"""The actor: trains the policy and publishes it.

    one step:  claim ready groups as they come -> forward and backward at once -> ... until `prompts_per_step` groups
               -> optimizer step -> acknowledge the rows -> snapshot -> publish in the background -> next step
      consumes: rows with advantages                         waits for: rollout, advantages (reference, actor_fwd)
      produces: policy versions, step metrics, checkpoints   unblocks:  admission, engines

Version `n` is the policy after `n` optimizer steps. Gradients of sums accumulate while groups stream in; the count over the
whole batch divides them at the end of the step.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from relax.bus.transfer_queue import Lease, TransferQueue
from relax.config.run import RunConfig
from relax.errors import WaitTimeout
from relax.roles.role import MakeBackend, Role
from relax.roles.step_metrics import StepMetrics
from relax.roles.topology import actor_columns
from relax.train.backend import TrainBackend, TrainBatch
from relax.train.checkpoint import CheckpointStore
from relax.types import Ragged
from relax.weights.publisher import WeightPublisher

BACKEND_FOLDER, QUEUE_FILE, META_FILE = "actor", "queue.bin", "step.json"


class Actor(Role):
    """Owns the back end. `resume`: folder of the checkpoint to continue from."""

    def __init__(
        self, config: RunConfig, bus: TransferQueue, run_dir: Path, resume: Path | None, make_backend: MakeBackend
    ) -> None:
        super().__init__("actor", config, bus)
        self.step = 0
        self._run_dir, self._resume, self._make_backend = run_dir, resume, make_backend
        self._columns = actor_columns(config)
        self._checkpoints = CheckpointStore(run_dir / "checkpoints", config.train.checkpoint.keep)
        self._publisher = WeightPublisher(bus, run_id=config.run.name)
        self._publication: asyncio.Task[None] | None = None
        self._backend: TrainBackend | None = None

    async def start(self) -> None:
        self._backend = await asyncio.to_thread(self._load)

    def _load(self) -> TrainBackend:
        backend = self._make_backend(self.config)
        if self._resume is not None:
            backend.load(self._resume / BACKEND_FOLDER)
            self.step = read_step(self._resume)
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
        if self._publication is not None:
            self._publication.cancel()
            await asyncio.gather(self._publication, return_exceptions=True)
        await self._publisher.close()

    def status(self) -> dict[str, Any]:
        return super().status() | {"step": self.step}

    # -- one step -----------------------------------------------------------------------------------------------------
    async def _one_step(self) -> None:
        assert self._backend is not None
        size = self.config.rollout.prompts_per_step
        metrics = StepMetrics(self.step, asyncio.get_running_loop().time())
        leases: list[Lease] = []
        taken = 0
        while taken < size:
            self.activity = f"step {self.step}: waiting for {size - taken} groups"
            with metrics.timed("wait"):
                lease = await self.claim(self._columns, num_groups=size - taken, step=self.step)
            self.activity = f"step {self.step}: training on {taken} to {taken + len(set(lease.group_ids))} of {size} groups"
            with metrics.timed("train"):
                metrics.sums.add(await asyncio.to_thread(self._backend.forward_backward, to_batch(lease)))
            metrics.add_lease(lease)
            leases.append(lease)
            taken += len(set(lease.group_ids))
        self.activity = f"step {self.step}: optimizer"
        with metrics.timed("train"):
            finished = await asyncio.to_thread(self._backend.finish_step)
        await self.bus.ack([lease.lease_id for lease in leases], step=self.step)
        self.step += 1
        with metrics.timed("snapshot"):
            await self._publish()
        await self.bus.emit({"kind": "step", "metrics": metrics.finish(finished, asyncio.get_running_loop().time())})

    # -- weights ------------------------------------------------------------------------------------------------------
    async def _publish(self) -> None:
        """Takes the snapshot now; the rest travels while training goes on, one publication after the other."""
        assert self._backend is not None
        backend, version = self._backend, self.step
        snapshot = await asyncio.to_thread(lambda: self._publisher.snapshot(version, backend.weights(), backend.canary()))
        before = self._publication

        async def send() -> None:
            if before is not None:
                await before
            await self._publisher.publish(snapshot)

        self._publication = asyncio.create_task(send())

    async def _published(self) -> None:
        """Waits until every receiver computes with the newest version."""
        assert self._publication is not None
        await self._publication
        while True:
            try:
                await self.bus.wait_acknowledged(self.step, wait_s=60.0)
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
            asyncio.run_coroutine_threadsafe(self.bus.snapshot(str(folder / QUEUE_FILE)), loop).result()
            (folder / META_FILE).write_text(json.dumps({"step": step}), "utf-8")

        await asyncio.to_thread(self._checkpoints.write, step, write)
        await self.bus.emit({"kind": "checkpoint", "step": step, "path": f"checkpoints/step_{step}"})

    async def _export(self) -> None:
        assert self._backend is not None
        self.activity = "exporting the model"
        await asyncio.to_thread(self._backend.export, self._run_dir / "hf")


def read_step(checkpoint: Path) -> int:
    """The step at which a checkpoint folder was written."""
    return int(json.loads((checkpoint / META_FILE).read_text("utf-8"))["step"])


def to_batch(lease: Lease) -> TrainBatch:
    """A lease's rows as the back end reads them."""

    def ragged(name: str) -> Ragged | None:
        column = lease.columns.get(name)
        assert column is None or isinstance(column, Ragged)
        return column

    tokens, mask = ragged("tokens"), ragged("loss_mask")
    assert tokens is not None
    assert mask is not None
    return TrainBatch(
        tokens,
        mask,
        np.asarray(lease.group_ids, np.int64),
        rollout_logprobs=ragged("rollout_logprobs"),
        advantages=ragged("advantages"),
        old_logprobs=ragged("old_logprobs"),
        ref_logprobs=ragged("ref_logprobs"),
    )
