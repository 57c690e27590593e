"""What the queue's events come to: rows of the record, the display, the result, and whether the run is complete."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax.config.run import RunConfig
from relax.control.health import Health
from relax.control.recovery import Position
from relax.control.step_row import StepRow
from relax.errors import RoleError
from relax.observe.progress import Progress
from relax.observe.recorder import RunRecorder


@dataclass(slots=True)
class RunResult:
    """What a run came to: last step, reward of the first and last step, held-out accuracy by step."""

    step: int = 0
    first_reward: float | None = None
    last_reward: float | None = None
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    num_restarts: int = 0


class EventBook:
    """Takes one event after another, in their order. `first_step`: the step that a resumed run continues from."""

    def __init__(
        self, config: RunConfig, recorder: RunRecorder, progress: Progress, health: Health, first_step: int = 0
    ) -> None:
        self._config, self._recorder, self._progress, self._health = config, recorder, progress, health
        self._row = StepRow()
        self.result = RunResult(first_step)
        self.position = Position(first_step)
        self.is_trained = False
        self._is_evaluated = config.eval is None

    @property
    def is_complete(self) -> bool:
        """Whether the actor is done and the last evaluation is in."""
        return self.is_trained and self._is_evaluated

    def begin(self, now: float) -> None:
        """Time zero of the rows."""
        self._row.begin(now)

    def take(self, event: Mapping[str, Any]) -> bool:
        """Whether the event says that the run moved on. Raises `RoleError` for an error that is the user's to mend."""
        kind, has_moved = event["kind"], False
        if kind == "step":
            self._step(event["metrics"])
            has_moved = True
        elif kind == "rollout":
            has_moved = self._row.rollout(event)
        elif kind == "publication":
            self._row.publication(event)
        elif kind == "metrics":
            self._row.of_role(event["metrics"])
        elif kind == "totals":
            self._row.totals(event)
        elif kind == "samples":
            self._recorder.samples(int(event["step"]) + 1, event["rows"])
        elif kind == "eval":
            self._evaluation(event["metrics"])
            has_moved = True
        elif kind == "rewind":
            self.rewind(int(event["step"]))
        elif kind == "done":
            self.is_trained = True
        elif kind == "warning":
            self._progress.note(f"{event['role']}: {event['text']}")
        if kind not in ("step", "samples", "rollout", "metrics", "totals"):
            self._recorder.event(event)
        if kind == "error" and event.get("error_kind") == "user":
            raise RoleError(str(event["error"]))
        return has_moved

    def fill(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of steps, from a checkpoint, that the record may lack: the actor took them when nobody was there to record."""
        last = self._recorder.last_step()
        for metrics in rows:
            if metrics["step"] > last:
                self._recorder.step(self._row.finish(metrics, time.monotonic(), self._health.num_restarts))

    def rewind(self, step: int) -> None:
        """The run goes on from `step`: what is recorded of later ones never happened."""
        self._row.rewind()
        self._recorder.rewind(step)
        self.result.step = step
        self.result.evaluations = [found for found in self.result.evaluations if found[0] <= step]
        self._place(step, min(step, self.position.evaluated) if self.position.evaluated is not None else None)
        self.is_trained = False
        self._is_evaluated = self._config.eval is None or self.position.evaluated == self._config.train.num_steps

    def _place(self, step: int, evaluated: int | None) -> None:
        self.position.step, self.position.evaluated = step, evaluated

    def _step(self, metrics: Mapping[str, Any]) -> None:
        row = self._row.finish(metrics, time.monotonic(), self._health.num_restarts)
        self._recorder.step(row)
        self._progress.update(row)
        self.result.step = self.position.step = int(row["step"])
        self.result.last_reward = row["reward/mean"]
        if self.result.first_reward is None:
            self.result.first_reward = row["reward/mean"]

    def _evaluation(self, metrics: Mapping[str, Any]) -> None:
        self._recorder.evaluation(metrics)
        self._progress.evaluation(metrics)
        step = self.position.evaluated = int(metrics["step"])
        if "eval/accuracy" in metrics:
            self.result.evaluations.append((step, float(metrics["eval/accuracy"])))
        if step >= self._config.train.num_steps:
            self._is_evaluated = True
