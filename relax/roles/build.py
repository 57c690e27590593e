"""From a configuration to the parts that both runtimes start: the core of the queue, and the roles."""

from pathlib import Path

from relax.bus.core import Core
from relax.bus.ledger import Ledger
from relax.bus.snapshot import restore
from relax.bus.transfer_queue import QueueLimits, TransferQueue
from relax.config.run import RunConfig
from relax.engines.engine import Engine
from relax.engines.pool import EnginePool
from relax.roles.actor import QUEUE_FILE, Actor, read_step
from relax.roles.advantages import Advantages
from relax.roles.logprobs import LogprobRole
from relax.roles.role import MakeBackend, Role
from relax.roles.rollout import Rollout
from relax.train.backend import TrainBackend


def queue_limits(config: RunConfig) -> QueueLimits:
    """What the queue needs to know of the run."""
    return QueueLimits(
        prompts_per_step=config.rollout.prompts_per_step,
        max_staleness=config.rollout.max_staleness,
        num_steps=config.train.num_steps,
        max_bytes=config.services.queue_max_bytes,
        lease_s=config.services.lease_s,
    )


def make_core(config: RunConfig, run_dir: Path, resume: Path | None) -> Core:
    """A fresh core, or the one that a checkpoint holds."""
    ledger = Ledger(run_dir / "ledger.sqlite")
    if resume is None:
        return Core(queue_limits(config), ledger=ledger)
    return restore(resume / QUEUE_FILE, queue_limits(config), ledger=ledger)


def make_backend(config: RunConfig) -> TrainBackend:
    """The training back end that `train.backend.type` names."""
    # here, since torch and transformers take seconds to import and belong to the process that computes with them
    from relax.train.torch_backend import TorchBackend

    return TorchBackend(config)


def make_engine(config: RunConfig, name: str) -> Engine:
    """The generation engine that `rollout.engine.type` names."""
    # here, since torch and transformers take seconds to import and belong to the process that computes with them
    from relax.engines.local import LocalEngine

    engine: Engine = LocalEngine(config.model, config.rollout.engine, deterministic=config.run.deterministic, name=name)
    return engine


def make_role(
    name: str,
    config: RunConfig,
    bus: TransferQueue,
    run_dir: Path,
    resume: Path | None,
    engines: EnginePool | None = None,
    make_backend: MakeBackend = make_backend,
) -> Role:
    """The role called `name`, not yet started."""
    match name:
        case "rollout":
            assert engines is not None
            return Rollout(config, bus, engines, read_step(resume) if resume else 0)
        case "advantages":
            return Advantages(name, config, bus)
        case "actor":
            return Actor(config, bus, run_dir, resume, make_backend)
        case "reference":
            return LogprobRole(name, "ref_logprobs", config, bus, make_backend, follows_policy=False)
        case "actor_fwd":
            return LogprobRole(name, "old_logprobs", config, bus, make_backend, follows_policy=True)
    raise AssertionError(f"no role is called {name!r}")
