"""The objective of imitation (supervised fine-tuning): negative log-likelihood, mean over all tokens to learn."""

from relax.algorithms.objective import LossSums, TrainedTokens


class Likelihood:
    """Needs neither advantages nor settings."""

    entropy_gradient = False
    zero_without_advantage = False

    def __call__(self, tokens: TrainedTokens) -> LossSums:
        total, count = -tokens.logprobs.sum(), float(tokens.logprobs.numel())
        return LossSums(total, count, {"loss": (total.detach(), count)})
