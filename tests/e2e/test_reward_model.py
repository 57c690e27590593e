"""A run whose reward is a classifier's: every recorded reward is what transformers says, and the role may die on the way."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from relax.config import load_config
from relax.control.controller import Controller
from relax.control.inprocess import InProcessRuntime
from relax.observe.progress import Progress
from relax.observe.recorder import RunRecorder

pytestmark = pytest.mark.timeout(400)  # a busy machine takes several times as long


@pytest.fixture
def judge(tiny_model: Path, tmp_path: Path) -> Path:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "judge")
    return tmp_path / "judge"


def test_a_run_is_rewarded_by_its_own_reward_model_also_after_that_died(
    run_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.chdir(tmp_path)  # where the other part is found
    parts = {
        "style": {"type": "reward_model", "model": {"path": str(judge)}},
        "letters": {"type": "function", "path": "letters_reward:share_of_early_letters"},
    }
    path = run_file()
    text = path.read_text("utf-8").replace('type = "function"', 'type = "sum"\ntime_limit_s = 60')
    text = text.replace('path = "letters_reward:share_of_early_letters"', "")
    for name, part in parts.items():
        model = part.get("model")
        lines = [f'{key} = "{value}"' for key, value in part.items() if key != "model"]
        text += f"\n[reward.parts.{name}]\n" + "\n".join(lines)
        text += f'\nmodel = {{ path = "{model["path"]}" }}\n' if model else "\n"
    path.write_text(text, "utf-8")
    kill = 'faults.events=[{ kind = "kill", target = "reward_model", step = 3 }]'
    config = load_config(path, [kill, "train.num_steps=8", "train.checkpoint.every=0", "services.restart_backoff_s=0.1"])
    torch.set_num_threads(1)
    run_dir = Path(config.run.dir) / config.run.name
    run_dir.mkdir(parents=True)
    recorder = RunRecorder(run_dir, config.observe)
    controller = Controller(config, run_dir, InProcessRuntime(config), recorder, Progress(config), 0)
    try:
        asyncio.run(asyncio.wait_for(controller.run(None), 300))
    finally:
        recorder.close()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["samples"] for row in rows] == [32] * 8
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["role"] for event in events if event["kind"] == "recovery"] == ["reward_model"]
    samples = [json.loads(line) for file in (run_dir / "samples").glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(samples) == 64
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(judge), AutoTokenizer.from_pretrained(judge)
    for sample in samples:
        chat = [*sample["input"], {"role": "assistant", "content": sample["response"]}]
        with torch.no_grad():
            logits = model(**tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)).logits
        assert sample["parts"]["style"] == pytest.approx(float(logits[0, 0]), abs=1e-5)
