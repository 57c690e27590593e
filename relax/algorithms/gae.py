"""Generalised advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438) over trained tokens alone.

d_t = r_t + gamma V_{t+1} - V_t,   A_t = d_t + gamma lambda A_{t+1},   return_t = A_t + V_t

"Next" is the next token that the policy wrote: what a tool or the environment says in between is no step, so that inserting it
changes nothing. `V` is 0 after the last token.
"""

import numpy as np

from relax.algorithms.estimate import FloatVector, Trajectories, discounted, whitened
from relax.algorithms.reinforce_pp import with_terminal
from relax.config.algorithm import PPOConfig


def gae(config: PPOConfig, given: Trajectories) -> dict[str, FloatVector]:
    """Advantages, whitened over the batch with `whiten`, and the critic's targets `returns`."""
    values = given.columns["values"]
    following = np.append(values[1:], 0.0)[: len(values)]
    following[np.cumsum(given.lengths)[given.lengths > 0] - 1] = 0.0
    errors = with_terminal(given) + config.gamma * following - values
    advantages = discounted(errors, given.lengths, config.gamma * config.gae_lambda)
    returns = advantages + values
    return {"advantages": whitened(advantages) if config.whiten else advantages, "returns": returns}
