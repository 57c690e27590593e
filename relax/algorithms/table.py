"""Every algorithm is one line here: how rewards become advantages, and which objective is trained.

`algorithm.type` names the line. An estimator is a function `(config, trajectories)` on numpy arrays; an objective is a class
built from the configuration, called with flat tensors of trained tokens (`relax/algorithms/objective.py`), named by its
dotted path so that computing advantages does not load torch. The trainer knows neither: it adds up what the objective returns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from relax.algorithms.custom import custom
from relax.algorithms.dr_grpo import dr_grpo
from relax.algorithms.estimate import Estimated, Trajectories
from relax.algorithms.gae import gae
from relax.algorithms.grpo import grpo
from relax.algorithms.opd import opd
from relax.algorithms.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from relax.algorithms.rloo import rloo
from relax.algorithms.shaping import is_shaping
from relax.config.algorithm import AlgorithmConfig, CustomConfig, PPOConfig, policy_column
from relax.data.dotted import load_object

if TYPE_CHECKING:
    from relax.algorithms.objective import Objective
    from relax.algorithms.value_loss import ValueLoss


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`estimate(config, trajectories)` gives the advantages; none where the loss takes no advantages.

    `objective`: a name of `OBJECTIVES`, which the configuration may choose; `advantage`: the estimator in words. `needs`:
    columns that the estimator reads; `loss_needs`: those that the objective reads; `returns`: whether the estimator makes
    targets for a critic. `whole_batch`: whether a row's advantage depends on all rows of the step.
    """

    estimate: Callable[[Any, Trajectories], Estimated] | None
    objective: Callable[[Any], str]
    advantage: str
    needs: Callable[[Any], tuple[str, ...]] = lambda config: ()
    loss_needs: tuple[str, ...] = ()
    returns: Callable[[Any], bool] = lambda config: False
    whole_batch: Callable[[Any], bool] = lambda config: False


def _named(name: str) -> Callable[[Any], str]:
    return lambda config: name


_CLIP = _named("ppo_clip")
_GROUP_MEAN = "reward - mean of its group"

ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(grpo, _CLIP, _GROUP_MEAN),
    "dr_grpo": Algorithm(dr_grpo, _CLIP, _GROUP_MEAN),
    "rloo": Algorithm(rloo, _CLIP, "reward - mean of the other members of its group"),
    "reinforce_pp": Algorithm(
        reinforce_pp, _CLIP, "discounted rewards to come, whitened over the step", whole_batch=lambda config: True
    ),
    "reinforce_pp_baseline": Algorithm(
        reinforce_pp_baseline, _CLIP, f"{_GROUP_MEAN}, whitened over the step", whole_batch=lambda config: True
    ),
    "ppo": Algorithm(
        gae,
        _CLIP,
        "generalised advantage estimation with a critic",
        needs=lambda config: ("values",),
        returns=lambda config: True,
        whole_batch=lambda config: bool(config.whiten),
    ),
    "dapo": Algorithm(grpo, _CLIP, _GROUP_MEAN),
    "gspo": Algorithm(grpo, _named("gspo"), _GROUP_MEAN),
    "sapo": Algorithm(grpo, _named("sapo"), _GROUP_MEAN),
    "cispo": Algorithm(grpo, _named("cispo"), _GROUP_MEAN),
    "reinforce": Algorithm(grpo, _named("reinforce"), _GROUP_MEAN),
    "opd": Algorithm(
        opd,
        _CLIP,
        "coef x (teacher's - student's log-prob) of each token, + reward_coef x (reward - mean of its group)",
        needs=lambda config: (policy_column(config), "teacher_logprobs"),
    ),
    "opd_full": Algorithm(
        None,
        _named("divergence"),
        "none: the loss compares with the teacher's most likely tokens",
        loss_needs=("teacher_top_ids", "teacher_top_logprobs"),
    ),
    "custom": Algorithm(
        custom,
        lambda config: str(config.objective),
        "what the function algorithm.path says",
        needs=lambda config: tuple(config.needs),
        returns=lambda config: "values" in config.needs,
        whole_batch=lambda config: bool(config.scope == "batch"),
    ),
}

# Dotted paths of `Class(config, length_budget)`.
OBJECTIVES: Mapping[str, str] = {
    "ppo_clip": "relax.algorithms.ppo_clip:PPOClip",
    "gspo": "relax.algorithms.gspo:GSPO",
    "sapo": "relax.algorithms.sapo:SAPO",
    "cispo": "relax.algorithms.cispo:CISPO",
    "reinforce": "relax.algorithms.reinforce:Reinforce",
    "divergence": "relax.algorithms.divergence:Divergence",
}


def has_advantages(config: AlgorithmConfig) -> bool:
    """Whether the algorithm has advantages at all."""
    return ALGORITHMS[config.type].estimate is not None


def has_critic(config: AlgorithmConfig) -> bool:
    """Whether a critic takes part, which learns the estimator's `returns`."""
    return ALGORITHMS[config.type].returns(config)


def is_whole_batch(config: AlgorithmConfig) -> bool:
    """Whether advantages can only be computed when all groups of the step are there."""
    return ALGORITHMS[config.type].whole_batch(config)


def estimator_columns(config: AlgorithmConfig) -> tuple[str, ...]:
    """Columns that `advantages` reads, besides the reward, the mask and, where there is one, the trajectory."""
    line = ALGORITHMS[config.type]
    names = list(line.needs(config)) if line.estimate is not None else []
    if config.kl.coef > 0 and config.kl.place == "reward":
        names += [policy_column(config), "ref_logprobs"]
    return tuple(dict.fromkeys(names))


def made_columns(config: AlgorithmConfig) -> tuple[str, ...]:
    """Columns that `advantages` makes."""
    names = ["advantages"]
    if has_critic(config):
        names.append("returns")
    if is_shaping(config.shaping):
        names.append("shaped_reward")
    return tuple(names)


def needed_columns(config: AlgorithmConfig) -> tuple[str, ...]:
    """Columns that somebody between rollout and trainer has to make for this algorithm.

    Of `ref_logprobs`, `old_logprobs`, `values`, `teacher_logprobs`, `teacher_top_ids`, `teacher_top_logprobs`, `advantages` and
    `returns`; those that come later need some of those before.
    """
    line = ALGORITHMS[config.type]
    names = [name for name in estimator_columns(config) if name != "rollout_logprobs"]
    if config.kl.coef > 0:
        names.append("ref_logprobs")
    if config.old_logprobs == "recompute":
        names.append("old_logprobs")
    names += line.loss_needs
    if line.estimate is not None:
        names.append("advantages")
    if has_critic(config):
        names.append("returns")
    return tuple(dict.fromkeys(names))


def make_objective(config: AlgorithmConfig, *, length_budget: int) -> "Objective":
    """The objective of `config.type`. `length_budget` (tokens): the constant of `fixed_length` aggregation."""
    name = ALGORITHMS[config.type].objective(config)
    if isinstance(config, CustomConfig) and name not in OBJECTIVES:
        made: Objective = load_object(name, "algorithm.objective")(config, length_budget)
        return made
    module, _, attribute = OBJECTIVES[name].partition(":")
    objective: Objective = getattr(import_module(module), attribute)(config, length_budget)
    return objective


def make_value_loss(config: PPOConfig | CustomConfig, *, length_budget: int) -> "ValueLoss":
    """The critic's loss."""
    from relax.algorithms.value_loss import ValueLoss  # here, since it brings torch along

    return ValueLoss(config, length_budget)
