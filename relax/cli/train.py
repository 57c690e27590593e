"""`relax train`: from a run file to a finished run folder."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil

from relax.cli.check import check_config
from relax.config import RunConfig, load_config
from relax.control.controller import Controller, RunResult
from relax.control.runtime import Runtime
from relax.errors import CheckpointError, ConfigError, RelaxError
from relax.observe.plot import plot_run
from relax.observe.progress import Progress
from relax.observe.recorder import RunRecorder
from relax.observe.run_folder import RunFolder

_STOPPED = 130


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
        if resume is None:
            _fresh(folder, overwrite)
        folder.write_config(config)
        checkpoint = _checkpoint(run_dir) if resume is not None else None
        return _run(config, folder, checkpoint)


def _resumed(run_dir: Path, overrides: list[str]) -> tuple[RunConfig, Path]:
    config_file = run_dir / "config.json"
    if not config_file.is_file():
        raise ConfigError(f"{run_dir} is not a run folder: it has no config.json")
    return load_config(config_file, overrides), run_dir


def _fresh(folder: RunFolder, overwrite: bool) -> None:
    if not folder.has_run():
        return
    if not overwrite:
        raise ConfigError(
            f"{folder.path} holds a run already: continue it with relax train --resume {folder.path}, replace it with "
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
    from relax.control.cluster import RayRuntime

    return RayRuntime(config)


def _run(config: RunConfig, folder: RunFolder, checkpoint: tuple[int, Path] | None) -> int:
    step, path = checkpoint if checkpoint is not None else (0, None)
    folder.set_state("running", step)
    recorder = RunRecorder(folder.path, config.observe, resume_step=step)
    try:
        with Progress(config) as progress:
            controller = Controller(config, folder.path.resolve(), make_runtime(config), recorder, progress)
            result = asyncio.run(_until_done_or_stopped(controller, path.resolve() if path else None))
    except asyncio.CancelledError:
        folder.set_state("stopped", step, "stopped by the user")
        sys.stderr.write(f"stopped; continue with: relax train --resume {folder.path}\n")
        return _STOPPED
    except RelaxError as error:
        folder.set_state("failed", step, str(error))
        sys.stderr.write(
            f"error: {error}\n{folder.path}/log has the details; continue with: relax train --resume {folder.path}\n"
        )
        return 1
    except BaseException as error:
        folder.set_state("failed", step, f"{type(error).__name__}: {error}")
        raise
    finally:
        recorder.close()
    folder.set_state("finished", result.step)
    sys.stdout.write(_summary(config, folder.path, result))
    return 0


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
    lines = [f"\n{config.run.name}: {result.step} steps in {result.seconds:.0f} s"]
    if result.first_reward is not None and result.last_reward is not None:
        lines.append(f"  training reward     {result.first_reward:.3f} -> {result.last_reward:.3f}")
    if len(result.evaluations) > 1:
        (_, before), (_, after) = result.evaluations[0], result.evaluations[-1]
        lines.append(f"  held-out accuracy   {before:.3f} -> {after:.3f}")
    lines += [
        f"  plot                {plot_run(run_dir)}",
        f"  run folder          {run_dir}",
        f"  exported model      {run_dir / 'hf'}",
        "what next:",
        f"  relax status {run_dir}",
        f"  relax train --resume {run_dir} train.num_steps={2 * config.train.num_steps}",
        f"  tensorboard --logdir {run_dir / 'tb'}",
        "",
    ]
    return "\n".join(lines)
