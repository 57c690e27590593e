"""The whole configuration of one run, and `[run]` itself."""

from typing import Any, Literal

from pydantic import Field, model_validator

from relax.config.algorithm import AlgorithmConfig, GRPOConfig, OPDFullConfig, fault_when_stale, needs_teacher, with_preset
from relax.config.base import Section
from relax.config.critic import CriticConfig
from relax.config.data import DataConfig, RunEvalConfig
from relax.config.faults import FaultsConfig
from relax.config.genrm import GenRMConfig, fault_of_route
from relax.config.model import ModelConfig
from relax.config.observe import ObserveConfig
from relax.config.resources import ResourcesConfig
from relax.config.reward import GenRMRewardConfig, RewardConfig, leaves, reward_model_of
from relax.config.rollout import RolloutConfig
from relax.config.services import ServicesConfig
from relax.config.teacher import TeacherConfig
from relax.config.train import TrainConfig


class RunSection(Section):
    """Name, folder, seed and runtime of the run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Name of the run; its folder is `run.dir/run.name`."""
    dir: str = "runs"
    """Where run folders are made."""
    seed: int = 0
    """Seed of data order and sampling."""
    deterministic: bool = False
    """Fix batch shapes, so that seed and weights give the same tokens whatever else is in flight; slower. Which weights sample
    a token is a matter of timing unless `rollout.max_staleness = 0`."""
    runtime: Literal["ray", "inprocess"] = "ray"
    """`ray`: every role a Ray Serve deployment; `inprocess`: the same roles in this process, without Ray."""
    ray_address: str | None = None
    """Address of a Ray cluster to join; default: start Ray here and stop it at the end."""


class RunConfig(Section):
    """One run: a TOML file with a table for each section."""

    run: RunSection = RunSection()
    """Name, folder, seed and runtime."""
    model: ModelConfig
    """The policy."""
    data: DataConfig
    """Training prompts."""
    reward: RewardConfig
    """How responses are scored."""
    train: TrainConfig
    """Optimizer, back end, checkpoints."""
    algorithm: AlgorithmConfig = GRPOConfig()
    """Advantage estimator and objective."""
    critic: CriticConfig = CriticConfig()
    """The critic, where the algorithm has one."""
    teacher: TeacherConfig | None = None
    """The teacher, where the algorithm has one."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation and staleness."""
    eval: RunEvalConfig | None = None
    """Held-out evaluation."""
    genrm: GenRMConfig | None = None
    """Judges, for rewards that ask a language model."""
    resources: ResourcesConfig = ResourcesConfig()
    """Devices."""
    services: ServicesConfig = ServicesConfig()
    """Ports, limits, watchdogs."""
    observe: ObserveConfig = ObserveConfig()
    """What is recorded."""
    faults: FaultsConfig = FaultsConfig()
    """Faults on purpose: a rehearsal."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, raw: Any) -> Any:
        return with_preset(raw)

    @property
    def rewards(self) -> dict[str, RewardConfig]:
        """The rewards of training and of evaluation, by the key under which they stand; one that both use stands there once."""
        roots = {"reward": self.reward}
        if self.eval is not None and self.eval.reward is not None:
            roots["eval.reward"] = self.eval.reward
        return roots

    @property
    def has_media(self) -> bool:
        """Whether rows of training or evaluation have images, sounds or videos."""
        return self.data.media is not None or (self.eval is not None and self.eval.data.media is not None)

    @model_validator(mode="after")
    def _find_the_judges(self) -> "RunConfig":
        for key, root in self.rewards.items():
            for reward in leaves(root):
                if isinstance(reward, GenRMRewardConfig) and (fault := fault_of_route(reward, self.genrm)):
                    raise ValueError(f"{key}.{fault}")
        return self

    @model_validator(mode="after")
    def _agree_on_a_reward_model(self) -> "RunConfig":
        reward_model_of(self.rewards.values())
        return self

    @model_validator(mode="after")
    def _refuse_what_cannot_learn(self) -> "RunConfig":
        rollout, algorithm = self.rollout, self.algorithm
        if self.teacher is None and needs_teacher(algorithm):
            raise ValueError(
                f'algorithm.type = "{algorithm.type}" learns from a teacher: set teacher.model.path to the folder of its '
                "model, or teacher.server.url to a server that holds it"
            )
        if self.teacher is not None and needs_teacher(algorithm) and (fault := _fault_of_server(self)):
            raise ValueError(fault)
        if rollout.top_p != 1.0 or rollout.top_k != 0:
            raise ValueError(
                "rollout.top_p and rollout.top_k change the sampling distribution, which the trainer does not replay yet: "
                "use rollout.top_p = 1.0 and rollout.top_k = 0"
            )
        if rollout.max_staleness > 0 and (fault := fault_when_stale(algorithm)):
            raise ValueError(fault)
        num_unpublished = self.train.publish_every * self.train.updates_per_step - 1
        if num_unpublished > rollout.max_staleness:
            raise ValueError(
                f"rollout.max_staleness = {rollout.max_staleness}: with train.publish_every = {self.train.publish_every} and "
                f"train.updates_per_step = {self.train.updates_per_step} a sample is up to {num_unpublished} updates old when "
                f"it is trained: use rollout.max_staleness = {num_unpublished} or more"
            )
        if self.resources.mode == "colocate" and rollout.max_staleness > 0:
            raise ValueError(
                f'resources.mode = "colocate": engines sleep while the actor trains, so nothing is generated ahead: use '
                f'rollout.max_staleness = 0 (it is {rollout.max_staleness}), or resources.mode = "hybrid"'
            )
        if rollout.oversampling > 1 and (self.run.deterministic or self.resources.mode == "colocate"):
            other = "run.deterministic" if self.run.deterministic else 'resources.mode = "colocate"'
            raise ValueError(
                f"rollout.oversampling = {rollout.oversampling} leaves to timing what is trained: not with {other}"
            )
        if rollout.oversampling > 1 and rollout.on_stale != "wait":
            raise ValueError(
                f'rollout.oversampling = {rollout.oversampling} needs rollout.on_stale = "wait" (it is "{rollout.on_stale}")'
            )
        if rollout.group_size < 2 and algorithm.compares_members:
            raise ValueError(
                f"rollout.group_size = {rollout.group_size}: {algorithm.type} compares the members of a group: use at least 2"
            )
        return self


def _fault_of_server(config: RunConfig) -> str | None:
    """What a teacher behind a server cannot tell this run, and what would be right; none when nothing is wrong."""
    server = config.teacher.server if config.teacher is not None else None
    if server is None:
        return None
    if config.data.media is not None:
        return "teacher.server is sent token ids, and sees no media of data.media: use teacher.model.path"
    if config.rollout.temperature != 1.0:
        return (
            f"rollout.temperature = {config.rollout.temperature:g}: servers tell the log-probs of a prompt at temperature 1, "
            "which nothing turns into those at another: use rollout.temperature = 1.0, or teacher.model.path"
        )
    if server.protocol == "openai" and isinstance(config.algorithm, OPDFullConfig):
        return (
            'teacher.server.protocol = "openai" names the likeliest tokens by their text, which several may share: use '
            '"vllm" or "sglang", or algorithm.type = "opd"'
        )
    return None
