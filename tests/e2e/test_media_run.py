"""Runs whose prompts show images: the same queue, roles and guarantees as for text, in every mode."""

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from tests.made_media import clip, sound, tone

pytestmark = pytest.mark.timeout(700)  # a busy machine takes several times as long

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 60, 220), "yellow": (230, 220, 40)}
RunFile = Callable[..., Path]


@pytest.fixture
def media_run(tmp_path: Path, tiny_omni: Callable[[str], Path]) -> RunFile:
    """Writes a run file about coloured squares for a tiny Qwen3-VL, and the squares beside it."""

    def write(runtime: str = "inprocess", num_rows: int = 12) -> Path:
        (tmp_path / "squares").mkdir()
        rows = []
        for number in range(num_rows):
            name = list(COLOURS)[number % len(COLOURS)]
            Image.new("RGB", (64 + 32 * (number % 3), 64), COLOURS[name]).save(tmp_path / "squares" / f"{number}.png")
            rows.append({"prompt": "Look: <image> Which colour?", "answer": name, "images": f"squares/{number}.png"})
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "early.py").write_text(
            "def letters(prompt, response, answer, metadata):\n"
            "    assert any(part['type'] in ('image', 'audio', 'video') for part in prompt[0]['content'])\n"
            "    return sum('a' <= c <= 'm' for c in response) / max(1, len(response))\n"
        )
        path = tmp_path / "squares.toml"
        path.write_text(
            textwrap.dedent(
                f"""
                [run]
                name = "squares"
                dir = "{tmp_path}/runs"
                runtime = "{runtime}"
                [model]
                path = "{tiny_omni("qwen3_vl")}"
                [data]
                path = "{tmp_path}/rows.jsonl"
                type = "file"
                media = {{ num_workers = 1 }}
                [reward]
                type = "function"
                path = "early:letters"
                num_workers = 1
                [rollout]
                group_size = 4
                prompts_per_step = 4
                max_new_tokens = 6
                max_staleness = 0
                [train]
                num_steps = 4
                lr = 1e-2
                """
            )
        )
        return path

    return write


def relax(*arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "relax.cli.main", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)


def steps_of(tmp_path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (tmp_path / "runs/squares/metrics.jsonl").read_text().splitlines()]


def test_a_run_on_images_agrees_with_its_engine(media_run: RunFile, tmp_path: Path) -> None:
    done = relax("train", media_run(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = steps_of(tmp_path)
    assert len(rows) == 4
    assert max(row["rollout_train_logprob_diff/max"] for row in rows) < 1e-4, "the trainer saw what the engine saw"
    assert sum(row["media/prompts"] for row in rows) >= 16
    assert sum(row["media/bytes"] for row in rows) > 0


def test_rows_whose_images_are_damaged_are_counted(media_run: RunFile, tmp_path: Path) -> None:
    path = media_run()
    for number in (1, 5):
        (tmp_path / f"squares/{number}.png").write_bytes(b"\x89PNG\r\n and nothing else")
    done = relax("train", path, "train.num_steps=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sum(row.get("groups/failed", 0) for row in steps_of(tmp_path)) <= 2, "each row is asked for once in the epoch"
    events = [json.loads(line) for line in (tmp_path / "runs/squares/events.jsonl").read_text().splitlines()]
    warnings = "\n".join(str(event["text"]) for event in events if event["kind"] == "warning")
    assert "rows.jsonl:2" in warnings
    assert "squares/5.png" in warnings


@pytest.mark.slow
def test_no_image_can_be_read(media_run: RunFile, tmp_path: Path) -> None:
    path = media_run()
    for file in (tmp_path / "squares").iterdir():
        file.write_bytes(b"\x89PNG\r\n and nothing else")
    done = relax("train", path, "rollout.max_failed_in_a_row=5", cwd=tmp_path)
    assert done.returncode == 1
    assert "5 groups failed one after another" in done.stderr
    assert "image, item 1 of 1" in done.stderr


@pytest.mark.slow
def test_the_modes_learn_the_same_from_images(media_run: RunFile, tmp_path: Path) -> None:
    path = media_run()
    settings = ["algorithm.kl.coef=0.05", "algorithm.old_logprobs=recompute"]
    done = relax("parity", path, "--steps", "6", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal, bit by bit") == 3


@pytest.mark.slow
def test_a_critic_learns_the_same_from_images_in_every_mode(media_run: RunFile, tmp_path: Path) -> None:
    settings = ["algorithm.type=ppo", "critic.lr=1e-3"]
    done = relax("parity", media_run(), "--steps", "4", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal, bit by bit") == 3


@pytest.mark.slow
def test_a_run_on_ray_has_a_critic_that_sees(media_run: RunFile, tmp_path: Path) -> None:
    settings = ["algorithm.type=ppo", "critic.lr=1e-3", "resources.mode=fully_async", "train.checkpoint.every=2"]
    done = relax("train", media_run("ray"), *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = steps_of(tmp_path)
    assert len(rows) == 4
    assert max(row["rollout_train_logprob_diff/max"] for row in rows) < 1e-4
    assert max(row.get("value_loss", 0.0) for row in rows) > 0, "in which step's row it is counted is a matter of timing"
    saved = load_file(tmp_path / "runs/squares/critic/step_4/weights.safetensors")
    begun = load_file(tmp_path / "runs/squares/critic/step_2/weights.safetensors")
    moved = {name for name, weight in saved.items() if not np.array_equal(weight, begun[name])}
    assert any(".visual." in name for name in moved), "what it sees is learned from"


@pytest.mark.slow
def test_a_reward_model_that_sees_scores_a_run(media_run: RunFile, tmp_path: Path) -> None:
    path = media_run()
    pairs = [
        {"prompt": "<image>?", "chosen": c, "rejected": "none", "images": f"squares/{n}.png"} for n, c in enumerate(COLOURS)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    sections = {
        "model": {"build": "tiny-vl"},
        "task": {"type": "reward_model"},
        "data": {"type": "file", "path": f"{tmp_path}/pairs.jsonl", "media": {"num_workers": 1}},
        "train": {"num_steps": 4, "batch_size": 4, "lr": 1e-3},
        "output": {"path": f"{tmp_path}/judge"},
    }
    (tmp_path / "sft.json").write_text(json.dumps(sections))
    done = relax("sft", tmp_path / "sft.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reward = f"reward={{type='reward_model', model={{path='{tmp_path}/judge'}}}}"
    done = relax("train", path, reward, "train.num_steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = steps_of(tmp_path)
    assert all(row["samples"] == 16 and row.get("groups/failed", 0) == 0 for row in rows)
    assert all(row["reward/std_within_group"] > 0 for row in rows)


@pytest.mark.slow
def test_a_run_on_ray_computes_columns_from_images(media_run: RunFile, tmp_path: Path) -> None:
    settings = ["algorithm.kl.coef=0.05", "algorithm.old_logprobs=recompute", "resources.mode=fully_async"]
    done = relax("train", media_run("ray"), *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = steps_of(tmp_path)
    assert len(rows) == 4
    assert max(row["rollout_train_logprob_diff/max"] for row in rows) < 1e-4
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5), "the reference is the policy, and saw the same"
    assert rows[0]["ratio/mean"] == pytest.approx(1, abs=1e-4)


def test_check_names_images_that_cannot_be_read(media_run: RunFile, tmp_path: Path) -> None:
    path = media_run()
    (tmp_path / "squares/1.png").write_bytes(b"\x89PNG\r\n and nothing else")
    done = relax("check", path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 of the first 8 prompts with media cannot be read, as rows.jsonl:2: image, item 1 of 1" in done.stdout
    found = re.search(r"7 prompts decoded: (\d+) to (\d+) tokens", done.stdout)
    assert found, done.stdout
    assert int(found[2]) - int(found[1]) == 4, "images of 64 and 128 by 64 pixels are 4 and 8 tokens"


@pytest.mark.slow
def test_a_run_on_sounds_and_videos_agrees_with_its_engine(
    media_run: RunFile, tmp_path: Path, tiny_omni: Callable[[str], Path]
) -> None:
    path = media_run(num_rows=2)
    for number, hertz in enumerate((220, 880)):
        (tmp_path / f"{number}.wav").write_bytes(sound(tone(0.4 + 0.3 * number, 16_000, hertz), 16_000))
        heard = {"audio": tone(2, 8_000, hertz)} if number else {}  # one video with a sound, and one without
        frames = clip(range(0, 2_000, 100), size=(64, 48), levels=[60 * number + 40] * 20, **heard)
        (tmp_path / f"{number}.mp4").write_bytes(frames)
    rows = [
        {"prompt": "Look: <image> Which colour?", "images": "squares/0.png"},
        {"prompt": "Hear <audio>, then <audio>: <image>?", "audios": ["0.wav", "1.wav"], "images": "squares/1.png"},
        {"prompt": "Watch <video>!", "videos": "0.mp4"},
        {"prompt": "Look: <video> What do you hear? <audio>", "videos": "1.mp4", "audios": "0.wav"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [f"model.path={tiny_omni('qwen3_omni')}", "algorithm.kl.coef=0.05", "resources.mode=hybrid"]
    settings += ["train.num_steps=3", "data.media.video.max_frames=4", "data.media.video.audio=true"]
    done = relax("train", path, *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = steps_of(tmp_path)
    assert all(step["samples"] == 16 for step in steps), "no group failed"
    assert max(step["rollout_train_logprob_diff/max"] for step in steps) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("build", ["tiny-vl", "tiny-omni"])
def test_sft_and_eval_read_the_same_rows(media_run: RunFile, tmp_path: Path, build: str) -> None:
    path, data = media_run(), {"type": "file", "path": f"{tmp_path}/rows.jsonl", "media": {"num_workers": 1}}
    sections = {
        "model": {"build": build},
        "data": data,
        "train": {"num_steps": 80, "batch_size": 12, "lr": 4e-3},
        "eval": {"data": data, "every": 80, "temperature": 0.0, "max_new_tokens": 6},
        "reward": {"type": "exact"},
        "output": {"path": f"{tmp_path}/taught"},
    }
    (tmp_path / "sft.json").write_text(json.dumps(sections))
    done = relax("sft", tmp_path / "sft.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(r"held-out reward ([0-9.]+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 0.7, "four colours are told apart"
    evaluation = ["eval.data.type=file", f"eval.data.path={tmp_path}/rows.jsonl", "eval.data.media.num_workers=1"]
    evaluation += ["reward={type='exact'}", "eval.num_prompts=12"]
    done = relax("eval", path, "--model", tmp_path / "taught", *evaluation, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["eval/accuracy"] == pytest.approx(float(found[1]), abs=1e-3), "it is the same model"
