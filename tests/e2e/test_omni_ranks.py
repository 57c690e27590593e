"""Ranks of which some see, some hear and some read text alone compute what one process does, and none waits for another."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import omni_rank

pytestmark = pytest.mark.timeout(300)


def run_ranks(place: Path, model: Path, how: str) -> list[tuple[int, str]]:
    """Exit status and output of both ranks; once one has failed the other is given a few seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    logs = [place / f"{how}-{rank}.log" for rank in range(2)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(Path(omni_rank.__file__)), str(rank), str(place), str(model), how]
            with log.open("w") as out:
                ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + 250
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            if any(process.poll() for process in ranks):
                deadline = min(deadline, time.monotonic() + 10)
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
    return [(process.wait(), log.read_text()) for process, log in zip(ranks, logs, strict=True)]


@pytest.mark.parametrize("how", ["sharded", "replicated"])
def test_ranks_that_see_hear_and_read_agree_with_one_process(
    tiny_omni: Callable[[str], Path], tmp_path: Path, how: str
) -> None:
    for status, said in run_ranks(tmp_path, tiny_omni("qwen3_omni"), how):
        assert status == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded+untouched", "replicated+untouched"])
def test_without_the_pass_of_nothing_ranks_wait_for_one_another(
    tiny_omni: Callable[[str], Path], tmp_path: Path, how: str
) -> None:
    """The other test could not fail otherwise."""
    results = run_ranks(tmp_path, tiny_omni("qwen3_omni"), how)
    assert all(status != 0 for status, _ in results), results
    said = "\n".join(text for _, text in results)
    assert "AssertionError" not in said, "they did not get as far as comparing"
    assert "gloo" in said.lower()
