"""Runs of an example, by default the arithmetic one: `relax train` in a process of its own, and the rows it leaves."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = "examples/arithmetic"
_QUIET = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false", "GOMP_SPINCOUNT": "0"}
ENVIRONMENT = (
    os.environ | _QUIET | {"PYTHONPATH": os.pathsep.join((str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")))}
)


def warm_start(example: str = EXAMPLE) -> None:
    """Makes the example's warm-started model, if it is missing."""
    recipe = tomllib.loads((ROOT / example / "sft.toml").read_text("utf-8"))
    if not (ROOT / recipe["output"]["path"] / "config.json").exists():
        relax("sft", f"{example}/sft.toml")


def relax(*words: str) -> None:
    """Calls the command; ends this program with what it said when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "relax.cli.main", *words], cwd=ROOT, capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    if done.returncode != 0:
        sys.exit(f"relax {' '.join(words)} failed:\n{done.stderr[-3000:]}")


def train(folder: Path, name: str, overrides: Sequence[str], example: str = EXAMPLE) -> list[dict[str, Any]]:
    """The example with `overrides`, in `folder/name`, without what only costs time; its rows of `metrics.jsonl`."""
    quiet = ("train.checkpoint.every=0", "eval=none", "observe.progress=false", "observe.tensorboard=false")
    relax("train", f"{example}/run.toml", f"run.name={name}", f"run.dir={folder}", *quiet, *overrides)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()]
