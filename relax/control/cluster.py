"""The Ray runtime: starts Ray here or joins a cluster, then queue, engines and roles; takes down what it started."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from ray.exceptions import RayActorError, RayError, RayTaskError

from relax.bus.client import BusClient, connect
from relax.bus.transfer_queue import TransferQueue
from relax.config.faults import FaultEvent
from relax.config.run import RunConfig
from relax.control.part import Part
from relax.control.processes import is_alive, kill, process_of
from relax.control.ray_session import RaySession, node_of_this_host
from relax.control.runtime import QUEUE
from relax.errors import RelaxError, RoleError
from relax.roles.serve import RoleStart, role_target, start_bus, start_engine
from relax.roles.topology import RoleSpec, answering_roles, devices_of, engine_pools, role_specs
from relax.weights.shared_memory import cleanup_stale

_STOP_S = 8.0
_LOOK_S = 0.1
_SHUTDOWN_S = 30.0


class RayRuntime:
    """Queue and engines as Ray actors, roles as Ray Serve deployments, all on this host."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._config_json = config.model_dump_json()
        self._session = RaySession(config)
        self._bus: BusClient | None = None
        self._bus_host: Any = None
        self._bus_process: psutil.Process | None = None
        self._address = ""
        self._node: dict[str, float] = {}
        self._run_dir = Path()
        self._parts: dict[str, Part] = {}

    @property
    def bus(self) -> TransferQueue:
        assert self._bus is not None, "the runtime is not started"
        return self._bus

    async def start(self, run_dir: Path, resume: Path | None) -> None:
        limit = self.config.services.start_timeout_s
        self._run_dir = run_dir
        try:
            with _readable("a process of the run died while it started"):
                async with asyncio.timeout(limit):
                    await asyncio.to_thread(self._session.open, self._num_cpus())
                    await self._deploy(resume)
        except TimeoutError:
            raise RoleError(
                f"the roles did not start within services.start_timeout_s = {limit:g} s; see {run_dir}/log, or raise the limit"
            ) from None

    def _num_cpus(self) -> float:
        roles = sum(spec.num_cpus for spec in role_specs(self.config))
        return roles + sum(devices_of(self.config, name)[0] for name in self._engine_names())

    def _engine_names(self) -> list[str]:
        return [name for names in engine_pools(self.config).values() for name in names]

    async def _deploy(self, resume: Path | None) -> None:
        self._node = node_of_this_host()
        self._bus_host = start_bus(self._config_json, self._run_dir, resume, self._node)
        self._address, pid = await self._bus_host.start.remote()
        self._bus_process = process_of(pid)
        self._bus = await connect(self._address, name="controller")
        engines = [
            Part(
                name,
                start_engine(name, self.config, self._config_json, self._run_dir, self._address, self._node),
                is_engine=True,
            )
            for name in self._engine_names()
        ]
        starts = [asyncio.ensure_future(_started(part)) for part in engines]
        specs = role_specs(self.config)
        handles = await asyncio.to_thread(self._session.serve, [self._target(spec) for spec in specs])
        roles = [Part(spec.name, handle, is_engine=False) for spec, handle in zip(specs, handles, strict=True)]
        self._parts = {part.name: part for part in (*engines, *roles)}
        begin = RoleStart(resume, services=self._services())
        starts += [asyncio.ensure_future(_started(part, begin)) for part in roles]
        await asyncio.gather(*starts)
        for part in self._parts.values():
            await part.handle.run.remote()

    def _services(self) -> dict[str, str]:
        return {name: f"{self._session.url}/{name}" for name in answering_roles(self.config)}

    def _target(self, spec: RoleSpec) -> Any:
        return role_target(spec, self._config_json, self._run_dir, self._address, self._node)

    # -- watching -----------------------------------------------------------------------------------------------------
    async def status(self) -> dict[str, dict[str, Any]]:
        if lost := self._lost():
            return lost
        parts = list(self._parts.values())
        answers = await asyncio.gather(*(part.status() for part in parts))
        return self._lost() or {part.name: answer for part, answer in zip(parts, answers, strict=True)}

    def _lost(self) -> dict[str, dict[str, Any]]:
        """What all others need, when it is gone: calls to them would wait for ever."""
        if text := self._session.lost_process():
            return {"ray": {"role": "ray", "error": text, "error_kind": "ray"}}
        if self._bus_process is not None and not is_alive(self._bus_process):
            text = f"the transfer queue's process {self._bus_process.pid} died (killed, or out of memory)"
            return {QUEUE: {"role": QUEUE, "error": text, "error_kind": "queue"}}
        return {}

    # -- mending ------------------------------------------------------------------------------------------------------
    async def restart(self, name: str, resume: Path | None, first_step: int, *, is_restart: bool) -> None:
        part = self._parts[name]
        with _readable(f"the process of {name} died while it started again"):
            await self.end(name)
            part.forget()
            await self._replaced(part)
            begin = RoleStart(resume, first_step, is_restart, self._services())
            await (_started(part) if part.is_engine else _started(part, begin))
            await part.handle.run.remote()

    async def end(self, name: str) -> None:
        if name == QUEUE:
            if self._bus_process is not None:
                kill(self._bus_process)
            return
        part = self._parts[name]
        part.kill()
        await part.ended()

    async def _replaced(self, part: Part) -> None:
        """Waits for the process that Ray or Serve puts in the place of a dead one: it has not started its work yet."""
        while True:
            await asyncio.sleep(_LOOK_S)
            status = await part.status()
            if status.get("activity") == "not started":
                return

    async def disturb(self, name: str, event: FaultEvent) -> None:
        with _readable(f"the process of {name} died"):
            await self._parts[name].handle.disturb.remote(event.model_dump())

    # -- the end ------------------------------------------------------------------------------------------------------
    async def stop(self) -> None:
        if not self._lost():
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._stop_parts()
            except TimeoutError:
                pass  # what does not stop by itself ends with its process
        if self._bus is not None:
            await self._bus.close()
        roles = [part.name for part in self._parts.values() if not part.is_engine]
        actors = [part.handle for part in self._parts.values() if part.is_engine]
        actors += [self._bus_host] if self._bus_host is not None else []
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await asyncio.to_thread(self._session.close, roles, actors)
        except TimeoutError:
            raise RoleError(f"Ray could not be shut down within {_SHUTDOWN_S:g} s") from None
        self._parts, self._bus, self._bus_host, self._bus_process = {}, None, None, None
        self._session = RaySession(self.config)
        cleanup_stale()

    async def _stop_parts(self) -> None:
        for engines in (False, True):
            calls = [
                part.handle.stop.remote() for part in self._parts.values() if part.is_engine == engines and not part.is_dead
            ]
            await asyncio.gather(*(_respond(call) for call in calls), return_exceptions=True)
        if self._bus_host is not None:
            await asyncio.gather(_respond(self._bus_host.stop.remote()), return_exceptions=True)


async def _started(part: Part, *arguments: Any) -> None:
    part.lives_in(await part.handle.start.remote(*arguments))


async def _respond(response: Any) -> Any:
    return await response


@contextlib.contextmanager
def _readable(died: str) -> Iterator[None]:
    """Turns what Ray raises into the error that it carries, or into one for people."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, RelaxError) else RoleError(f"{type(cause).__name__}: {cause}")) from error
    except RayActorError as error:
        raise RoleError(f"{died} (killed, or out of memory): {error}") from error
    except RayError as error:
        raise RoleError(f"{died}: {type(error).__name__}: {error}") from error
