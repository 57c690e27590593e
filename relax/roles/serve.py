"""The only file that turns a role into a Ray Serve deployment, and queue and engines into Ray actors.

Every role is an application of its own, with `GET /{role}/status` on the run's port. The transfer queue's core lives in a Ray
actor that serves its ZeroMQ socket; engines are named Ray actors, which the rollout role reaches by name. Roles are built when
`start` is called and work from `run` on, so a replica that was replaced does nothing until the controller has seen it.
"""

from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from relax.bus.client import BusClient, connect
from relax.bus.server import BusServer
from relax.config.run import RunConfig
from relax.engines.engine import EngineStats
from relax.engines.pool import EnginePool
from relax.errors import EngineError, WeightSyncError
from relax.observe.log import log_to_file
from relax.roles.build import make_core, make_engine, make_role
from relax.roles.engine_host import EngineHost
from relax.roles.role import RoleTask
from relax.roles.topology import RoleSpec, engine_names
from relax.types import Completion, GenerateRequest, WeightManifest

_MANY = 10_000  # calls in flight: the bounds are the queue's and the engines', never the transport's


class BusHost:
    """Ray actor: the transfer queue's core and its socket."""

    def __init__(self, config_json: str, run_dir: str, resume: str | None) -> None:
        log_to_file(Path(run_dir), "bus")
        self._config = RunConfig.model_validate_json(config_json)
        self._run_dir, self._resume = Path(run_dir), Path(resume) if resume else None
        self._server: BusServer | None = None

    async def start(self) -> str:
        """Serves the socket and returns its address."""
        self._server = BusServer(make_core(self._config, self._run_dir, self._resume))
        await self._server.start()
        return self._server.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()


class EngineActor:
    """Ray actor: one engine host with its own connection to the queue."""

    def __init__(self, name: str, config_json: str, run_dir: str, address: str) -> None:
        log_to_file(Path(run_dir), name)
        self._name, self._address = name, address
        self._config = RunConfig.model_validate_json(config_json)
        self._bus: BusClient | None = None
        self._task: RoleTask | None = None

    async def start(self) -> None:
        self._bus = await connect(self._address, name=self._name)
        self._host = EngineHost(self._name, self._config, self._bus, make_engine)
        self._task = RoleTask(self._host)
        await self._task.start()

    async def run(self) -> None:
        assert self._task is not None
        self._task.run()

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        return await self._host.engine.generate(request)

    async def abort(self, request_ids: list[str]) -> None:
        await self._host.engine.abort(request_ids)

    async def load_weights(self, manifest: WeightManifest) -> float:
        return await self._host.engine.load_weights(manifest)

    async def stats(self) -> EngineStats:
        return await self._host.engine.stats()

    async def status(self) -> dict[str, Any]:
        return self._task.status() if self._task else {"role": self._name, "activity": "not started", "error": None}

    async def stop(self) -> None:
        if self._task is not None:
            await self._task.stop()
        if self._bus is not None:
            await self._bus.close()


class RayEngine:
    """An engine in another process, behind the `Engine` protocol. A dead actor is an `EngineError`."""

    def __init__(self, name: str, namespace: str) -> None:
        self._name = name
        self._actor = ray.get_actor(name, namespace=namespace)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        completions: list[Completion] = await self._call("generate", request)
        return completions

    async def abort(self, request_ids: Any) -> None:
        await self._call("abort", list(request_ids))

    async def load_weights(self, manifest: WeightManifest) -> float:
        return float(await self._call("load_weights", manifest))

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._call("stats")
        return stats

    async def close(self) -> None:
        """The actor belongs to the runtime, which stops it."""

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayActorError as error:
            raise EngineError(f"{self._name} died: {str(error).splitlines()[0]}") from error
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineError | WeightSyncError):
                raise cause from error
            raise EngineError(f"{self._name}: {cause}") from error


@serve.deployment
class RoleDeployment:
    """Serve deployment: one role with its own connection to the queue."""

    def __init__(self, name: str, config_json: str, run_dir: str, address: str, resume: str | None) -> None:
        log_to_file(Path(run_dir), name)
        self._name, self._address = name, address
        self._run_dir, self._resume = Path(run_dir), Path(resume) if resume else None
        self._config = RunConfig.model_validate_json(config_json)
        self._bus: BusClient | None = None
        self._task: RoleTask | None = None

    async def start(self) -> None:
        engines = None
        if self._name == "rollout":
            engines = EnginePool({name: RayEngine(name, namespace(self._config)) for name in engine_names(self._config)})
        self._bus = await connect(self._address, name=self._name)
        role = make_role(self._name, self._config, self._bus, self._run_dir, self._resume, engines)
        self._task = RoleTask(role)
        await self._task.start()

    async def run(self) -> None:
        assert self._task is not None
        self._task.run()

    async def status(self) -> dict[str, Any]:
        if self._task is None:
            return {"role": self._name, "activity": "not started", "running": False, "error": None}
        return self._task.status()

    async def stop(self) -> None:
        if self._task is not None:
            await self._task.stop()
        if self._bus is not None:
            await self._bus.close()

    async def __call__(self, request: Request) -> Response:
        if request.method == "GET" and request.url.path.rstrip("/").endswith("/status"):
            return JSONResponse(await self.status())
        return JSONResponse({"error": f"no such page; GET /{self._name}/status"}, status_code=404)


def role_target(
    spec: RoleSpec, config_json: str, run_dir: Path, address: str, resume: Path | None, node: dict[str, float]
) -> serve.RunTarget:
    """What `serve.run_many` needs to deploy a role; `node` pins it to this host."""
    made: Any = RoleDeployment  # the decorator makes it a deployment, of which the type checker knows nothing
    deployment = made.options(
        name=spec.name,
        num_replicas=1,
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=1,
        health_check_period_s=10,
        health_check_timeout_s=120,
        ray_actor_options={"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus, "resources": node},
    )
    bound = deployment.bind(spec.name, config_json, str(run_dir), address, str(resume) if resume else None)
    return serve.RunTarget(bound, name=spec.name, route_prefix=f"/{spec.name}")


def start_bus(config_json: str, run_dir: Path, resume: Path | None, node: dict[str, float]) -> Any:
    """The queue's Ray actor, not yet serving."""
    actor = ray.remote(BusHost).options(name="bus", num_cpus=0, max_concurrency=_MANY, resources=node)
    return actor.remote(config_json, str(run_dir), str(resume) if resume else None)


def start_engine(name: str, config: RunConfig, config_json: str, run_dir: Path, address: str, node: dict[str, float]) -> Any:
    """An engine's Ray actor, not yet started."""
    resources = config.resources
    actor = ray.remote(EngineActor).options(
        name=name, num_cpus=resources.engine_cpus, num_gpus=resources.engine_gpus, max_concurrency=_MANY, resources=node
    )
    return actor.remote(name, config_json, str(run_dir), address)


def namespace(config: RunConfig) -> str:
    """Ray namespace of a run: engines are found in it by name."""
    return f"relax-{config.run.name}"
