"""From a configuration to the parts that both runtimes start: the core of the queue, and the roles."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path

from relax.bus.core import Core
from relax.bus.ledger import Ledger
from relax.bus.snapshot import restore
from relax.bus.transfer_queue import QueueLimits, TransferQueue
from relax.config.run import RunConfig
from relax.engines.engine import Engine
from relax.engines.pool import EnginePool
from relax.models.folder import read_model_folder
from relax.roles.actor import QUEUE_FILE, Actor, read_step
from relax.roles.advantages import Advantages
from relax.roles.columns import ColumnMaker, ColumnRole
from relax.roles.critic import Critic, CriticRole, MakeCritic
from relax.roles.genrm import GenRM
from relax.roles.logprobs import CurrentPolicy, PublishedPolicy, Reference, SwappedReference
from relax.roles.reward_model import RewardModel
from relax.roles.role import MakeBackend, Role
from relax.roles.rollout import Rollout
from relax.roles.served_teacher import ServedTeacher
from relax.roles.teacher import Teacher
from relax.roles.topology import POLICY, in_actor, judge_of
from relax.train.backend import TrainBackend, ValueBackend
from relax.train.reference import ReferenceFiles


def queue_limits(config: RunConfig) -> QueueLimits:
    """What the queue needs to know of the run."""
    rollout = config.rollout
    return QueueLimits(
        prompts_per_step=rollout.prompts_per_step,
        max_staleness=rollout.max_staleness,
        num_steps=config.train.num_steps,
        max_bytes=config.services.queue_max_bytes,
        lease_s=config.services.lease_s,
        updates_per_step=config.train.updates_per_step,
        on_stale=rollout.on_stale,
        num_extra=ceil((rollout.oversampling - 1) * rollout.prompts_per_step),
        in_order=config.run.deterministic or rollout.oversampling > 1,
        row_costs=read_model_folder(config.model).row_costs if config.data.media is not None else {},
    )


def reference_files(config: RunConfig, run_dir: Path) -> ReferenceFiles:
    """Where a reference that follows the policy keeps its weights: as many of them as the kept checkpoints may want back."""
    every, checkpoint = config.algorithm.kl.update_reference_every, config.train.checkpoint
    num_kept = checkpoint.keep * ceil(checkpoint.every / every) + 1 if every else 0
    return ReferenceFiles(run_dir / "reference", every * config.train.updates_per_step, num_kept)


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


def make_critic(config: RunConfig) -> ValueBackend:
    """The critic's back end, of the kind that `train.backend.type` names."""
    # here, since torch and transformers take seconds to import and belong to the process that computes with them
    from relax.train.critic_backend import CriticBackend

    return CriticBackend(config)


def make_engine(config: RunConfig, name: str) -> Engine:
    """The engine called `name`: of the kind that `rollout.engine.type` names, or a judge's."""
    # here, since torch and transformers take seconds to import and belong to the process that computes with them
    from relax.engines.local import LocalEngine

    of = judge_of(config, name)
    model, settings = (of.model, of.engine) if of is not None else (config.model, config.rollout.engine)
    engine: Engine = LocalEngine(model, settings, deterministic=config.run.deterministic, name=name)
    return engine


def make_role(
    name: str,
    config: RunConfig,
    bus: TransferQueue,
    run_dir: Path,
    resume: Path | None,
    pools: Mapping[str, EnginePool] | None = None,
    make_backend: MakeBackend = make_backend,
    make_critic: MakeCritic = make_critic,
    *,
    first_step: int | None = None,
    is_restart: bool = False,
    services: Mapping[str, str] | None = None,
) -> Role:
    """The role called `name`, not yet started. `is_restart`: an earlier one of the same run came to its end.

    `pools`: the engines, as `engine_pools` names them. `first_step`: what is done already; by default what the checkpoint says.
    `services`: where roles that answer requests are, by name.
    """
    if first_step is None:
        first_step = read_step(resume) if resume else 0
    match name:
        case "rollout":
            assert pools is not None
            return Rollout(config, bus, pools[POLICY], first_step, is_restart=is_restart, services=services)
        case "genrm":
            assert pools is not None
            return GenRM(config, bus, pools)
        case "actor":

            def inside(backend: TrainBackend) -> Sequence[ColumnMaker]:
                return make_inside(config, backend, run_dir, make_backend, make_critic)

            return Actor(config, bus, run_dir, resume, make_backend, inside)
        case "reward_model":
            return RewardModel(config, bus)
        case "critic":
            return CriticRole(config, bus, run_dir, make_critic, first_step, is_restart=is_restart)
    return ColumnRole(name, config, bus, make_column_maker(name, config, run_dir, first_step, make_backend))


def make_column_maker(name: str, config: RunConfig, run_dir: Path, first_step: int, make_backend: MakeBackend) -> ColumnMaker:
    """What the role called `name` computes, with a back end of its own if it needs one."""
    match name:
        case "advantages":
            return Advantages(config)
        case "reference":
            version = first_step * config.train.updates_per_step
            return Reference(config, make_backend, reference_files(config, run_dir), version)
        case "actor_fwd":
            return PublishedPolicy(config, make_backend)
        case "teacher":
            return make_teacher(config, make_backend)
    raise AssertionError(f"no role is called {name!r}")


def make_teacher(config: RunConfig, make_backend: MakeBackend) -> ColumnMaker:
    """The teacher, loaded here or behind a server."""
    if config.teacher is not None and config.teacher.server is not None:
        return ServedTeacher(config)
    return Teacher(config, make_backend)


def make_inside(
    config: RunConfig,
    backend: TrainBackend,
    run_dir: Path,
    make_backend: MakeBackend = make_backend,
    make_critic: MakeCritic = make_critic,
) -> Sequence[ColumnMaker]:
    """What the actor computes itself: with its own back end, but for teacher and critic."""
    makers: dict[str, Callable[[], ColumnMaker]] = {
        "reference": lambda: SwappedReference(backend, reference_files(config, run_dir)),
        "actor_fwd": lambda: CurrentPolicy(backend),
        "teacher": lambda: make_teacher(config, make_backend),
        "critic": lambda: Critic(config, make_critic),
        "advantages": lambda: Advantages(config),
    }
    return [makers[name]() for name in in_actor(config)]
