"""Tiny models of several families, and runs on them."""

import sys
from pathlib import Path

import pytest
import torch

from relax.config import make_config
from relax.models.tiny import make_tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this file
from train_batches import VOCABULARY


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def _dense(name: str):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, attention_bias=True, mlp_bias=True))
    moe = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **moe, tie_word_embeddings=False))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """`model_folder(name)`: a folder with a tiny model (qwen3, llama, qwen3_moe) and a tokenizer, made once."""
    made: dict[str, Path] = {}
    tokenizer = make_tokenizer(VOCABULARY, 512)

    def make(name: str) -> Path:
        if name not in made:
            torch.manual_seed(1)
            model = _dense(name)
            with torch.no_grad():  # norms and biases start as ones and zeros, which would hide a mistake in their gradients
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[name] = folder
        return made[name]

    return make


@pytest.fixture(scope="session")
def make_run(model_folder):
    """`make_run("qwen3", "train.lr=1e-3", ...)`: the configuration of a run on that model."""

    def make(name: str, *overrides: str):
        raw = {
            "model": {"path": str(model_folder(name))},
            "data": {"type": "generator", "path": "relax.data.arithmetic:addition"},
            "reward": {"type": "exact"},
            "train": {"num_steps": 6, "lr": 1e-2},
            "rollout": {"max_new_tokens": 16},
        }
        return make_config(raw, overrides)

    return make
