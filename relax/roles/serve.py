"""The only file that turns a role into a Ray Serve deployment, and queue and engines into Ray actors.

Every role is an application of its own, with `GET /{role}/status` on the run's port. The transfer queue's core lives in a Ray
actor that serves its ZeroMQ socket; engines are named Ray actors, which the rollout role reaches by name. Roles are built when
`start` is called and work from `run` on, so a replica that was replaced does nothing until the controller has seen it. Each
process ends, or has its application deleted, when the controller's process is gone.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from relax.bus.client import BusClient, connect
from relax.bus.processes import ProcessId, this_process
from relax.bus.server import BusServer
from relax.bus.transfer_queue import TransferQueue
from relax.config.faults import FaultEvent
from relax.config.run import RunConfig
from relax.engines.engine import Engine, EngineStats
from relax.engines.pool import EnginePool
from relax.errors import EngineError, WeightSyncError
from relax.observe.log import log_to_file
from relax.roles.build import make_core, make_engine, make_role
from relax.roles.disturbance import Disturbance, slowed
from relax.roles.engine_host import EngineHost
from relax.roles.role import RoleTask
from relax.roles.topology import RoleSpec, devices_of, engine_pools
from relax.shared_arrays import Loan, borrow, lend
from relax.types import Completion, GenerateRequest, WeightManifest

_MANY = 10_000  # calls in flight: the bounds are the queue's and the engines', never the transport's


@dataclass(frozen=True, slots=True)
class RoleStart:
    """From where a role starts: a checkpoint, what it takes as done (by default what that says), whether one ran before it.

    `services`: where the roles that answer requests are, by name.
    """

    resume: Path | None = None
    first_step: int | None = None
    is_restart: bool = False
    services: Mapping[str, str] = field(default_factory=dict)


class BusHost:
    """Ray actor: the transfer queue's core and its socket."""

    def __init__(self, config_json: str, run_dir: str, resume: str | None) -> None:
        log_to_file(Path(run_dir), "bus")
        self._config = RunConfig.model_validate_json(config_json)
        self._run_dir, self._resume = Path(run_dir), Path(resume) if resume else None
        self._server: BusServer | None = None

    async def start(self) -> tuple[str, int]:
        """Serves the socket; returns its address, and the number of the process."""
        self._server = BusServer(make_core(self._config, self._run_dir, self._resume))
        await self._server.start()
        return self._server.address, os.getpid()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()


class Connection:
    """A process's own connection to the queue, as slow and lossy as a rehearsal wants it."""

    def __init__(self, name: str, config: RunConfig, address: str) -> None:
        self._name, self._config, self._address = name, config, address
        self.disturbance = Disturbance(config.faults.seed)
        self._client: BusClient | None = None

    async def open(self) -> TransferQueue:
        kinds = {event.kind for event in self._config.faults.events if event.target == self._name}
        if "lose_messages" in kinds:
            self._client = await connect(self._address, name=self._name, drop=self.disturbance.loses_message)
        else:
            self._client = await connect(self._address, name=self._name)
        return slowed(self._client, self.disturbance) if "delay" in kinds else self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


class EngineActor:
    """Ray actor: one engine host with its own connection to the queue."""

    def __init__(self, name: str, config_json: str, run_dir: str, address: str) -> None:
        log_to_file(Path(run_dir), name)
        self._name = name
        self._config = RunConfig.model_validate_json(config_json)
        self._connection = Connection(name, self._config, address)
        self._host: EngineHost | None = None
        self._task: RoleTask | None = None

    async def start(self) -> int:
        """Loads the engine; returns the number of the process."""
        bus = await self._connection.open()
        host = EngineHost(self._name, self._config, bus, make_engine, self._connection.disturbance)
        task = RoleTask(host)
        await task.start()
        self._host, self._task = host, task
        return os.getpid()

    async def run(self) -> None:
        assert self._task is not None
        self._task.run()

    @property
    def _engine(self) -> Engine:
        if self._host is None or self._task is None:
            raise EngineError(f"{self._name} is being started")
        return self._host.engine

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        return await self._engine.generate(with_borrowed(request))

    async def progress(self, request_ids: list[str]) -> dict[str, list[Completion]]:
        return await self._engine.progress(request_ids)

    async def abort(self, request_ids: list[str]) -> None:
        await self._engine.abort(request_ids)

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def disturb(self, event: dict[str, Any]) -> None:
        self._connection.disturbance.add(FaultEvent.model_validate(event))

    async def status(self) -> dict[str, Any]:
        return self._task.status() if self._task else _not_started(self._name)

    async def stop(self) -> None:
        if self._task is not None:
            await self._task.stop()
        await self._connection.close()


class RayEngine:
    """An engine in another process, behind the `Engine` protocol.

    A dead actor is an `EngineError` until Ray has put a new process in its place and the controller has started that. Weights
    come and go by the actor's own connection to the queue, never through here.
    """

    def __init__(self, name: str, namespace: str) -> None:
        self._name, self._namespace = name, namespace
        self._actor: Any = None

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        completions: list[Completion] = await self._call("generate", with_lent(request))
        return completions

    async def progress(self, request_ids: Sequence[str]) -> dict[str, list[Completion]]:
        found: dict[str, list[Completion]] = await self._call("progress", list(request_ids))
        return found

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call("abort", list(request_ids))

    async def load_weights(self, manifest: WeightManifest) -> float:
        raise EngineError(f"{self._name} takes version {manifest.version} when the transfer queue announces it, not from here")

    async def sleep(self) -> None:
        raise EngineError(f"{self._name} gives its weights up when the transfer queue recalls them, not from here")

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._call("stats")
        return stats

    async def close(self) -> None:
        """The actor belongs to the runtime, which stops it."""

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(ray.get_actor, self._name, namespace=self._namespace)
            return await getattr(self._actor, method).remote(*arguments)
        except ValueError as error:  # there is none of this name
            raise EngineError(f"{self._name} is being replaced") from error
        except RayActorError as error:
            self._actor = None
            raise EngineError(f"{self._name} died: {str(error).splitlines()[0]}") from error
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineError | WeightSyncError):
                raise cause from error
            raise EngineError(f"{self._name}: {cause}") from error


@serve.deployment
class RoleDeployment:
    """Serve deployment: one role with its own connection to the queue."""

    def __init__(self, name: str, config_json: str, run_dir: str, address: str, controller: tuple[int, int]) -> None:
        log_to_file(Path(run_dir), name)
        self._name, self._run_dir = name, Path(run_dir)
        self._config = RunConfig.model_validate_json(config_json)
        self._connection = Connection(name, self._config, address)
        self._controller = ProcessId(*controller)
        self._task: RoleTask | None = None

    async def start(self, begin: RoleStart) -> int:
        """Builds and loads the role; returns the number of the process."""
        pools = {
            pool: EnginePool({name: RayEngine(name, namespace(self._config)) for name in names})
            for pool, names in engine_pools(self._config).items()
        }
        bus = await self._connection.open()
        task = RoleTask(
            make_role(
                self._name,
                self._config,
                bus,
                self._run_dir,
                begin.resume,
                pools,
                first_step=begin.first_step,
                is_restart=begin.is_restart,
                services=begin.services,
            )
        )
        await task.start()
        self._task = task
        return os.getpid()

    async def run(self) -> None:
        assert self._task is not None
        self._task.run()

    async def disturb(self, event: dict[str, Any]) -> None:
        self._connection.disturbance.add(FaultEvent.model_validate(event))

    async def status(self) -> dict[str, Any]:
        return self._task.status() if self._task else _not_started(self._name)

    async def stop(self) -> None:
        if self._task is not None:
            await self._task.stop()
        await self._connection.close()

    async def check_health(self) -> None:
        """Asked by Serve every second. In a cluster that goes on, a deployment outlives its controller: it deletes itself."""
        if not self._controller.is_alive:
            await asyncio.to_thread(serve.delete, self._name, _blocking=False)

    async def __call__(self, request: Request) -> Response:
        page = request.url.path.strip("/").removeprefix(self._name).strip("/")
        if self._task is not None:
            status, said = await self._task.answer(request.method, page, await request.body())
        elif page == "status":
            status, said = 200, await self.status()
        else:
            status, said = 503, {"error": f"{self._name} is being started"}
        return JSONResponse(said, status_code=status)


def role_target(spec: RoleSpec, config_json: str, run_dir: Path, address: str, node: dict[str, float]) -> serve.RunTarget:
    """What `serve.run_many` needs to deploy a role; `node` pins it to this host."""
    made: Any = RoleDeployment  # the decorator makes it a deployment, of which the type checker knows nothing
    deployment = made.options(
        name=spec.name,
        num_replicas=1,
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=1,
        health_check_period_s=1,  # a dead replica is replaced as soon as it is noticed
        health_check_timeout_s=600,  # a silent one is the controller's to judge
        ray_actor_options={"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus, "resources": node},
    )
    bound = deployment.bind(spec.name, config_json, str(run_dir), address, tuple(this_process()))
    return serve.RunTarget(bound, name=spec.name, route_prefix=f"/{spec.name}")


def start_bus(config_json: str, run_dir: Path, resume: Path | None, node: dict[str, float]) -> Any:
    """The queue's Ray actor, not yet serving."""
    actor = ray.remote(BusHost).options(name="bus", num_cpus=0, max_concurrency=_MANY, resources=node)
    return actor.remote(config_json, str(run_dir), str(resume) if resume else None)


def start_engine(name: str, config: RunConfig, config_json: str, run_dir: Path, address: str, node: dict[str, float]) -> Any:
    """An engine's Ray actor, not yet started."""
    num_cpus, num_gpus = devices_of(config, name)
    actor = ray.remote(EngineActor).options(
        name=name,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        max_concurrency=_MANY,
        max_restarts=-1,  # Ray puts a new process in the place of a dead one; the controller starts it, as often as it sees fit
        resources=node,
    )
    return actor.remote(name, config_json, str(run_dir), address)


def with_lent(request: GenerateRequest) -> GenerateRequest:
    """For an engine in another process on this host: features stay where they lie, however often they are asked about."""
    features: dict[str, Any] = {name: lend(array) or array for name, array in request.features.items()}
    return replace(request, features=features) if features else request


def with_borrowed(request: GenerateRequest) -> GenerateRequest:
    """The request as it was, in the engine's process. Raises `EngineError` when whoever sent it is gone."""
    try:
        features = {name: borrow(lent) if isinstance(lent, Loan) else lent for name, lent in request.features.items()}
    except OSError as error:
        raise EngineError(f"request {request.request_id!r}: the features of its media cannot be mapped: {error}") from error
    return replace(request, features=features) if features else request


def _not_started(name: str) -> dict[str, Any]:
    return {"role": name, "activity": "not started", "running": False, "error": None, "pid": os.getpid()}


def namespace(config: RunConfig) -> str:
    """Ray namespace of a run: engines are found in it by name."""
    return f"relax-{config.run.name}"
