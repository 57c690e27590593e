"""Writes down a run: metrics and evaluations, events, samples, and the sinks.

Recording never takes down a run: what cannot be written (a full disk, a sink that raises) is reported once through `logging`.
"""

import contextlib
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from relax.config.observe import ObserveConfig
from relax.observe.jsonl import JsonLines, finite, write_atomically
from relax.observe.samples import samples_file
from relax.observe.sinks import Sink, make_sinks

log = logging.getLogger("relax.observe")


class RunRecorder:
    """One run's record. `resume_step`: continue after this step; what was recorded of later ones is cut off.

    `non_finite` counts, by metric, the values that were NaN or infinite; they are recorded as null.
    """

    def __init__(self, run_dir: Path, observe: ObserveConfig, *, resume_step: int | None = None) -> None:
        self.run_dir = run_dir
        self.non_finite: Counter[str] = Counter()
        self._observe = observe
        self._reported: set[str] = set()
        self._added: list[tuple[str, Sink]] = []
        last = resume_step or 0
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "samples").mkdir(exist_ok=True)
        self._events = JsonLines(run_dir / "events.jsonl")
        # An evaluation of step 0 is of the run's own start: kept only when the run goes on.
        self._open(last, last if last else -1, last + 1 if last else 0)

    def _open(self, last: int, last_evaluation: int, first_shown: int) -> None:
        """Opens what has rows by step, after `last` at the end; TensorBoard leaves earlier tries from `first_shown` on out."""
        self._metrics = JsonLines(self.run_dir / "metrics.jsonl", keep=lambda row: row["step"] <= last)
        self._evaluations = JsonLines(self.run_dir / "eval.jsonl", keep=lambda row: row["step"] <= last_evaluation)
        for file in (self.run_dir / "samples").glob("step_*.jsonl"):
            if (found := re.fullmatch(r"step_(\d+)\.jsonl", file.name)) and int(found[1]) > last:
                file.unlink()
        self._sinks: list[tuple[str, Sink]] = list(self._added)
        with self._guarded("TensorBoard"):
            made = make_sinks(self.run_dir, self._observe, first_step=first_shown)
            self._sinks = [*((type(sink).__name__, sink) for sink in made), *self._added]

    def rewind(self, step: int) -> None:
        """The run goes back to the end of `step`: what is recorded of later steps is cut off."""
        made = [(name, sink) for name, sink in self._sinks if (name, sink) not in self._added]
        for name, sink in made:
            with self._guarded(name):
                sink.close()
        self._metrics.close()
        self._evaluations.close()
        self._open(step, step, step + 1)

    def last_step(self) -> int:
        """The last step that has a row, 0 when none has."""
        last = 0
        with self._guarded("metrics.jsonl"):
            rows = (self.run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
            last = int(json.loads(rows[-1])["step"]) if rows else 0
        return last

    def add_sink(self, name: str, sink: Sink) -> None:
        """Sends what follows to one more place."""
        self._added.append((name, sink))
        self._sinks.append((name, sink))

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Appends the row of one finished step; `metrics["step"]` counts from 1."""
        self._row(self._metrics, metrics)

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Appends one evaluation; `metrics["step"]` is the policy version that answered, 0 before training."""
        self._row(self._evaluations, metrics)

    def event(self, event: Mapping[str, Any]) -> None:
        """Appends one event, with the time in seconds since 1970 if it has none."""
        self._append(self._events, {"time": round(time.time(), 3), **event})

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Adds samples, as text for people to read, to those of `step`."""
        with self._guarded("samples"):
            lines = [json.dumps(finite(sample), ensure_ascii=False) + "\n" for sample in samples]
            with samples_file(self.run_dir, step).open("a", encoding="utf-8") as file:
                file.writelines(lines)

    def stats(self, stats: Mapping[str, Any]) -> None:
        """Keeps the transfer queue's newest statistics for `relax status`."""
        with self._guarded("stats.json"):
            value = {"time": round(time.time(), 3), **stats}
            write_atomically(self.run_dir / "stats.json", json.dumps(finite(value)).encode() + b"\n")

    def close(self) -> None:
        for name, sink in self._sinks:
            with self._guarded(name):
                sink.close()
        self._sinks = []
        for file in (self._metrics, self._evaluations, self._events):
            file.close()

    def _row(self, file: JsonLines, metrics: Mapping[str, Any]) -> None:
        row = {name: finite(value) for name, value in metrics.items()}
        for name in [name for name, value in row.items() if value is None and metrics[name] is not None]:
            self.non_finite[name] += 1
            if self.non_finite[name] == 1:
                text = f"{name} = {metrics[name]} at step {metrics['step']}; recorded as null"
                log.warning("%s", text)
                self.event({"kind": "warning", "role": "recorder", "text": text})
        self._append(file, row)
        numbers = {name: float(value) for name, value in row.items() if _is_number(value)}
        for name, sink in list(self._sinks):
            with self._guarded(name, on_error=partial(self._leave_out, name)):
                sink.write(int(metrics["step"]), numbers)

    def _append(self, file: JsonLines, row: Mapping[str, Any]) -> None:
        with self._guarded(file.path.name):
            file.append(row)

    def _leave_out(self, name: str) -> None:
        self._sinks = [(other, sink) for other, sink in self._sinks if other != name]
        self._added = [(other, sink) for other, sink in self._added if other != name]

    @contextlib.contextmanager
    def _guarded(self, what: str, on_error: Callable[[], None] | None = None) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the boundary: recording never takes down a run, whatever a sink raises
            if on_error is not None:
                on_error()
            if what not in self._reported:
                self._reported.add(what)
                log.warning("%s of %s cannot be recorded: %s: %s", what, self.run_dir, type(error).__name__, error)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
