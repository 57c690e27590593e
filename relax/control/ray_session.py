"""Ray itself: started here for one run and taken down after it, or a cluster that is joined and left."""

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.serve.context import _get_global_client

from relax.config.run import RunConfig
from relax.control.processes import children, end, family, is_alive
from relax.errors import ConfigError
from relax.roles.serve import namespace

_OBJECT_STORE_BYTES = 128 << 20  # data travels through the transfer queue's arena, not through Ray's store
_VITAL = ("raylet", "gcs_server")


class RaySession:
    """One connection to Ray, made by `open`; its calls block."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._owns_ray = config.run.ray_address is None
        self._started: set[int] = set()
        self.vital: dict[str, psutil.Process] = {}
        self.url = ""  # of the HTTP interface, from `serve` on

    def open(self, num_cpus: float) -> None:
        """Starts Ray with at least so many CPUs, or joins the cluster of `run.ray_address`."""
        before = {child.pid for child in children()}
        address = self._config.run.ray_address
        options: dict[str, Any] = {
            "namespace": namespace(self._config),
            "runtime_env": {"env_vars": _environment()},
            "log_to_driver": False,
            "logging_level": "error",
        }
        if address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, int(num_cpus + 0.999)),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                **options,
            )
        else:
            _join(address, options)
        started = [child for child in children() if child.pid not in before]
        self._started = {child.pid for child in started}
        if self._owns_ray:
            self.vital = {name: child for child in started if (name := child.name()) in _VITAL}

    def serve(self, targets: Sequence[Any]) -> list[Any]:
        """Deploys applications and returns their handles."""
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # what a death means is said by the controller
        port = self._config.services.http_port or _free_port()
        _refuse_taken(port)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        # where a cluster has Serve already, that keeps the port that it has
        self.url = f"http://127.0.0.1:{_get_global_client().http_config.port}"
        return list(serve.run_many(list(targets)))

    def lost_process(self) -> str | None:
        """What happened to Ray, when we started it and one of the processes that it cannot do without is gone."""
        for name, process in self.vital.items():
            if not is_alive(process):
                return f"Ray's {name} (process {process.pid}) died (killed, or out of memory)"
        return None

    def close(self, applications: Sequence[str], actors: Sequence[Any]) -> None:
        """Takes down what was started: all of Ray, or `applications` and `actors` of a cluster that goes on."""
        if not ray.is_initialized():
            return
        if self._owns_ray:
            alive = family(self._started)
            if self.lost_process():
                end(alive)  # first: a shutdown would wait for those that are gone
            ray.shutdown()
            end(alive)
            return
        for name in applications:
            serve.delete(name, _blocking=False)
        for actor in actors:
            ray.kill(actor)
        ray.shutdown()


def node_of_this_host() -> dict[str, float]:
    """What pins an actor to this host."""
    return {f"node:{ray.util.get_node_ip_address()}": 0.001}


def _join(address: str, options: dict[str, Any]) -> None:
    try:
        ray.init(address=address, **options)
    except ConnectionError as error:
        raise ConfigError(
            f"run.ray_address = {address!r}: cannot join: {error}. Is that cluster up, and reachable from here? A "
            "cluster that Ray started with tokens, its default, is joined with RAY_AUTH_MODE=token in the environment"
        ) from error


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
