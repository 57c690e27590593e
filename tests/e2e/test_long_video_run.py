"""2,000 steps on videos: nothing grows in memory, and the policy keeps what it has learned."""

import json
import statistics
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.made_media import clip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # four minutes of a core

NUM_STEPS = 2000
LOOKS = (500, 1000, 1500, 1900)  # steps after which memory is looked at
# From the first look to any other: bytes of a process, of shared memory and of the queue. The features of all prompts between
# two looks are over 100 MB. What is in hand changes from step to step, and allocators keep a little more than that.
MOST_GROWTH = 8 << 20
MOST_NEW_FILES = 16

REWARD = '''
"""Early letters for a clip that grows brighter, late ones for one that grows darker: many answers are right, and no word is."""


def letters(prompt, response, answer, metadata):
    first, last = answer
    return sum(first <= c <= last for c in response.lower()) / max(1, len(response))
'''

RUN = """
    [run]
    name = "long"
    dir = "{folder}/runs"
    runtime = "inprocess"
    [model]
    path = "{model}"
    [data]
    type = "file"
    path = "{folder}/rows.jsonl"
    media = {{ num_workers = 1, video = {{ max_frames = 2 }} }}
    [reward]
    type = "function"
    path = "letters_reward:letters"
    num_workers = 1
    [algorithm]
    kl = {{ coef = 0.05 }}
    [rollout]
    group_size = 4
    prompts_per_step = 2
    max_new_tokens = 2
    max_staleness = 1
    [train]
    num_steps = {steps}
    lr = 1e-3
    [observe]
    tensorboard = false
    progress = false
"""


def write_run(folder: Path, model: Path) -> Path:
    """A run on clips of four frames, half of which grow brighter and half darker through the same greys."""
    rows = []
    for number in range(16):
        levels = [20 + 8 * number + 30 * step for step in range(4)]
        (folder / f"{number}.mp4").write_bytes(clip(range(0, 2_000, 500), (64, 64), levels=levels[:: (1, -1)[number % 2]]))
        rows.append({"prompt": "Brighter or darker?", "answer": ("am", "nz")[number % 2], "videos": f"{number}.mp4"})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "letters_reward.py").write_text(REWARD)
    path = folder / "long.toml"
    path.write_text(textwrap.dedent(RUN.format(folder=folder, model=model, steps=NUM_STEPS)))
    return path


def memory_of(run: psutil.Process) -> dict[str, float]:
    """Bytes held by each process of the run, by shared memory and by the queue, and the number of open files."""
    found: Counter[str] = Counter()
    for process in (run, *run.children(recursive=True)):
        name = next((part for part in process.cmdline() if part.startswith("relax.")), "others")
        found[f"memory of {name}"] += process.memory_info().rss
        found["open files"] += process.num_fds()
        found["shared memory"] += sum(_shared_maps(process.pid))
    return dict(found)


def _shared_maps(pid: int) -> Iterator[int]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/dev/shm/" in line or "/memfd:relax" in line:
            start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
            yield end - start


def look(run: psutil.Process, run_dir: Path) -> dict[str, float]:
    """Medians of a few seconds: what is in hand changes within a step."""
    seen = []
    for _ in range(9):
        seen.append(memory_of(run) | {"queue": json.loads((run_dir / "stats.json").read_text())["bytes"]["held"]})
        time.sleep(0.4)  # real processes, whose memory is a matter of the moment
    return {name: statistics.median(at.get(name, 0) for at in seen) for name in seen[-1]}


def num_steps(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def mean(rows: list[dict[str, float]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def test_memory_is_flat_and_the_policy_holds(tmp_path: Path, tiny_omni: Callable[[str], Path]) -> None:
    path, run_dir = write_run(tmp_path, tiny_omni("qwen3_vl")), tmp_path / "runs/long"
    command = [sys.executable, "-m", "relax.cli.main", "train", str(path)]
    looks: dict[int, dict[str, float]] = {}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
        try:
            for step in LOOKS:
                while process.poll() is None and num_steps(run_dir / "metrics.jsonl") < step:
                    time.sleep(1)
                if process.poll() is None:
                    looks[step] = look(psutil.Process(process.pid), run_dir)
            assert process.wait(timeout=600) == 0, (tmp_path / "output").read_text()[-3000:]
        finally:
            process.kill()
            process.wait()
    assert list(looks) == list(LOOKS)
    first = looks[LOOKS[0]]
    for step, found in looks.items():
        assert found.keys() == first.keys(), f"step {step}: there are other processes"
        for name, amount in found.items():
            room = MOST_NEW_FILES if name == "open files" else MOST_GROWTH
            assert amount <= first[name] + room, f"{name} grew from {first[name]:,.0f} to {amount:,.0f} by step {step}"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    early, late = rows[700:900], rows[-200:]
    assert len(rows) == NUM_STEPS
    assert not any(row.get("groups/failed") or row["skipped"] for row in rows)
    assert mean(late, "reward/mean") > max(0.8, mean(early, "reward/mean") - 0.05), "what was learned is held"
    assert mean(late, "entropy") > 0.1, "more than one word is left"
    assert mean(late, "kl") < 10, "and the policy is not far from where it began"
