"""Tiny models of every kind the engine serves, publications of their weights, and the truth by a full transformers forward."""

import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from relax.engines.local import LocalEngine
from relax.types import GenerateRequest, Sampling, WeightManifest
from relax.weights.layout import lay_out, views
from relax.weights.manifest import make_manifest

VOCAB, EOS, CONTEXT = 96, 1, 64


def build(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model with two layers and weights large enough that its distributions are far from flat."""
    import transformers as t

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.25,
    }
    torch.manual_seed(seed)
    match kind:
        case "qwen3":
            model = t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, tie_word_embeddings=True))
        case "llama":
            model = t.LlamaForCausalLM(t.LlamaConfig(**sizes, attention_bias=True, mlp_bias=True, tie_word_embeddings=False))
        case "qwen2":
            model = t.Qwen2ForCausalLM(t.Qwen2Config(**sizes, tie_word_embeddings=False))
        case "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
            model = t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=False))
        case "glm4_moe":  # a tied head, and a persistent buffer that routes
            experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
            groups = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
            model = t.Glm4MoeForCausalLM(t.Glm4MoeConfig(**sizes, **experts, **groups, tie_word_embeddings=True))
            for name, buffer in model.named_buffers():
                if name in model.state_dict():
                    buffer.copy_(torch.randn(buffer.shape) * 2)
    with torch.no_grad():  # biases and norms are all equal in a fresh model, and a path that lost them would go unseen
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).eval()


@torch.no_grad()
def true_logprobs(model: Any, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-prob of each token after the first, `[T - 1]` float32."""
    logits = model(torch.tensor([list(tokens)])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(list(tokens))[1:, None])[:, 0]


class Publisher:
    """Writes weights into files, as the trainer's side does, and says so in manifests."""

    CANARY = (5, 9, 17, 33, 60, 2)

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()

    def __call__(self, model: Any, version: int, *, weights: dict[str, torch.Tensor] | None = None) -> WeightManifest:
        """`weights` replaces what is sent; the canary is always the model's."""
        saved = model.state_dict().keys()
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
        named = dict(model.named_parameters()) | buffers if weights is None else weights
        table, size = lay_out(named)
        content = bytearray(size)
        with torch.no_grad():
            for name, view in views(torch.frombuffer(content, dtype=torch.uint8), table).items():
                view.copy_(named[name])
        path = self._folder / f"weights-{next(self._numbers)}"
        path.write_bytes(content)
        canary = (self.CANARY, true_logprobs(model, self.CANARY).tolist())
        return make_manifest(version, memoryview(content), table, canary, location=str(path), bucket_bytes=4096)


def request(name: str, prompt: Sequence[int], num: int = 1, *, seed: int = 0, max_new_tokens: int = 12, **sampling: Any):
    """A request for `num` completions with seeds from `seed` on."""
    seeds = range(seed, seed + num)
    return GenerateRequest(name, list(prompt), list(seeds), Sampling(max_new_tokens=max_new_tokens, **sampling))


class StepGate:
    """Lets the engine make `steps` steps, then holds it until somebody has called it for something."""

    def __init__(self, engine: LocalEngine, steps: int) -> None:
        self.reached = threading.Event()
        self._engine, self._steps, self._step = engine, steps, engine._scheduler.step
        engine._scheduler.step = self._count  # type: ignore[method-assign]

    def _count(self) -> None:
        if self._steps == 0:
            self.reached.set()
            deadline = time.monotonic() + 10
            while self._engine._inbox.empty():
                assert time.monotonic() < deadline, "nobody called the engine"
                time.sleep(0.0005)
        self._steps -= 1
        if not self.reached.is_set() or self._engine._inbox.empty():
            self._step()
