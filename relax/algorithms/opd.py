"""On-policy distillation (Agarwal et al. 2024, https://arxiv.org/abs/2306.13649) as an advantage.

The reverse KL of student to teacher on the student's own tokens: its gradient is that of a policy whose reward at each token is
how much likelier the teacher finds it.
"""

from relax.algorithms.estimate import FloatVector, Trajectories
from relax.config.algorithm import OPDConfig, policy_column


def opd(config: OPDConfig, given: Trajectories) -> FloatVector:
    """`-coef (o - q)` on each token, plus `reward_coef` times the reward less its group's mean."""
    student, teacher = given.columns[policy_column(config)], given.columns["teacher_logprobs"]
    advantages = config.coef * (teacher - student)
    if config.reward_coef:
        advantages += config.reward_coef * given.spread(given.centred(given.totals))
    return advantages
