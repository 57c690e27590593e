"""Where metrics go besides the run folder's own files. A sink that fails is reported once and left out from then on."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from relax.config.observe import ObserveConfig


class Sink(Protocol):
    """Takes the finite numbers of one step or evaluation by name. May raise: the recorder sees to it."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files under `tb/`, written without torch. `first_step`: what a viewer shows from there on is of an earlier try."""

    _FLUSH_S = 5

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder), max_queue_size=100, flush_secs=self._FLUSH_S)
        if first_step:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items() if name != "step"]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


def make_sinks(run_dir: Path, observe: ObserveConfig, first_step: int) -> list[Sink]:
    """The sinks that the configuration asks for."""
    return [TensorBoardSink(run_dir / "tb", first_step)] if observe.tensorboard else []
