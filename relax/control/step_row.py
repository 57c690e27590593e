"""One row of `metrics.jsonl`: the actor's step metrics, and what the other roles did meanwhile."""

from collections.abc import Mapping
from typing import Any


class _Totals:
    """A role's running totals as amounts for each step. Where totals fall, the role has begun again."""

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._at_last_step: dict[str, float] = {}

    def take(self, totals: Mapping[str, float]) -> bool:
        """Whether any changed."""
        has_changed = any(total != self._now.get(name) for name, total in totals.items())
        if any(totals.get(name, 0.0) < total for name, total in self._now.items()):
            # what the one before did since the last step still belongs to the next one
            self._at_last_step = {name: self._at_last_step.get(name, 0.0) - total for name, total in self._now.items()}
        self._now = dict(totals)
        return has_changed

    def step(self) -> dict[str, float]:
        """The amounts since the last step; the next one begins now."""
        names = {**self._now, **self._at_last_step}
        found = {name: self._now.get(name, 0.0) - self._at_last_step.get(name, 0.0) for name in names}
        self._at_last_step = dict(self._now)
        return found


class StepRow:
    """What came from the roles since the last step becomes the next row."""

    def __init__(self) -> None:
        self._started = 0.0
        self._totals: dict[str, _Totals] = {}
        self._publication: dict[str, Any] = {}
        self._of_roles: dict[str, Any] = {}

    def begin(self, now: float) -> None:
        """Time zero of `time_s`."""
        self._started = now

    def rollout(self, event: Mapping[str, Any]) -> bool:
        """Takes the rollout's totals; true when any work was done since the last ones."""
        has_moved = self._of("rollout").take(event["counts"])
        self._of("rollout/waits").take({"wait/rollout_s": float(event["waited_s"])})
        return has_moved

    def totals(self, event: Mapping[str, Any]) -> None:
        """Takes the running totals of a role that answers requests."""
        self._of(event["role"]).take(event["totals"])

    def _of(self, role: str) -> _Totals:
        return self._totals.setdefault(role, _Totals())

    def publication(self, event: Mapping[str, Any]) -> None:
        """Takes what a publication took; it is shown in the row of the step that ends next."""
        self._publication = {name: value for name, value in event.items() if name.startswith("publish/")}

    def of_role(self, metrics: Mapping[str, Any]) -> None:
        """Takes a role's own metrics (the critic's); they are shown in the row of the step that ends next."""
        self._of_roles |= metrics

    def rewind(self) -> None:
        """The steps since a checkpoint are lost, and what was done for them: the next row begins now."""
        for totals in self._totals.values():
            totals.step()
        self._publication = {}
        self._of_roles = {}

    def finish(self, metrics: Mapping[str, Any], now: float, num_restarts: int = 0) -> dict[str, Any]:
        """The step's row; totals not yet reported by the rollout fall into the next one."""
        row: dict[str, Any] = {"step": metrics["step"], "time_s": round(now - self._started, 3), **metrics}
        for totals in self._totals.values():
            row |= totals.step()
        row |= self._publication | self._of_roles | {"restarts/total": num_restarts}
        self._publication, self._of_roles = {}, {}
        row.setdefault("tokens/generated", 0)
        row.setdefault("wait/rollout_s", 0.0)
        return row
