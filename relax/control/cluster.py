"""The Ray runtime: starts Ray here or joins a cluster, then queue, engines and roles; takes down what it started."""

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError

from relax.bus.client import BusClient, connect
from relax.bus.transfer_queue import TransferQueue
from relax.config.run import RunConfig
from relax.errors import ConfigError, RelaxError, RoleError
from relax.roles.serve import namespace, role_target, start_bus, start_engine
from relax.roles.topology import RoleSpec, engine_names, role_specs
from relax.weights.shared_memory import cleanup_stale

_OBJECT_STORE_BYTES = 128 << 20  # data travels through the transfer queue's arena, not through Ray's store
_STOP_S = 8.0
_ANSWER_S = 30.0
_VITAL = ("raylet", "gcs_server")


class RayRuntime:
    """Queue and engines as Ray actors, roles as Ray Serve deployments, all on this host."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._config_json = config.model_dump_json()
        self._bus: BusClient | None = None
        self._bus_host: Any = None
        self._engines: dict[str, Any] = {}
        self._roles: dict[str, Any] = {}
        self._owns_ray = False
        self._children: set[int] = set()
        self._vital: dict[str, psutil.Process] = {}

    @property
    def bus(self) -> TransferQueue:
        assert self._bus is not None, "the runtime is not started"
        return self._bus

    async def start(self, run_dir: Path, resume: Path | None) -> None:
        specs = role_specs(self.config)
        limit = self.config.services.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                await asyncio.to_thread(self._init_ray, specs)
                await self._deploy(specs, run_dir, resume)
        except TimeoutError:
            raise RoleError(
                f"the roles did not start within services.start_timeout_s = {limit} s; see {run_dir}/log, or raise the limit"
            ) from None
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, RelaxError) else RoleError(f"{type(cause).__name__}: {cause}")) from error
        except RayActorError as error:
            raise RoleError(f"a process of the run died while it started (killed, or out of memory): {error}") from error

    async def _deploy(self, specs: tuple[RoleSpec, ...], run_dir: Path, resume: Path | None) -> None:
        node = {f"node:{ray.util.get_node_ip_address()}": 0.001}
        self._bus_host = start_bus(self._config_json, run_dir, resume, node)
        address = await self._bus_host.start.remote()
        self._bus = await connect(address, name="controller")
        for name in engine_names(self.config):
            self._engines[name] = start_engine(name, self.config, self._config_json, run_dir, address, node)
        starts = [asyncio.ensure_future(engine.start.remote()) for engine in self._engines.values()]
        targets = [role_target(spec, self._config_json, run_dir, address, resume, node) for spec in specs]
        handles = await asyncio.to_thread(self._serve, targets)
        self._roles = {spec.name: handle for spec, handle in zip(specs, handles, strict=True)}
        starts += [asyncio.ensure_future(_respond(handle.start.remote())) for handle in self._roles.values()]
        await asyncio.gather(*starts)
        await asyncio.gather(*(engine.run.remote() for engine in self._engines.values()))
        await asyncio.gather(*(_respond(handle.run.remote()) for handle in self._roles.values()))

    def _init_ray(self, specs: tuple[RoleSpec, ...]) -> None:
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        address = self.config.run.ray_address
        options: dict[str, Any] = {
            "namespace": namespace(self.config),
            "runtime_env": {"env_vars": _environment()},
            "log_to_driver": False,
            "logging_level": "error",
        }
        if address is None:
            needed = sum(spec.num_cpus for spec in specs) + self.config.rollout.num_engines * self.config.resources.engine_cpus
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, int(needed + 0.999)),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                **options,
            )
        else:
            _join(address, options)
        self._owns_ray = address is None
        started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        self._children = {child.pid for child in started}
        if self._owns_ray:
            self._vital = {name: child for child in started if (name := child.name()) in _VITAL}

    def _serve(self, targets: list[Any]) -> list[Any]:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # what a death means is said by the controller
        port = self.config.services.http_port or _free_port()
        _refuse_taken(port)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        return list(serve.run_many(targets))

    async def status(self) -> dict[str, dict[str, Any]]:
        if lost := self._lost_process():  # without it calls wait for ever, and the roles end by and by
            return {"ray": {"role": "ray", "error": lost}}
        names = [*self._engines, *self._roles]
        calls: list[Any] = [engine.status.remote() for engine in self._engines.values()]
        calls += [_respond(handle.status.remote()) for handle in self._roles.values()]
        asked = [asyncio.ensure_future(asyncio.wait_for(call, _ANSWER_S)) for call in calls]
        while asked and (await asyncio.wait(asked, timeout=1.0))[1]:
            if lost := self._lost_process():
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
                return {"ray": {"role": "ray", "error": lost}}
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return {
            name: {"role": name, "error": _no_answer(name, answer)} if isinstance(answer, BaseException) else answer
            for name, answer in zip(names, answers, strict=True)
        }

    def _lost_process(self) -> str | None:
        """What happened to Ray itself, when we started it and one of the processes that it cannot do without is gone."""
        for name, process in self._vital.items():
            if not _is_alive(process):
                return f"Ray's {name} (process {process.pid}) died (killed, or out of memory)"
        return None

    async def stop(self) -> None:
        try:
            async with asyncio.timeout(_STOP_S):
                await asyncio.gather(
                    *(_respond(handle.stop.remote()) for handle in self._roles.values()), return_exceptions=True
                )
                await asyncio.gather(*(engine.stop.remote() for engine in self._engines.values()), return_exceptions=True)
                if self._bus is not None:
                    await self._bus.close()
                if self._bus_host is not None:
                    await asyncio.gather(self._bus_host.stop.remote(), return_exceptions=True)
        except TimeoutError:
            pass  # what does not stop by itself ends with its process
        await asyncio.to_thread(self._shutdown)
        cleanup_stale()

    def _shutdown(self) -> None:
        if not ray.is_initialized():
            return
        if self._owns_ray:
            alive = _family(self._children)
            ray.shutdown()
            _end(alive)
            return
        for name in self._roles:
            serve.delete(name, _blocking=False)
        for actor in [*self._engines.values(), self._bus_host]:
            if actor is not None:
                ray.kill(actor)
        ray.shutdown()


def _join(address: str, options: dict[str, Any]) -> None:
    try:
        ray.init(address=address, **options)
    except ConnectionError as error:
        raise ConfigError(
            f"run.ray_address = {address!r}: cannot join: {error}. Is that cluster up, and reachable from here? A "
            "cluster that Ray started with tokens, its default, is joined with RAY_AUTH_MODE=token in the environment"
        ) from error


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _no_answer(name: str, error: BaseException) -> str:
    if isinstance(error, RayActorError):
        return f"the process of {name} died (killed, or out of memory)"
    return f"{name} does not answer: {type(error).__name__}: {error}"


async def _respond(response: Any) -> Any:
    return await response


def _environment() -> dict[str, str]:
    """What every process of the run inherits: no hub, one thread, and the user's own modules importable."""
    path = os.pathsep.join(part for part in (str(Path.cwd()), os.environ.get("PYTHONPATH", "")) if part)
    return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"services.http_port = {port}: the port is in use ({error}); choose another, or 0 for a free one"
            ) from error


def _family(pids: set[int]) -> list[psutil.Process]:
    """The processes that Ray started for us, and their children."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            found |= {member.pid: member for member in (process, *process.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def _end(processes: list[psutil.Process]) -> None:
    """Ends what is still there after Ray's own shutdown, by process id."""
    _, alive = psutil.wait_procs(processes, timeout=2)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=2)
