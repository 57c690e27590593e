"""A whole run on the real queue: producers, engines, column roles, actor, and whatever befalls them.

producers: admit -> generate on an engine -> forfeit or put      column roles, receivers of weights: relax's own code
actor: claim by step -> train -> acknowledge -> publish          controller: kills, restarts, rewinds, restores
"""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from simulation import virtual_time
from simulation.client import Client
from simulation.engines import SimEngine, SimPool
from simulation.judge import Judge
from simulation.roles import Doubled, Evaluation, Producer, SimActor, with_leases
from simulation.scenario import Scenario

from relax.bus.core import Core
from relax.bus.ledger import Ledger
from relax.bus.sessions import Owners
from relax.bus.snapshot import restore
from relax.errors import StaleHandle
from relax.roles.columns import ColumnRole
from relax.weights.follower import follow


@dataclass(slots=True)
class Process:
    """Something that can be killed. `client`: its connection; `task`: its work."""

    client: Client
    task: "asyncio.Task[None]"


class Run:
    """One scenario. `run` returns when the last step is trained and the books are checked."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.judge = scenario, Judge(scenario)
        self.rng = random.Random(f"run {scenario.seed}")
        self.ledger_path, self.snapshot_path = folder / "ledger.sqlite", folder / "queue.bin"
        self.limits = scenario.limits
        self.core, self.owners = Core(self.limits), Owners()
        self.ledger: Ledger | None = None
        self.processes: dict[str, Process] = {}
        self.pool = SimPool(self.rng)
        self.life = 0
        self.num_faults = self.num_engines_made = 0
        self.crash: asyncio.Future[None] | None = None  # a failure that no fault explains
        self._later: set[asyncio.Task[None]] = set()
        self.train_s = self.wait_s = 0.0

    async def run(self) -> None:
        scenario, loop = self.scenario, asyncio.get_running_loop()
        self.crash = loop.create_future()
        self._open_core(fresh=True)
        self._start_all()
        disturber = loop.create_task(self._disturb())
        try:
            while len(self.judge.now.steps) < scenario.num_steps or "actor" in self.processes:
                actor = self.processes.get("actor")
                waiting = {self.crash, *([actor.task] if actor else [])}
                await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if self.crash.done():
                    self.crash.result()
                if actor is not None and actor.task.done() and self.processes.get("actor") is actor:
                    await self._actor_ended(actor)
            await self._wind_up()
        except (TimeoutError, asyncio.CancelledError):
            raise AssertionError(f"the run hangs; waits: {self.core.waits.report()}; {self.core.tickets.counts()}") from None
        finally:
            disturber.cancel()
            await self._stop_all()
            self._close_ledger()
        self.judge.check_end(self.core, str(self.ledger_path))

    # -- life of processes --------------------------------------------------------------------------------------------
    def _open_core(self, *, fresh: bool) -> None:
        clock = cast(virtual_time.VirtualLoop, asyncio.get_running_loop())
        self.owners, self.ledger = Owners(), Ledger(self.ledger_path)
        if fresh:
            self.core = Core(self.limits, clock=clock, ledger=self.ledger)
        else:
            self.core = restore(self.snapshot_path, self.limits, clock=clock, ledger=self.ledger)

    def _close_ledger(self) -> None:
        assert self.ledger is not None
        self.ledger._db.rollback()  # as when its process is killed: what was not committed never was
        self.ledger._db.close()

    def _client(self, name: str) -> Client:
        return Client(self.core, self.owners, self.judge, name, self.rng)

    def _start_all(self) -> None:
        for index in range(self.scenario.num_engines):
            self._start_engine(f"engine-{index}")
        for index in range(self.scenario.num_column_roles):
            self._start_column_role(f"advantages-{index}")
        for index in range(self.scenario.num_producers):
            self._start_producer(f"rollout-{index}")
        if self.scenario.takes_turns:
            self._start_evaluation("evaluation")
        self._start_actor()

    def _start(self, name: str, client: Client, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(self._look_at)
        self.processes[name] = Process(client, task)

    def _look_at(self, task: "asyncio.Task[None]") -> None:
        """Errors that are nobody's fault end the simulation."""
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, StaleHandle):
            assert self.crash is not None
            if not self.crash.done():
                self.crash.set_exception(error)

    def _start_engine(self, name: str) -> None:
        client = self._client(name)
        engine = SimEngine(name, self.scenario.token_s * self.rng.uniform(0.7, 1.4), self.rng, self.scenario.rejects)
        give_up = engine.sleep if self.scenario.takes_turns else None
        self.pool.engines[name] = engine
        self._start(name, client, follow(cast(Any, client), name, engine.load_weights, give_up=give_up, max_failures=50))

    def _start_column_role(self, name: str) -> None:
        client = self._client(name)
        role = ColumnRole("advantages", cast(Any, None), cast(Any, client), Doubled())
        self._start(name, client, with_leases(role))

    def _start_producer(self, name: str) -> None:
        client = self._client(name)
        self._start(name, client, Producer(self, client).run())

    def _start_evaluation(self, name: str) -> None:
        client = self._client(name)
        self._start(name, client, Evaluation(self, client).run())

    def _start_actor(self) -> None:
        client = self._client("actor")
        self._start("actor", client, with_leases(SimActor(self, client, len(self.judge.now.steps), self.life)))

    async def _end(self, name: str) -> None:
        """Kills a process: its work stops where it is, its session ends."""
        process = self.processes.pop(name)
        if name in self.pool.engines:
            self.pool.engines.pop(name).die()
        process.task.cancel()
        await asyncio.gather(process.task, return_exceptions=True)
        process.client.session.end()

    async def _stop_all(self) -> None:
        for task in list(self._later):
            task.cancel()
        for name in list(self.processes):
            await self._end(name)

    def _restart_later(self, start: Any, name: str) -> None:
        async def later() -> None:
            core = self.core
            await asyncio.sleep(self.rng.uniform(0.1, 2.0))
            if core is self.core:
                start(name)

        task = asyncio.get_running_loop().create_task(later())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def _wind_up(self) -> None:
        """The last step is trained: the producers find out by themselves."""
        producers = [process.task for name, process in self.processes.items() if name.startswith("rollout")]
        await asyncio.gather(*producers)

    # -- faults -------------------------------------------------------------------------------------------------------
    async def _disturb(self) -> None:
        while self.num_faults < self.scenario.most_faults:
            await asyncio.sleep(self.rng.expovariate(1 / self.scenario.fault_every_s))
            fault = self.rng.choice(self.scenario.faults)
            self.num_faults += 1
            await getattr(self, f"_{fault}")()

    def _pick(self, kind: str) -> str | None:
        return self.rng.choice(sorted(name for name in self.processes if name.startswith(kind)) or [None])

    async def _kill_producer(self) -> None:
        if name := self._pick("rollout"):
            await self._end(name)
            self._restart_later(self._start_producer, name)

    async def _kill_column_role(self) -> None:
        if name := self._pick("advantages"):
            await self._end(name)
            self._restart_later(self._start_column_role, name)

    async def _kill_evaluation(self) -> None:
        if name := self._pick("evaluation"):
            await self._end(name)
            self._restart_later(self._start_evaluation, name)

    async def _kill_engine(self) -> None:
        if name := self._pick("engine"):
            await self._end(name)
            self._restart_later(self._start_engine, name)

    async def _add_engine(self) -> None:
        if len(self.pool.engines) < 4:
            self.num_engines_made += 1
            self._start_engine(f"engine-more-{self.num_engines_made}")

    async def _remove_engine(self) -> None:
        if len(self.pool.engines) > 1 and (name := self._pick("engine")):
            await self._end(name)

    async def _freeze(self) -> None:
        """A process stands still, for longer than its leases last, and goes on."""
        if name := self._pick(self.rng.choice(("rollout", "advantages", "engine", "actor"))):
            now = asyncio.get_running_loop().time()
            self.processes[name].client.frozen_until = now + self.scenario.lease_s * self.rng.uniform(0.5, 2.0)

    async def _kill_actor(self) -> None:
        if "actor" in self.processes:
            await self._end("actor")
            await self._rewind()

    async def _actor_ended(self, actor: Process) -> None:
        """It came to its end, or lost its leases."""
        failed = actor.task.exception() is not None
        await self._end("actor")
        if failed:
            await self._rewind()

    async def _rewind(self) -> None:
        """As the controller does: the queue goes back to the checkpoint, then another actor starts."""
        await self.core.rewind(self.judge.checkpoint_step)
        self.judge.rewound()
        self.life += 1
        self._restart_later(lambda _: self._start_actor(), "actor")

    async def _kill_everything(self) -> None:
        """The machine goes down: what is on disk is what there is."""
        if "actor" not in self.processes:
            return  # the run is ending, or another fault is being dealt with
        for task in list(self._later):
            task.cancel()
        tasks = [process.task for process in self.processes.values()]
        engines = list(self.pool.engines.values())
        self.processes.clear()
        self.pool.engines.clear()
        for task in tasks:
            task.cancel()
        for engine in engines:
            engine.die()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close_ledger()
        self.life += 1
        self.judge.restored()
        if self.scenario.bounds_on_resume:
            self.judge.bound = self.rng.choice(self.scenario.bounds_on_resume)
            self.limits = replace(self.limits, max_staleness=self.judge.bound)
        self._open_core(fresh=not self.snapshot_path.exists())
        self._start_all()


def simulate(scenario: Scenario, folder: Path) -> Run:
    """Runs the scenario in virtual time; raises `AssertionError` at the first broken promise, also when it hangs."""
    folder.mkdir(parents=True, exist_ok=True)
    run: list[Run] = []

    async def work() -> None:
        run.append(Run(scenario, folder))
        await run[0].run()

    virtual_time.run(work(), scenario.deadline_s)
    return run[0]
