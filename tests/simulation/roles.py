"""The roles of a simulated run: they ask of the queue what relax's own ask of it; what they compute takes time, no more."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from simulation.client import Client
from simulation.engines import Partial
from simulation.judge import versions_of

from relax.bus.transfer_queue import Lease, Ticket
from relax.errors import StaleHandle, WaitTimeout
from relax.roles.columns import ColumnMaker
from relax.roles.role import Role
from relax.types import Column, Ragged, WeightManifest

if TYPE_CHECKING:
    from simulation.run import Run

COLUMNS = ("tokens", "versions", "advantages")


class Doubled(ColumnMaker):
    """A column that follows from the tokens, so that a second consumer writes the same."""

    columns, needs, max_groups = ("advantages",), ("tokens",), 3

    def make(self, columns: Any, group_ids: NDArray[np.int64], features: Any = None) -> dict[str, Column]:
        tokens = columns["tokens"]
        return {self.columns[0]: Ragged(tokens.values.astype(np.float32) * 2, tokens.offsets)}


class Producer:
    """As `roles/rollout.py`: as many groups in flight as it is given tickets for."""

    def __init__(self, run: "Run", client: Client) -> None:
        self._run, self._client = run, client

    async def run(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                try:
                    tickets = await self._client.admit(self._run.rng.randint(1, 4), wait_s=20.0)
                except WaitTimeout:
                    continue
                if not tickets:
                    return
                for ticket in tickets:
                    groups.create_task(self._group(ticket))

    async def _group(self, ticket: Ticket) -> None:
        run, scenario = self._run, self._run.scenario
        try:
            samples = await run.pool.generate(scenario.lengths(ticket))
            await asyncio.sleep(run.rng.random() * 0.1)  # the reward
            if scenario.is_filtered(ticket.prompt):
                await self._client.forfeit(ticket.issue, "filtered", "no signal")
            elif run.rng.random() < scenario.failed:
                await self._client.forfeit(ticket.issue, "failed", "aborted")
            else:
                run.judge.generated(ticket.issue, samples)
                await self._put(ticket.issue, to_columns(samples))
        except StaleHandle:
            return  # the actor went back meanwhile: the prompt is issued again

    async def _put(self, issue: int, columns: dict[str, Column]) -> None:
        while True:
            try:
                await self._client.put_group(issue, columns, wait_s=20.0)
                return
            except WaitTimeout:
                continue


class Evaluation:
    """As `roles/evaluation.py`: holds the engines, so that all of its answers are of one version."""

    def __init__(self, run: "Run", client: Client) -> None:
        self._run, self._client = run, client

    async def run(self) -> None:
        run = self._run
        while True:
            await asyncio.sleep(run.rng.expovariate(0.2))
            life = run.life
            try:
                await self._client.wait_acknowledged(0, wait_s=20.0)
                await self._client.hold_engines("evaluation", wait_s=20.0)
            except WaitTimeout:
                continue
            samples = await run.pool.generate((5, 20, 40))
            if life == run.life:
                run.judge.evaluated(samples)
            await self._client.let_go("evaluation")


class SimActor(Role):
    """As `roles/actor.py`, without a model: takes a step's groups as they come, and needs a second for all of them."""

    def __init__(self, run: "Run", client: Client, step: int, life: int) -> None:
        super().__init__("actor", cast(Any, None), cast(Any, client))
        self._run, self._client, self._step, self._life = run, client, step, life
        self._publication: asyncio.Task[None] | None = None  # the last one
        self._publications: set[asyncio.Task[None]] = set()  # those under way
        self._newest = -1  # version of the last publication

    @property
    def _version(self) -> int:
        return self._step * self._run.scenario.updates_per_step

    async def run(self) -> None:
        scenario = self._run.scenario
        try:
            self._publish(late=False)
            while self._step < scenario.num_steps:
                await self._one_step()
                if self._step % scenario.checkpoint_every == 0 or self._step == scenario.num_steps:
                    await self._client.snapshot(str(self._run.snapshot_path))
            assert self._publication is not None
            await self._publication
        finally:  # each by itself: one that does not wait for the one before yet would leave it alive
            for publication in (under_way := list(self._publications)):
                publication.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _one_step(self) -> None:
        run, scenario = self._run, self._run.scenario
        size, leases, taken = scenario.prompts_per_step, [], 0
        at_least = size if scenario.takes_turns else run.rng.choice((1, 2, size))
        started = asyncio.get_running_loop().time()
        while taken < size:
            left = size - taken
            lease = await self.claim(COLUMNS, num_groups=left, at_least=min(left, at_least), step=self._step)
            await self._take_turn()
            leases.append(lease)
            issues = list(dict.fromkeys(lease.group_ids))
            run.judge.consumed(self._step, lease.lease_id, issues, row_lengths(lease))
            await asyncio.sleep(len(issues) / size * run.rng.uniform(0.5, 1.5))
            run.train_s += len(issues) / size
            taken += len(issues)
        await self.settle(leases, self._step)
        run.judge.check_books(run.core, str(run.ledger_path))
        self._step += 1
        run.wait_s += asyncio.get_running_loop().time() - started
        run.judge.published(self._version, self._life)
        if self._step % scenario.publish_every == 0 or self._step == scenario.num_steps:
            self._publish(late=run.rng.random() < scenario.skips)

    async def _take_turn(self) -> None:
        while self._run.scenario.takes_turns:
            try:
                await self._client.recall(wait_s=20.0)
                return
            except WaitTimeout:
                continue

    def _publish(self, *, late: bool) -> None:
        """In the background. One that is late gives way to the next, as a publication that failed does."""
        run, version, before = self._run, self._version, self._publication
        self._newest = version
        life = run.judge.published(version, self._life)
        manifest = WeightManifest(version, "none", str(life), 0, {}, f"{version}/{life}", (), ())

        async def send() -> None:
            await asyncio.sleep(run.rng.random() * 0.3)
            if late:
                await asyncio.sleep(run.rng.uniform(0.5, 3.0))
            if before is not None:
                await before
            if not (late and version < self._newest):
                await self._client.announce(manifest)

        self._publication = asyncio.get_running_loop().create_task(send(), name=f"publication of {version}")
        self._publications.add(self._publication)
        self._publication.add_done_callback(self._publications.discard)


def to_columns(samples: Sequence[Partial]) -> dict[str, Column]:
    """What the rollout puts; the tokens say how many there are, no more."""
    oldest, newest = versions_of(samples)
    return {
        "tokens": Ragged.pack([np.arange(sample.length, dtype=np.int32) for sample in samples]),
        "versions": np.asarray(oldest, np.int64),
        "newest_versions": np.asarray(newest, np.int64),
    }


def row_lengths(lease: Lease) -> list[int]:
    """Tokens of each row; the column that was computed must belong to them."""
    tokens, advantages = lease.columns["tokens"], lease.columns["advantages"]
    assert isinstance(tokens, Ragged)
    assert isinstance(advantages, Ragged)
    assert np.array_equal(advantages.values, tokens.values * 2), "a column of other rows"
    return np.diff(tokens.offsets).tolist()


async def with_leases(role: Role) -> None:
    try:
        await role.run()
    finally:
        await role.let_leases_go()
