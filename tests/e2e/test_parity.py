"""Asynchrony with the bound at 0 changes no bit of what is learned, whatever the mode, killed and resumed too."""

import subprocess
import sys
from pathlib import Path

import pytest

from relax.cli.parity import Trace, compare, is_of_training

pytestmark = pytest.mark.timeout(700)  # a busy machine takes several times as long


def parity(run_file: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "relax.cli.main", "parity", str(run_file), *arguments]
    return subprocess.run(command, cwd=run_file.parent, capture_output=True, text=True, timeout=600, check=False)


def test_the_modes_learn_the_same(run_file) -> None:
    done = parity(run_file("inprocess"), "--steps", "12", "algorithm.kl.coef=0.05", "algorithm.old_logprobs=recompute")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal, bit by bit") == 3
    compared = done.stdout.splitlines()[-1]
    assert all(name in compared for name in ("loss", "grad_norm", "kl", "ratio/mean", "age/max"))


@pytest.mark.slow
def test_the_modes_learn_the_same_on_ray(run_file) -> None:
    done = parity(run_file("ray"), "--steps", "20", "rollout.filter_zero_signal=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal, bit by bit") == 3


def test_a_difference_in_one_bit_is_named() -> None:
    expected = Trace(({"loss": 0.1, "lr": 1.0}, {"loss": 0.2, "lr": 1.0}), "ab")
    assert list(compare(expected, expected)) == []
    found = Trace(({"loss": 0.1, "lr": 1.0}, {"loss": 0.2 + 2**-54, "lr": 1.0}), "cd")
    differences = list(compare(expected, found))
    assert differences[0].startswith("step 2: loss is 0.20000000000000")
    assert differences[1] == "the weights after the last step"
    assert next(compare(expected, Trace(expected.steps[:1], "ab"))) == "1 steps instead of 2"


def test_times_are_not_compared() -> None:
    assert [
        name for name in ("loss", "step_s", "wait/actor_s", "tokens_per_s", "age/max", "publish/bytes") if is_of_training(name)
    ] == [
        "loss",
        "age/max",
    ]
