"""`relax parity RUN.toml`: does asynchrony change what is learned? With the bound at 0 it must not, to the last bit.

the same run, four times:  colocate | hybrid | fully_async | fully_async, killed in the middle and resumed
compared with colocate:    every training metric of every step, and the bytes of the exported weights
"""

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.config import RunConfig, load_config
from relax.config.load import make_config
from relax.errors import ConfigError, RoleError

# metrics that say how long something took, or what others did meanwhile (a critic of its own tells them when it is done)
_TIMES = ("_s", "_per_s")
_OF_OTHERS = (
    "value_loss",
    "value/",
    "return/",
    "critic/",
    "genrm/",
    "media/",
    "wait/",
    "publish/",
    "groups",
    "outcome/",
    "tokens/generated",
    "restarts",
    "time_s",
)
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Trial:
    """One of the runs: what it is called, its mode, and after which step it is killed, if at all."""

    title: str
    mode: str
    kill_after: int | None = None

    @property
    def name(self) -> str:
        return self.title.replace(" ", "-")


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run came to: the training metrics of each step, and a digest of its exported weights."""

    steps: tuple[Mapping[str, Any], ...]
    weights: str


def parity(run_file: Path, overrides: Sequence[str], *, steps: int, out: Path | None = None) -> int:
    """Runs the trials one after another and compares them; returns the exit code, 0 when all are equal."""
    config = load_config(run_file, [*overrides])
    if config.train.publish_every * config.train.updates_per_step > 1:
        raise ConfigError(
            "relax parity compares the modes at rollout.max_staleness = 0, where every update is published: add "
            "train.updates_per_step=1 train.publish_every=1 to the command"
        )
    folder = out or Path(config.run.dir) / f"{config.run.name}-parity"
    trials = [
        Trial("colocate", "colocate"),
        Trial("hybrid", "hybrid"),
        Trial("fully_async", "fully_async"),
        Trial("fully_async killed and resumed", "fully_async", kill_after=steps // 2),
    ]
    expected: Trace | None = None
    num_different = 0
    for trial in trials:
        started = time.monotonic()
        found = _run(_config(config, trial, folder, steps), trial)
        took = f"{time.monotonic() - started:.0f} s"
        if expected is None:
            expected = found
            sys.stdout.write(f"{trial.title}: {steps} steps in {took}, weights {found.weights[:12]}: the standard\n")
            continue
        differences = list(compare(expected, found))
        num_different += bool(differences)
        verdict = "equal, bit by bit" if not differences else f"DIFFERENT: {differences[0]}"
        sys.stdout.write(f"{trial.title}: {steps} steps in {took}, weights {found.weights[:12]}: {verdict}\n")
        sys.stdout.writelines(f"  {line}\n" for line in differences[1:8])
    names = sorted(expected.steps[0]) if expected is not None and expected.steps else []
    sys.stdout.write(f"compared at each step: {', '.join(names)}\n")
    return 1 if num_different else 0


def compare(expected: Trace, found: Trace) -> Iterator[str]:
    """The differences, in words, the first step first."""
    if len(expected.steps) != len(found.steps):
        yield f"{len(found.steps)} steps instead of {len(expected.steps)}"
    for index, (wanted, given) in enumerate(zip(expected.steps, found.steps, strict=False)):
        for name in sorted(wanted.keys() | given.keys()):
            if wanted.get(name) != given.get(name):
                yield f"step {index + 1}: {name} is {given.get(name)!r} instead of {wanted.get(name)!r}"
    if expected.weights != found.weights:
        yield "the weights after the last step"


def is_of_training(name: str) -> bool:
    """Whether a metric is a matter of what was trained, and not of how long it took."""
    return not name.endswith(_TIMES) and not name.startswith(_OF_OTHERS)


def _config(config: RunConfig, trial: Trial, folder: Path, steps: int) -> RunConfig:
    """The same run in the trial's mode, on-policy and deterministic, with checkpoints to resume from."""
    raw = config.model_dump(mode="json")
    raw["run"] |= {"name": trial.name, "dir": str(folder), "deterministic": True}
    raw["resources"]["mode"] = trial.mode
    raw["rollout"] |= {"max_staleness": 0, "oversampling": 1.0}
    raw["train"]["num_steps"] = steps
    raw["train"]["checkpoint"] |= {"every": max(1, steps // 3), "keep": 2}
    raw["eval"] = None
    raw["faults"] = {}
    raw["observe"] |= {"progress": False, "tensorboard": False}
    return make_config(raw, source="relax parity")


def _run(config: RunConfig, trial: Trial) -> Trace:
    run_dir = Path(config.run.dir) / config.run.name
    run_file = Path(config.run.dir) / f"{config.run.name}.json"
    run_file.parent.mkdir(parents=True, exist_ok=True)
    run_file.write_text(config.model_dump_json(indent=2), "utf-8")
    log = run_file.with_suffix(".log")
    with log.open("wb") as output:
        process = _train(output, str(run_file), "--overwrite")
        if trial.kill_after is not None:
            _kill_after(process, run_dir / "metrics.jsonl", trial.kill_after)
            process = _train(output, "--resume", str(run_dir))
        if process.wait() != 0:
            raise RoleError(f"relax parity: the run {trial.title!r} failed; its output is {log}:\n{_tail(log)}")
    return _trace(run_dir)


def _train(output: Any, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "relax.cli.main", "train", *arguments]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def _kill_after(process: "subprocess.Popen[bytes]", metrics: Path, step: int) -> None:
    """Ends the run as a power cut would, once it has trained `step` steps."""
    while process.poll() is None:
        if metrics.is_file() and metrics.read_bytes().count(b"\n") >= step:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return
        time.sleep(_POLL_S)
    raise ConfigError(f"relax parity: the run ended before step {step}, where it was to be killed; use more --steps")


def _trace(run_dir: Path) -> Trace:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    digest = hashlib.sha256()
    for file in sorted((run_dir / "hf").glob("*.safetensors")):
        digest.update(file.read_bytes())
    return Trace(tuple({k: v for k, v in row.items() if is_of_training(k)} for row in rows), digest.hexdigest())


def _tail(log: Path) -> str:
    return "\n".join(f"  {line}" for line in log.read_text("utf-8", errors="replace").splitlines()[-8:])
