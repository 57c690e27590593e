"""A model folder of a few kilobytes and a run file that uses it, for verbs that load no weights."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


@pytest.fixture
def fake_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder that looks like a model: 3,200 parameters, a chat template, a context of 256 tokens."""

    def write(**changes) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIG | changes))
        letters = {chr(code): code - 32 for code in range(32, 127)}
        tokenizer = Tokenizer(WordLevel(letters, unk_token=" "))  # a token a character
        tokenizer.pre_tokenizer = Split("", "isolated")
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        save_file({"embed": np.zeros((100, 32), np.float32)}, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture
def small_run(tmp_path: Path, fake_model: Callable[..., Path]) -> Path:
    """A run file on 40 rows of jsonl that nothing is wrong with."""
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.toml"
    path.write_text(
        f'[run]\nname = "test"\ndir = "{tmp_path}/runs"\n[model]\npath = "{fake_model()}"\n'
        f'[data]\ntype = "file"\npath = "{tmp_path}/train.jsonl"\n[reward]\ntype = "exact"\n'
        "[rollout]\nmax_new_tokens = 24\nprompts_per_step = 4\n[train]\nnum_steps = 10\n"
    )
    return path
