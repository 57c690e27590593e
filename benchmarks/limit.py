"""Hand-written loops of generation and training, one model and nothing around it: the limit that relax's are measured against.

A static key-value cache, fused query-key-value and gate-up weights, one batch of prompts of one length.

    python benchmarks/limit.py --size tiny --threads 1
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from work import Task, encode_prompts, load_random, load_warm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [..., D]` by angles `[..., D / 2]`."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Mini(nn.Module):
    """A Qwen3's decoder, written out: parameters are copies, fused where one product can do the work of several."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.float32, max_tokens: int = 64) -> None:
        super().__init__()
        config = model.config
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.repeat, self.eps = self.heads // self.kv_heads, config.rms_norm_eps

        def own(*tensors: Tensor) -> nn.Parameter:
            return nn.Parameter(torch.cat([t.detach() for t in tensors]).clone().to(dtype))

        blocks = model.model.layers
        self.embed, self.norm = own(model.model.embed_tokens.weight), own(model.model.norm.weight)
        self.qkv = nn.ParameterList(
            own(b.self_attn.q_proj.weight, b.self_attn.k_proj.weight, b.self_attn.v_proj.weight) for b in blocks
        )
        self.out = nn.ParameterList(own(b.self_attn.o_proj.weight) for b in blocks)
        self.gate_up = nn.ParameterList(own(b.mlp.gate_proj.weight, b.mlp.up_proj.weight) for b in blocks)
        self.down = nn.ParameterList(own(b.mlp.down_proj.weight) for b in blocks)
        self.norm1 = nn.ParameterList(own(b.input_layernorm.weight) for b in blocks)
        self.norm2 = nn.ParameterList(own(b.post_attention_layernorm.weight) for b in blocks)
        self.q_norm = nn.ParameterList(own(b.self_attn.q_norm.weight) for b in blocks)
        self.k_norm = nn.ParameterList(own(b.self_attn.k_norm.weight) for b in blocks)
        cos, sin = model.model.rotary_emb(model.model.embed_tokens.weight, torch.arange(max_tokens)[None])
        half = self.head_dim // 2
        self.register_buffer("cos", cos[0, :, :half].to(dtype))
        self.register_buffer("sin", sin[0, :, :half].to(dtype))

    def make_cache(self, batch: int, max_tokens: int = 64) -> Tensor:
        return torch.zeros(self.layers, 2, batch, self.kv_heads, max_tokens, self.head_dim, dtype=self.embed.dtype)

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), weight, self.eps)

    def queries(self, i: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        mixed = F.linear(self.rms(x, self.norm1[i]), self.qkv[i])
        width = self.kv_heads * self.head_dim
        q, k, v = mixed.split([self.heads * self.head_dim, width, width], -1)
        q = rotate(self.rms(q.view(batch, length, self.heads, self.head_dim), self.q_norm[i]), cos, sin)
        k = rotate(self.rms(k.view(batch, length, self.kv_heads, self.head_dim), self.k_norm[i]), cos, sin)
        return q, k, v.view(batch, length, self.kv_heads, self.head_dim)

    def mlp(self, i: int, x: Tensor) -> Tensor:
        gate, up = F.linear(self.rms(x, self.norm2[i]), self.gate_up[i]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down[i])

    def forward(self, ids: Tensor, cache: Tensor | None = None) -> Tensor:
        """`ids [B, T]` -> hidden states `[B, T, d]`; fills the first T places of `cache`."""
        batch, length = ids.shape
        x = F.embedding(ids, self.embed)
        cos, sin = self.cos[:length, None], self.sin[:length, None]
        for i in range(self.layers):
            q, k, v = (t.transpose(1, 2) for t in self.queries(i, x, cos, sin))
            if cache is not None:
                cache[i, 0, :batch, :, :length], cache[i, 1, :batch, :, :length] = k, v
            k, v = k.repeat_interleave(self.repeat, 1), v.repeat_interleave(self.repeat, 1)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = self.mlp(i, x + F.linear(a.transpose(1, 2).reshape(batch, length, -1), self.out[i]))
        return self.rms(x, self.norm)

    def decode(self, tokens: Tensor, cache: Tensor, position: int) -> Tensor:
        """One step: `tokens [B]` at one position -> logits `[B, V]`."""
        batch = tokens.size(0)
        x = F.embedding(tokens, self.embed)[:, None]
        cos, sin = self.cos[position], self.sin[position]
        for i in range(self.layers):
            q, k, v = self.queries(i, x, cos, sin)
            cache[i, 0, :, :, position], cache[i, 1, :, :, position] = k[:, 0], v[:, 0]
            # queries of one key head are rows of one product
            q = q.view(batch, self.kv_heads, self.repeat, self.head_dim)
            a = F.scaled_dot_product_attention(q, cache[i, 0, :, :, : position + 1], cache[i, 1, :, :, : position + 1])
            x = self.mlp(i, x + F.linear(a.reshape(batch, 1, -1), self.out[i]))
        return F.linear(self.rms(x, self.norm)[:, 0], self.embed)


def sample(logits: Tensor) -> Tensor:
    """Inverse CDF: one uniform number a row."""
    total = torch.softmax(logits.float(), -1).cumsum(-1)
    found = torch.searchsorted(total, torch.rand(total.size(0), 1) * total[:, -1:]).squeeze(1)
    return found.clamp_(max=total.size(1) - 1)


def generate(model: Mini, prompts: Tensor, num_new: int, cache: Tensor, group_size: int = 1, stop: int | None = None) -> Tensor:
    """`prompts [B, P]` with each group's prompt repeated `group_size` times, computed once -> tokens `[B, num_new]`.

    With `stop` the loop ends when every row has sampled it; rows that have are computed on.
    """
    length = prompts.size(1)
    hidden = model(prompts[::group_size], cache)
    if group_size > 1:
        first = cache[:, :, : len(hidden), :, :length].clone()
        cache[:, :, :, :, :length] = first.repeat_interleave(group_size, 2)
    logits = F.linear(hidden[:, -1], model.embed).repeat_interleave(group_size, 0)
    out, done = [], torch.zeros(len(prompts), dtype=torch.bool)
    for step in range(num_new):
        tokens = sample(logits)
        out.append(tokens)
        if stop is not None:
            done |= tokens == stop
            if bool(done.all()):
                break
        if step + 1 < num_new:
            logits = model.decode(tokens, cache, length + step)
    return torch.stack(out, 1)


def logprobs(model: Mini, ids: Tensor, prompt_length: int) -> Tensor:
    """`ids [B, T]` -> log-probs `[B, T - prompt_length]` of the tokens after the prompt."""
    hidden = model(ids)[:, prompt_length - 1 : -1]
    logits = F.linear(hidden, model.embed).flatten(0, 1).float()
    return -F.cross_entropy(logits, ids[:, prompt_length:].reshape(-1), reduction="none").view(len(ids), -1)


def train_step(
    model: Mini, optimizer: torch.optim.Optimizer, ids: Tensor, advantages: Tensor, prompt_length: int, micro_batch: int
) -> None:
    """A policy-gradient step on `ids [B, T]` with `advantages [B, 1]`, `micro_batch` rows at a time."""
    for start in range(0, len(ids), micro_batch):
        rows = slice(start, start + micro_batch)
        found = logprobs(model, ids[rows], prompt_length)
        (-(torch.exp(found - found.detach()) * advantages[rows]).sum() / found[0].numel() / len(ids)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def alternate(repeats: int, **calls: Callable[[], Any]) -> dict[str, list[float]]:
    """Seconds of each call, the calls taken in turn `repeats` times after one unmeasured round, so that what else the
    machine does falls on all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return times


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--random", action="store_true", help="random weights: no warm start")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = (load_random if options.random else load_warm)(options.size)
    mini = Mini(model, getattr(torch, options.dtype))
    pairs = [pair for pair in Task(7).samples(options.batch // options.group) for _ in range(options.group)]
    prompts = encode_prompts(tokenizer, pairs)
    cache = mini.make_cache(options.batch)
    ids = torch.randint(2, len(tokenizer), (options.batch, prompts.size(1) + options.new))
    ids[:, : prompts.size(1)] = prompts
    advantages = torch.randn(options.batch, 1)
    optimizer = torch.optim.AdamW(mini.parameters(), lr=1e-6, foreach=True)
    with torch.no_grad():
        difference = (model(prompts[:4]).logits[:, -1] - F.linear(mini(prompts[:4])[:, -1], mini.embed).float()).abs().max()

    @torch.no_grad()
    def run_generate() -> None:
        generate(mini, prompts, options.new, cache, options.group)

    @torch.no_grad()
    def run_logprobs() -> None:
        for rows in ids.split(options.micro_batch):
            logprobs(mini, rows, prompts.size(1))

    times = alternate(
        options.repeats,
        generate=run_generate,
        logprobs=run_logprobs,
        train=lambda: train_step(mini, optimizer, ids, advantages, prompts.size(1), options.micro_batch),
    )
    print(json.dumps({"max_logit_difference": float(difference)} | {name: median(t) for name, t in times.items()}, indent=1))


if __name__ == "__main__":
    main()
