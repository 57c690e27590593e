"""The critic of a run: a token classifier that says, before each token, how much reward is still to come."""

from relax.algorithms.table import make_value_loss
from relax.config.algorithm import CustomConfig, PPOConfig
from relax.config.run import RunConfig
from relax.train.scalar_backend import ScalarBackend


class CriticBackend(ScalarBackend):
    """`config.model` and `config.train` are the critic's, `config.algorithm` that of the run.

    A batch needs `returns` and, where the loss clips, `values` (those that its advantages were computed with). Started from a
    language model it says 0 everywhere, so that the first advantages are those without a critic; a critic that was trained
    before, or a reward model, brings its head along.
    """

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.algorithm, PPOConfig | CustomConfig), f"{config.algorithm.type} has no critic"
        super().__init__(config, make_value_loss(config.algorithm, length_budget=config.rollout.max_new_tokens))
