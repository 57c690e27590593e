"""Runs on engines and back ends that compute nothing need no worker processes for their rewards either."""

import pytest
from fakes import FakeRewards


@pytest.fixture
def rewards_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker takes longer to start than such a run takes."""
    monkeypatch.setattr("relax.roles.rollout.RewardPool", FakeRewards)
