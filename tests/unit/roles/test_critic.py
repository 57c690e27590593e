"""The critic as a role: values for every group, one update each `prompts_per_step` groups, whatever becomes of the groups."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeBackend

from relax.bus.core import Core
from relax.bus.transfer_queue import QueueLimits, Ticket
from relax.config import RunConfig, make_config
from relax.errors import CheckpointError
from relax.roles.build import make_role
from relax.roles.critic import Critic, CriticRole, critic_config
from relax.roles.role import RoleTask
from relax.roles.topology import actor_columns
from relax.train.backend import StepSums, TrainBatch
from relax.types import Ragged, WeightManifest

SIZE, NUM_STEPS = 4, 6


class FakeCritic(FakeBackend):
    """Every value is the number of updates; remembers the groups, values and returns that it learned from."""

    def __init__(self) -> None:
        super().__init__()
        self.learned: list[int] = []
        self.seen: list[tuple[float, float]] = []
        self.num_forgotten = 0
        self.may_learn = threading.Event()
        self.may_learn.set()

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "weight.json").write_text(json.dumps(self.weight.tolist()))

    def values(self, batch: TrainBatch) -> Ragged:
        return Ragged(np.full(len(batch.tokens.values), float(self.weight[0]), np.float32), batch.tokens.offsets)

    def forward_backward(self, batch: TrainBatch) -> StepSums:
        assert batch.values is not None
        assert batch.returns is not None
        assert self.may_learn.wait(30)
        self.learned += sorted(set(batch.group_ids.tolist()))
        self._groups += sorted(set(batch.group_ids.tolist()))
        self.seen += [(float(batch.values[row][-1]), float(batch.returns[row][-1])) for row in range(len(batch))]
        return StepSums({"value_loss": (2.0, 1.0)})

    def forget_gradients(self) -> None:
        self.num_forgotten += len(self._groups)
        self._groups = []


def config_of(*overrides: str) -> RunConfig:
    raw = {
        "model": {"path": "m"},
        "data": {"type": "generator", "path": "relax.data.arithmetic:addition"},
        "reward": {"type": "exact"},
        "train": {"num_steps": NUM_STEPS},
        "rollout": {"prompts_per_step": SIZE, "max_staleness": 1},
        "algorithm": {"type": "ppo"},
    }
    return make_config(raw, overrides)


class Run:
    """A queue, and a critic that works on it; the test is rollout and actor."""

    def __init__(self, tmp_path: Path, *overrides: str, first_step: int = 0, is_restart: bool = False) -> None:
        self.config = config_of(*overrides)
        rollout = self.config.rollout
        self.core = Core(QueueLimits(SIZE, rollout.max_staleness, NUM_STEPS))
        self.backend = FakeCritic()
        self.role = make_role(
            "critic", self.config, self.core, tmp_path, None, make_critic=lambda _: self.backend, first_step=first_step,
            is_restart=is_restart,
        )  # fmt: skip
        assert isinstance(self.role, CriticRole)
        self._task = RoleTask(self.role)

    async def __aenter__(self) -> "Run":
        await self.core.subscribe("engine")
        await self.core.acknowledge("engine", 0)
        await self._task.start()
        self._task.run()
        return self

    async def __aexit__(self, *error: object) -> None:
        status = self._task.status()
        await self._task.stop()
        await self.core.close()
        assert status["error"] is None

    async def admit(self, count: int) -> list[Ticket]:
        tickets: list[Ticket] = []
        while len(tickets) < count:
            tickets += await self.core.admit(count - len(tickets), 1.0)
        return tickets

    async def put(self, count: int) -> None:
        for ticket in await self.admit(count):
            await self.put_one(ticket)

    async def put_one(self, ticket: Ticket) -> None:
        tokens = Ragged.pack([np.arange(3, dtype=np.int32)] * 2)
        columns: dict[str, Any] = {
            "tokens": tokens,
            "loss_mask": Ragged.pack([np.array([0, 1, 1], np.uint8)] * 2),
            "rollout_logprobs": Ragged.pack([np.zeros(3, np.float32)] * 2),
            "versions": np.full(2, ticket.version, np.int64),
            "reward": np.array([0.0, float(ticket.issue)]),
            "num_sampled": np.array([2, 2]),
            "segments": [[[1, 0]]] * 2,
            "outcome": ["ok"] * 2,
        }
        await self.core.put_group(ticket.issue, columns, 1.0)

    async def train(self, step: int) -> dict[str, Any]:
        """The actor's part of a step; the claimed columns."""
        columns = actor_columns(self.config)
        lease = await self.core.claim("actor", columns, num_groups=SIZE, at_least=SIZE, step=step, wait_s=30.0)
        await self.core.ack([lease.lease_id], step=step)
        await self.publish(step + 1)
        return dict(lease.columns)

    async def publish(self, version: int) -> None:
        await self.core.announce(WeightManifest(version, "shm", "", 0, {}, "", (), ()))
        await self.core.acknowledge("engine", version)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_so():  # noqa: ASYNC110 - what is waited for has no event of its own
                await asyncio.sleep(0.001)

    async def events(self) -> list[dict[str, Any]]:
        return [event for event in await self.core.events(0, 0.0) if event["kind"] == "metrics"]


async def test_values_come_before_the_update_that_learns_their_returns(tmp_path: Path) -> None:
    async with Run(tmp_path) as run:
        for step in range(3):
            await run.put(SIZE)
            columns = await run.train(step)
            assert set(columns["values"].values.tolist()) == {float(step)}
            await run.until(lambda step=step: run.role.step == step + 1 and not run.role.status()["leases"])
        assert run.backend.steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        events = await run.events()
        assert [event["metrics"]["value_loss"] for event in events] == [2.0] * 3
        assert {event["role"] for event in events} == {"critic"}
        assert events[0]["metrics"]["critic/grad_norm"] == 1.0
    assert run.backend.seen[-2:] == [(2.0, 0.0), (2.0, 11.0)], "at the last token the return is the reward"


async def test_the_actor_need_not_wait_until_the_critic_has_learned(tmp_path: Path) -> None:
    """Rows are trained and freed while the critic still holds them; its leases are settled all the same."""
    async with Run(tmp_path) as run:
        run.backend.may_learn.clear()
        await run.put(SIZE)
        await run.train(0)
        assert run.core.rows.groups == {}
        assert run.role.step == 0
        assert run.role.status()["leases"]
        run.backend.may_learn.set()
        await run.until(lambda: run.role.step == 1 and not run.role.status()["leases"])
        assert not run.core.leases.all()
        assert sorted(run.backend.learned) == [0, 1, 2, 3]


async def test_leases_of_rows_that_are_gone_are_settled(tmp_path: Path) -> None:
    async with Run(tmp_path) as run:
        await run.put(2)
        await run.until(lambda: len(run.backend.learned) == 2)
        lease = await run.core.claim("other", ["values"], num_groups=2, at_least=2, wait_s=30.0)
        await run.core.drop(list(lease.row_ids), "gone", reissue=False)
        await run.put(2)
        await run.until(lambda: run.role.step == 1 and not run.role.status()["leases"])
        assert {held.task for held in run.core.leases.all()} <= {"other"}


async def test_a_trainer_that_goes_back_takes_nothing_from_the_critic(tmp_path: Path) -> None:
    async with Run(tmp_path) as run:
        await run.put(SIZE)
        await run.train(0)
        await run.until(lambda: run.role.step == 1)
        await run.put(2)
        await run.until(lambda: len(run.backend.learned) == SIZE + 2)
        await run.core.rewind(0)
        await run.publish(0)
        await run.put(SIZE)
        await run.train(0)
        await run.until(lambda: run.role.step == 2 and len(run.backend.learned) == 2 * SIZE + 2)
        assert sorted(run.backend.learned) == list(range(2 * SIZE + 2))


async def test_on_policy_and_deterministic_it_takes_a_whole_step_at_once(tmp_path: Path) -> None:
    async with Run(tmp_path, "run.deterministic=true", "rollout.max_staleness=0") as run:
        tickets = await run.admit(SIZE)
        for ticket in reversed(tickets):
            assert run.backend.learned == []
            await run.put_one(ticket)
            await asyncio.sleep(0.01)
        await run.until(lambda: run.role.step == 1)
        assert run.backend.learned == [ticket.issue for ticket in tickets]


async def test_it_learns_as_often_as_the_policy(tmp_path: Path) -> None:
    async with Run(tmp_path, "train.updates_per_step=3", "rollout.max_staleness=2") as run:
        await run.put(SIZE)
        await run.until(lambda: run.role.step == 1)
        assert [sorted(groups) for groups in run.backend.steps] == [list(range(SIZE))] * 3


async def learned(tmp_path: Path, num_groups: int, *overrides: str) -> Run:
    """A critic that is stopped after so many groups."""
    async with Run(tmp_path, "rollout.max_staleness=5", *overrides) as run:
        await run.put(num_groups)
        await run.until(lambda: len(run.backend.learned) == num_groups)
        await run.until(lambda: run.role.step == num_groups // SIZE)
    return run


async def start_again(tmp_path: Path, **how: Any) -> int:
    async with Run(tmp_path, **how) as run:
        assert float(run.backend.weight[0]) == run.role.step
        return run.role.step


async def test_what_it_has_learned_is_kept_up_to_the_last_whole_step(tmp_path: Path) -> None:
    run = await learned(tmp_path, 3 * SIZE + 2, "train.checkpoint.every=2")
    assert sorted(path.name for path in (tmp_path / "critic").iterdir()) == ["step_2", "step_3"]
    assert json.loads((tmp_path / "critic" / "step_3" / "weight.json").read_text())[0] == 3
    assert run.backend.num_forgotten == 2
    assert await start_again(tmp_path, is_restart=True, first_step=2) == 3, "in place of one that died: the newest"
    assert await start_again(tmp_path, first_step=2) == 2, "a run that goes on from a checkpoint: the critic of that time"
    assert await start_again(tmp_path, is_restart=True, first_step=9) == 2, "the later one is of another future"


async def test_a_run_that_begins_again_has_a_new_critic(tmp_path: Path) -> None:
    await learned(tmp_path, SIZE)
    assert await start_again(tmp_path) == 0


async def test_a_critic_that_is_only_later_is_better_than_none(tmp_path: Path) -> None:
    await learned(tmp_path, 4 * SIZE, "train.checkpoint.every=1")
    assert await start_again(tmp_path, first_step=1) == 3


def test_inside_the_actor_it_lies_in_the_actors_checkpoint(tmp_path: Path) -> None:
    backends = [FakeCritic(), FakeCritic()]
    first, second = (Critic(config_of(), lambda _, backend=backend: backend) for backend in backends)
    first.load()
    second.load()
    assert first.finish_step()["critic/lr"] == 0.1
    first.save(tmp_path)
    second.load_saved(tmp_path)
    assert float(backends[1].weight[0]) == 1.0
    with pytest.raises(CheckpointError, match=r"no critic in it.*resources\.mode"):
        second.load_saved(tmp_path / "elsewhere")


def test_the_critic_has_its_own_model_and_rate() -> None:
    config = config_of("critic.lr=0.5", "train.schedule=linear")
    assert (critic_config(config).model.path, critic_config(config).train.lr) == ("m", 0.5)
    assert critic_config(config).train.schedule == "linear"
    assert critic_config(config_of("critic.model.path=c")).model.path == "c"
