"""The pages do not outlive what they speak of: the settings that they name exist. And the check of the demo can fail."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from relax.config.run import RunConfig
from relax.config.schema import iter_fields
from relax.config.sft import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SUFFIXES = ("toml", "json", "jsonl", "md", "py", "safetensors", "parquet", "sqlite", "txt", "png", "bin")
FIELDS = {key: info for root in (RunConfig, SFTConfig) for key, info, _ in iter_fields(root)}
SECTIONS = {".".join(key.split(".")[:depth]) for key in FIELDS for depth in range(1, key.count(".") + 1)}
MENTION = re.compile(r"`([a-z]+(?:\.[a-z_]+)+)(?:\s*=[^`]*)?`")


def _is_known(key: str) -> bool:
    """A section, a setting, or a key inside a free table such as `data.options`."""
    parents = [key.rsplit(".", depth)[0] for depth in range(key.count(".") + 1)]
    is_free = any(str(FIELDS[parent].annotation).startswith("dict") for parent in parents if parent in FIELDS)
    return key in SECTIONS or key in FIELDS or is_free


def _flat(node: dict, prefix: str = ""):
    for name, child in node.items():
        yield from _flat(child, f"{prefix}{name}.") if isinstance(child, dict) else [f"{prefix}{name}"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_settings_that_a_page_names_exist(page):
    text = page.read_text("utf-8")
    named = {key for key in MENTION.findall(text) if key.split(".")[0] in SECTIONS and not key.endswith(SUFFIXES)}
    for block in re.findall(r"```toml\n(.*?)```", text, re.S):
        named |= set(_flat(tomllib.loads(block)))
    unknown = sorted(key for key in named if not _is_known(key))
    assert not unknown, f"{page.relative_to(ROOT)} names settings that do not exist: {unknown}"


@pytest.mark.parametrize(
    ("rewards", "passes"),
    [([0.2, 0.2, 0.2, 0.3, 0.4, 0.4], True), ([0.3] * 8, False), ([0.2, 0.9], False), ([0.9, 0.8, 0.5, 0.4, 0.3, 0.2], False)],
)
def test_the_check_of_the_demo_sees_whether_the_reward_rose(tmp_path, rewards, passes):
    lines = [f'{{"step": {step}, "reward/mean": {reward}}}\n' for step, reward in enumerate(rewards, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "reward_rose.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) is passes, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
