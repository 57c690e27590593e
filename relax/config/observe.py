"""`[observe]`: what is recorded."""

from pydantic import Field

from relax.config.base import Section


class ObserveConfig(Section):
    """What is recorded."""

    tensorboard: bool = True
    """Write TensorBoard files under `tb/`."""
    samples_per_step: int = Field(8, ge=0)
    """How many samples of each step are kept as text under `samples/`."""
    progress: bool = True
    """Show the live display; without a terminal a line a step is printed."""
