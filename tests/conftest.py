"""Fixtures that several folders of tests share: a tiny model, and run files that learn something within a few steps."""

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import relax  # noqa: F401 - before test files import transformers, and with it torchvision

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REWARD = '''
"""A reward that a random model can climb at once: the share of the response's characters that are a to m."""


def share_of_early_letters(prompt, response, answer, metadata):
    return sum("a" <= c <= "m" for c in response) / max(1, len(response))
'''


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with random weights: two layers, 64 wide."""
    from relax.models.tiny import build_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    build_tiny_model(folder, num_layers=2, hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=128, vocab_size=512)
    return folder


@pytest.fixture(scope="session")
def tiny_omni(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model that sees or hears, by its family; built when first asked for."""
    from relax.models.tiny_omni import build_tiny_omni

    root = tmp_path_factory.mktemp("omni")

    def build(family: str) -> Path:
        if not (root / family).is_dir():
            build_tiny_omni(root / family, family)
        return root / family

    return build


@pytest.fixture
def run_file(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    """Writes a run file for `tiny_model` into `tmp_path`; `runs/` lies beside it. Overrides are left to the command line."""

    def write(runtime: str = "inprocess", name: str = "letters") -> Path:
        (tmp_path / "letters_reward.py").write_text(REWARD)
        path = tmp_path / f"{name}.toml"
        path.write_text(
            textwrap.dedent(
                f"""
                [run]
                name = "{name}"
                dir = "{tmp_path}/runs"
                runtime = "{runtime}"
                [model]
                path = "{tiny_model}"
                [data]
                type = "generator"
                path = "relax.data.arithmetic:addition"
                size = 1000
                [reward]
                type = "function"
                path = "letters_reward:share_of_early_letters"
                [rollout]
                group_size = 4
                prompts_per_step = 8
                max_new_tokens = 8
                max_staleness = 1
                [train]
                num_steps = 6
                lr = 3e-3
                [train.checkpoint]
                every = 3
                [eval]
                num_prompts = 16
                temperature = 1.0
                [eval.data]
                type = "generator"
                path = "relax.data.arithmetic:addition"
                seed = 99
                size = 100
                """
            )
        )
        return path

    return write
