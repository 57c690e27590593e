"""One row of `metrics.jsonl`: the actor's step metrics, and what rollout and critic did meanwhile."""

from collections.abc import Mapping
from typing import Any


class StepRow:
    """Turns the rollout's running totals into amounts for each step. Where totals fall, a rollout has begun again."""

    def __init__(self) -> None:
        self._started = 0.0
        self._totals: dict[str, float] = {}
        self._at_last_step: dict[str, float] = {}
        self._publication: dict[str, Any] = {}
        self._of_roles: dict[str, Any] = {}

    def begin(self, now: float) -> None:
        """Time zero of `time_s`."""
        self._started = now

    def rollout(self, event: Mapping[str, Any]) -> bool:
        """Takes the rollout's totals; true when any work was done since the last ones."""
        totals = {**event["counts"], "wait/rollout_s": float(event["waited_s"])}
        moved = any(totals[name] != self._totals.get(name) for name in event["counts"])
        if any(totals.get(name, 0.0) < total for name, total in self._totals.items()):
            # what the one before did since the last step still belongs to the next one
            self._at_last_step = {name: self._at_last_step.get(name, 0.0) - total for name, total in self._totals.items()}
        self._totals = totals
        return moved

    def publication(self, event: Mapping[str, Any]) -> None:
        """Takes what a publication took; it is shown in the row of the step that ends next."""
        self._publication = {name: value for name, value in event.items() if name.startswith("publish/")}

    def of_role(self, metrics: Mapping[str, Any]) -> None:
        """Takes a role's own metrics (the critic's); they are shown in the row of the step that ends next."""
        self._of_roles |= metrics

    def rewind(self) -> None:
        """The steps since a checkpoint are lost, and what was done for them: the next row begins now."""
        self._at_last_step = dict(self._totals)
        self._publication = {}
        self._of_roles = {}

    def finish(self, metrics: Mapping[str, Any], now: float, num_restarts: int = 0) -> dict[str, Any]:
        """The step's row; totals not yet reported by the rollout fall into the next one."""
        row: dict[str, Any] = {"step": metrics["step"], "time_s": round(now - self._started, 3), **metrics}
        for name in {**self._totals, **self._at_last_step}:
            row[name] = self._totals.get(name, 0.0) - self._at_last_step.get(name, 0.0)
        row |= self._publication | self._of_roles | {"restarts/total": num_restarts}
        self._publication, self._of_roles = {}, {}
        row.setdefault("tokens/generated", 0)
        row.setdefault("wait/rollout_s", 0.0)
        self._at_last_step = dict(self._totals)
        return row
