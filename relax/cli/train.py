"""`relax train`: from a run file to a finished run folder."""

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from relax.cli.check import check_config
from relax.cli.command import typed
from relax.config import RunConfig, load_config
from relax.control.controller import Controller, RunResult
from relax.control.recovery import USER_ERRORS
from relax.control.runtime import Runtime
from relax.errors import CheckpointError, ConfigError, RelaxError
from relax.observe.log import NoteHandler, log_for_a_while
from relax.observe.plot import plot_run
from relax.observe.progress import Progress
from relax.observe.recorder import RunRecorder
from relax.observe.run_folder import RunFolder, State

_FAILED, _REFUSED, _STOPPED = 1, 2, 130
# Ray reads these when it is imported. What the death of a process means is said by the controller, in one line.
_QUIET_RAY = {"RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed", "GRPC_VERBOSITY": "ERROR"}


def train(run_file: Path | None, overrides: list[str], *, resume: Path | None = None, overwrite: bool = False) -> int:
    """Runs to the end and returns the exit code. Raises `RelaxError` for what the user can mend."""
    if resume is not None:
        config, run_dir = _resumed(resume, overrides)
    else:
        if run_file is None:
            raise ConfigError("relax train needs a run file, or --resume RUN; see relax train --help")
        config = load_config(run_file, overrides)
        run_dir = Path(config.run.dir) / config.run.name
    check_config(config).raise_on_error()
    folder = RunFolder(run_dir)
    with folder.lock():
        try:
            if resume is None:
                _fresh(folder, overwrite)
                folder.write_config(config)  # a resumed run keeps the old one until its roles have started with the new one
                return _run(config, folder, None, is_resumed=False)
            checkpoint = _checkpoint(run_dir)
            if checkpoint is not None and checkpoint[0] >= config.train.num_steps and folder.state().state == "finished":
                sys.stdout.write(_already_finished(run_dir, checkpoint[0], config.train.num_steps))
                return 0
            return _run(config, folder, checkpoint, is_resumed=True)
        except OSError as error:
            raise ConfigError(f"{run_dir}: the run folder cannot be written: {error.strerror or error}; set run.dir") from error


def _already_finished(run_dir: Path, step: int, num_steps: int) -> str:
    return (
        f"{run_dir} is finished: step {step}, and train.num_steps = {num_steps}. To go on: "
        f"{_resume_command(run_dir)} train.num_steps={2 * step}\n"
    )


def _resume_command(run_dir: Path) -> str:
    return typed(f"relax train --resume {shlex.quote(str(run_dir))}")


def _resumed(run_dir: Path, overrides: list[str]) -> tuple[RunConfig, Path]:
    RunFolder(run_dir).check_is_run()
    return load_config(run_dir / "config.json", overrides), run_dir


def _fresh(folder: RunFolder, overwrite: bool) -> None:
    if not folder.has_run():
        return
    if not overwrite:
        raise ConfigError(
            f"{folder.path} holds a run already: continue it with {_resume_command(folder.path)}, replace it with "
            "--overwrite, or choose another run.name"
        )
    folder.clear()


def _checkpoint(run_dir: Path) -> tuple[int, Path] | None:
    # here, since only a resumed run needs it
    from relax.train.checkpoint import CheckpointStore

    try:
        return CheckpointStore(run_dir / "checkpoints", keep=1).latest()
    except OSError as error:
        raise CheckpointError(f"{run_dir}/checkpoints cannot be read: {error}") from error


def make_runtime(config: RunConfig) -> Runtime:
    """The runtime that `run.runtime` names; only the chosen one is imported."""
    if config.run.runtime == "inprocess":
        from relax.control.inprocess import InProcessRuntime

        return InProcessRuntime(config)
    for name, value in _QUIET_RAY.items():
        os.environ.setdefault(name, value)
    from relax.control.cluster import RayRuntime

    return RayRuntime(config)


def _run(config: RunConfig, folder: RunFolder, checkpoint: tuple[int, Path] | None, *, is_resumed: bool) -> int:
    step, path = checkpoint if checkpoint is not None else (0, None)
    before = folder.state()
    folder.set_state("running", step)
    recorder = RunRecorder(folder.path, config.observe, resume_step=step)
    controller: Controller | None = None

    def end(state: State, message: str) -> None:
        if is_resumed and not (controller and controller.is_started):  # refused: the run stands as it stood
            state, message = before.state, before.message
        try:
            folder.set_state(state, controller.result.step if controller else step, message)
        except OSError as error:  # of a full disk: the reason why the run ended is worth more
            sys.stderr.write(f"{folder.path}/state.json cannot be written: {error.strerror or error}\n")

    try:
        with Progress(config) as progress, _logs(folder.path, progress):
            if is_resumed and checkpoint is None:
                progress.note(f"{folder.path} has no complete checkpoint: the run begins again at step 0")
            on_started = (lambda: folder.write_config(config)) if is_resumed else None
            runtime = make_runtime(config)
            controller = Controller(config, folder.path.resolve(), runtime, recorder, progress, step, on_started)
            result = asyncio.run(_until_done_or_stopped(controller, path.resolve() if path else None))
    except asyncio.CancelledError:
        end("stopped", "stopped by the user")
        sys.stderr.write(f"stopped; {_how_to_go_on(folder.path)}\n")
        return _STOPPED
    except RelaxError as error:
        end("failed", str(error))
        sys.stderr.write(f"error: {error}\n{folder.path}/log has the details; {_how_to_go_on(folder.path)}\n")
        is_refused = isinstance(error, USER_ERRORS) and not (controller and controller.is_started)
        return _REFUSED if is_refused else _FAILED
    except BaseException as error:
        end("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        recorder.close()
    end("finished", "")
    sys.stdout.write(_summary(config, folder.path, result))
    return 0


def _how_to_go_on(run_dir: Path) -> str:
    """What is true of the folder as it is: without a checkpoint nothing continues."""
    try:
        found = _checkpoint(run_dir)
    except CheckpointError as error:
        return str(error)
    if found is None:
        return f"no checkpoint was saved yet: begin again with {_resume_command(run_dir)}"
    return f"continue from step {found[0]} with: {_resume_command(run_dir)}"


@contextlib.contextmanager
def _logs(run_dir: Path, progress: Progress) -> Iterator[None]:
    """What this process logs goes to `log/run.log`; what cannot be recorded is shown as well, since the disk may be full."""
    shown, observe = NoteHandler(progress.note), logging.getLogger("relax.observe")
    observe.addHandler(shown)
    try:
        with log_for_a_while(run_dir, "run"):
            yield
    finally:
        observe.removeHandler(shown)


async def _until_done_or_stopped(controller: Controller, checkpoint: Path | None) -> RunResult:
    """The first Ctrl-C (or SIGTERM) stops the roles in order; the second ends every process at once."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(controller.run(checkpoint))
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            _end_children()
            os._exit(_STOPPED)
        controller.progress.note("stopping; press Ctrl-C again to end at once")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    return await task


def _end_children() -> None:
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue


def _summary(config: RunConfig, run_dir: Path, result: RunResult) -> str:
    lines = [f"\n{config.run.name}: step {result.step} reached {result.seconds:.0f} s after the roles were started"]
    if result.first_reward is not None and result.last_reward is not None:
        lines.append(f"  training reward     {result.first_reward:.3f} -> {result.last_reward:.3f}")
    if len(result.evaluations) > 1:
        (_, before), (_, after) = result.evaluations[0], result.evaluations[-1]
        lines.append(f"  held-out accuracy   {before:.3f} -> {after:.3f}")
    if result.num_restarts:
        lines.append(f"  restarts            {result.num_restarts}; relax status tells the last ones")
    try:
        lines.append(f"  plot                {plot_run(run_dir)}")
    except OSError as error:  # the run is finished whether or not it can be drawn
        lines.append(f"  plot                cannot be written: {error.strerror or error}")
    quoted = shlex.quote(str(run_dir))
    lines += [
        f"  run folder          {run_dir}",
        f"  exported model      {run_dir / 'hf'}",
        "what next:",
        f"  {typed(f'relax status {quoted}')}",
        f"  {_resume_command(run_dir)} train.num_steps={2 * config.train.num_steps}",
        f"  {typed(f'tensorboard --logdir {quoted}/tb')}",
        "",
    ]
    return "\n".join(lines)
