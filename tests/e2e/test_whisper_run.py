"""A Whisper learns which tone it hears, is trained by RL on what it says, and the modes learn the same."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.made_media import sound, tone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]

TONES = {"low": 220, "middle": 440, "high": 880, "top": 1760}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, object]:
    """Tones of several lengths, and their names."""
    rows = []
    for number in range(12):
        name = list(TONES)[number % len(TONES)]
        (tmp_path / f"{number}.wav").write_bytes(sound(tone(0.3 + 0.1 * (number % 5), 16_000, TONES[name]), 16_000))
        rows.append({"prompt": "<audio>", "answer": name, "audios": f"{number}.wav"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"type": "file", "path": f"{tmp_path}/rows.jsonl", "media": {"num_workers": 1}}


def relax(*arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "relax.cli.main", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)


def run_file(tmp_path: Path, data: dict[str, object], model: Path) -> Path:
    sections = {
        "run": {"name": "tones", "dir": f"{tmp_path}/runs", "runtime": "inprocess"},
        "model": {"path": str(model)},
        "data": data,
        "reward": {"type": "exact", "num_workers": 1},
        "rollout": {"group_size": 4, "prompts_per_step": 4, "max_new_tokens": 8, "max_staleness": 0},
        "train": {"num_steps": 2, "lr": 1e-3},
    }
    path = tmp_path / "tones.json"
    path.write_text(json.dumps(sections))
    return path


def test_tones_are_learned_and_what_is_trained_is_what_was_sampled(tmp_path: Path, data: dict[str, object]) -> None:
    taught = {
        "model": {"build": "tiny-whisper"},
        "data": data,
        "train": {"num_steps": 40, "batch_size": 12, "lr": 4e-3},
        "eval": {"data": data, "every": 40, "temperature": 0.0, "max_new_tokens": 8},
        "reward": {"type": "exact"},
        "output": {"path": f"{tmp_path}/taught"},
    }
    (tmp_path / "sft.json").write_text(json.dumps(taught))
    done = relax("sft", tmp_path / "sft.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(r"held-out reward ([0-9.]+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 0.9, "four tones are told apart"
    path = run_file(tmp_path, data, tmp_path / "taught")
    done = relax("train", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/tones/metrics.jsonl").read_text().splitlines()]
    assert max(row["rollout_train_logprob_diff/max"] for row in rows) < 1e-4
    assert (tmp_path / "runs/tones/hf/processor_config.json").is_file()


def test_the_modes_learn_the_same_from_sounds(tmp_path: Path, data: dict[str, object], tiny_omni) -> None:
    path = run_file(tmp_path, data, tiny_omni("whisper"))
    (tmp_path / "letters.py").write_text(
        "def share_of_a_to_m(prompt, response, answer, metadata):\n"
        "    return sum('a' <= c <= 'm' for c in response) / max(1, len(response))\n"
    )
    settings = ["algorithm.kl.coef=0.05", "algorithm.old_logprobs=recompute"]
    settings += ["reward={type='function', path='letters:share_of_a_to_m', num_workers=1}"]
    done = relax("parity", path, "--steps", "2", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal, bit by bit") == 3
