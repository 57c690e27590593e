"""A run whose judge sees what the policy saw, wherever the pictures are: in files, and inside of rows."""

import base64
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.made_media import encoded

REWARD = '''
from relax.rewards.judge import ask


async def sees(prompt, response, answer, metadata):
    """1 where the judge says something else of the response when it is shown the picture."""
    shown = [{"role": "user", "content": [*prompt[0]["content"], {"type": "text", "text": response}]}]
    told = [{"role": "user", "content": f"{prompt[0]['content'][-1]['text']}{response}"}]
    replies = [await ask(messages, temperature=0) for messages in (shown, told)]
    return float(replies[0].response != replies[1].response)
'''


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("runtime", ["inprocess", "ray"])
def test_a_judge_is_shown_the_pictures_of_prompts(tmp_path: Path, tiny_omni: Callable[[str], Path], runtime: str) -> None:
    rows = []
    for number, colour in enumerate(("red", "green", "blue", "yellow")):
        png = encoded(Image.new("RGB", (64, 64), colour))
        (tmp_path / f"{number}.png").write_bytes(png)
        shown = f"{number}.png" if number % 2 else f"data:image/png;base64,{base64.b64encode(png).decode()}"
        rows.append({"prompt": "<image>Which colour?", "answer": colour, "images": shown})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "held.jsonl").write_text(json.dumps(rows[-2]))  # whose picture is inside of it
    (tmp_path / "seeing.py").write_text(REWARD)
    (tmp_path / "run.toml").write_text(
        textwrap.dedent(
            f"""
            run = {{ name = "seen", dir = "{tmp_path}/runs", runtime = "{runtime}" }}
            model.path = "{tiny_omni("qwen3_vl")}"
            data = {{ type = "file", path = "{tmp_path}/rows.jsonl", media = {{ num_workers = 1 }} }}
            reward = {{ type = "function", path = "seeing:sees", num_workers = 1, time_limit_s = 300 }}
            train = {{ num_steps = 2, lr = 1e-3 }}
            services.start_timeout_s = 500
            eval.data = {{ type = "file", path = "{tmp_path}/held.jsonl", media = {{ num_workers = 1 }} }}
            [genrm.judges.default]
            type = "local"
            model.path = "{tiny_omni("qwen3_vl")}"
            media = true
            max_new_tokens = 12
            request_time_limit_s = 120
            [rollout]
            group_size = 2
            prompts_per_step = 4
            max_new_tokens = 4
            max_staleness = 0
            """
        )
    )
    command = [sys.executable, "-m", "relax.cli.main", "train", "run.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "runs/seen/metrics.jsonl").read_text().splitlines()]
    assert sum(step["genrm/requests"] for step in steps) >= 2 * 8 * 2
    assert sum(step.get("genrm/failed", 0) for step in steps) == 0
    held = [json.loads(line) for line in (tmp_path / "runs/seen/eval.jsonl").read_text().splitlines()]
    assert [(row["eval/prompts"], row["eval/failed"]) for row in held] == [(1, 0)] * 2
    samples = [
        json.loads(line) for file in (tmp_path / "runs/seen/samples").iterdir() for line in file.read_text().splitlines()
    ]
    assert {sample["outcome"] for sample in samples} <= {"ok", "truncated"}
    assert sum(sample["reward"] for sample in samples) > 0, "what it says depends on the picture"
