import pytest

from relax.config.run import RunConfig


@pytest.fixture
def config():
    return RunConfig.model_validate(
        {
            "run": {"name": "digits"},
            "model": {"path": "models/tiny"},
            "data": {"type": "generator", "path": "relax.data.arithmetic:addition"},
            "reward": {"type": "exact"},
            "train": {"num_steps": 4},
        }
    )


@pytest.fixture
def row():
    """Makes the row of one step."""

    def make(step, **changes):
        return {
            "step": step,
            "time_s": 2.0 * step,
            "step_s": 2.0,
            "reward/mean": step / 10,
            "response/length_mean": 12.0,
            "response/truncated_fraction": 0.25,
            "age/mean": 0.5,
            "age/max": 1,
            "age/count_0": 3,
            "age/count_1": 5,
            "wait/actor_s": 0.5,
            "wait/rollout_s": 1.0,
            "tokens_per_s": 1234.5,
        } | changes

    return make
