"""What every reward's section has."""

from pydantic import Field

from relax.config.base import Section


class RewardSection(Section):
    """Settings that every reward shares: rewards run in worker processes that can be killed."""

    num_workers: int = Field(1, ge=1)
    """Worker processes."""
    time_limit_s: float = Field(10.0, gt=0)
    """Longest time of one call, in seconds; then the worker is killed and the sample's outcome is a reward error."""
