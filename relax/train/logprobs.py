"""Log-probs of chosen tokens from hidden states, without ever holding all logits.

    logits = hidden weight^T / temperature,   logprob = logits[target] - logsumexp(logits)

The head runs over `chunk` rows at a time, and neither pass has an element-wise step on gradients of logits: with the
probabilities `p` and the incoming gradients `c`,

    d hidden = c (weight[target] - p weight)             d weight[v] = sum over rows of c ([v = target] - p[v]) hidden

`p weight` is computed on the way forward, where `p` is at hand, and gives the entropy as well. `p` is kept for the way back if
it fits into one chunk, else computed again. This is the one place of the trainer that knows the sampling temperature.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CACHED_LOGITS = 1 << 18  # 1 MiB in float32: the passes over one block of logits find it in a core's own cache
_MIN_BLOCK = 32
_NEVER = -1e30


def token_logprobs(
    hidden: Tensor,
    head: tuple[Tensor, Tensor | None],
    targets: Tensor,
    rows: Tensor | None = None,
    *,
    temperature: float,
    chunk: int,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
    banned: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs `[S]` of `targets [S]`, and entropies `[S]` of the distributions that they were drawn from, unless unwanted.

    `hidden [U, d]`; `head`: weight `[V, d]` and bias `[V]` or none; `rows [S]` names the hidden state of each target (several
    may share one), default one each. `chunk`: rows of probabilities held at once. Results are float32 (float64 from float64).
    The gradient flows through the log-probs, and through the entropies if `entropy_gradient`. Tokens `banned [K]` are never
    sampled and have no probability here either.
    """
    weight, bias = head
    if bias is not None:
        hidden = torch.cat((hidden, hidden.new_ones(len(hidden), 1)), 1)
        weight = torch.cat((weight, bias[:, None]), 1)
    if rows is None:
        rows = torch.arange(len(targets), device=targets.device)
    apply: Any = _TokenLogprobs.apply
    mixes = with_entropy or torch.is_grad_enabled()
    logprobs, entropy = apply(hidden, weight, rows, targets, 1.0 / temperature, chunk, entropy_gradient, mixes, banned)
    return logprobs, entropy[rows] if with_entropy else None


def top_logprobs(
    hidden: Tensor,
    head: tuple[Tensor, Tensor | None],
    top_k: int,
    num_ids: int,
    *,
    temperature: float,
    chunk: int,
    banned: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The `top_k` most likely tokens with ids below `num_ids`, likeliest first: ids `[U, top_k]` and log-probs `[U, top_k]`.

    Probabilities are those over the whole vocabulary. No gradient flows. Otherwise as `token_logprobs`.
    """
    weight, bias = head
    wide = torch.promote_types(hidden.dtype, torch.float32)
    ids = torch.empty(len(hidden), top_k, dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty(len(hidden), top_k, dtype=wide, device=hidden.device)
    for start, end in _blocks(len(hidden), len(weight), chunk, hidden.device):
        logits = torch.mm(hidden[start:end], weight.t()).to(wide)
        if bias is not None:
            logits += bias
        logits = _without(logits / temperature, banned)
        best = torch.topk(logits[:, :num_ids], top_k, -1)
        ids[start:end], logprobs[start:end] = best.indices, best.values - logits.logsumexp(-1, keepdim=True)
    return ids, logprobs


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        scale, chunk, entropy_gradient, mixes, banned = options
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_sums, chosen = hidden.new_empty(len(hidden), dtype=wide), hidden.new_empty(len(targets), dtype=wide)
        mixed = torch.empty_like(hidden) if mixes else torch.zeros_like(hidden)
        spans = list(_blocks(len(hidden), len(weight), chunk, hidden.device))
        by_row = torch.argsort(rows, stable=True)
        edges = torch.tensor([start for start, _ in spans] + [len(hidden)], device=rows.device)
        bounds = torch.searchsorted(rows[by_row], edges).tolist()
        held = hidden.new_empty(min(chunk, len(hidden)), len(weight))
        buffer = hidden.new_empty(max((end - start for start, end in spans), default=0), len(weight))
        for (start, end), first, last in zip(spans, bounds[:-1], bounds[1:], strict=True):
            p = held[start % chunk : start % chunk + end - start]
            z = _without(_logits(hidden[start:end], weight, scale, buffer[: end - start]), banned)
            mine = by_row[first:last]
            chosen[mine] = z[rows[mine] - start, targets[mine]]
            log_sums[start:end] = _softmax(z, p)
            if mixes:
                torch.mm(p, weight, out=mixed[start:end])
        entropy = log_sums - scale * (hidden.to(wide) * mixed.to(wide)).sum(-1)
        ctx.save_for_backward(hidden, weight, rows, targets, log_sums, mixed, entropy, held if len(hidden) <= chunk else None)
        ctx.scale, ctx.chunk, ctx.banned = scale, chunk, banned
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return chosen - log_sums[rows], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, targets, log_sums, mixed, entropy, kept = ctx.saved_tensors
        of_logprob, of_entropy = grads
        if of_logprob is None:
            of_logprob = log_sums.new_zeros(len(targets))
        minus = torch.zeros_like(log_sums).index_add_(0, rows, of_logprob).neg_()
        d_hidden = mixed.to(minus.dtype) * minus[:, None]
        d_hidden.index_add_(0, rows, weight[targets].to(minus.dtype) * of_logprob[:, None])
        d_weight = torch.zeros_like(weight)
        d_weight.index_add_(0, targets, (hidden[rows].to(minus.dtype) * of_logprob[:, None]).to(weight.dtype))
        shared = (hidden.to(minus.dtype) * minus[:, None]).to(hidden.dtype)
        buffer = hidden.new_empty(min(ctx.chunk, len(hidden)), len(weight)) if kept is None else kept
        for start in range(0, len(hidden), ctx.chunk):
            span = slice(start, min(start + ctx.chunk, len(hidden)))
            p = buffer[: span.stop - start]
            if kept is None:
                z = _without(_logits(hidden[span], weight, ctx.scale, p), ctx.banned)
                p.copy_(z.sub_(log_sums[span, None]).exp_())
            d_weight.addmm_(p.t(), shared[span])
            if of_entropy is not None:
                z = _without(_logits(hidden[span], weight, ctx.scale, torch.empty_like(p)), ctx.banned)
                logprobs = z.sub_(log_sums[span, None])
                d_logits = (logprobs + entropy[span, None]).mul_(logprobs.exp_()).mul_(-of_entropy[span, None]).to(weight.dtype)
                d_weight.addmm_(d_logits.t(), hidden[span])
                d_hidden[span].add_(d_logits @ weight)
        return d_hidden.mul_(ctx.scale).to(hidden.dtype), d_weight.mul_(ctx.scale), *[None] * 7


def _logits(hidden: Tensor, weight: Tensor, scale: float, out: Tensor) -> Tensor:
    """`[n, V]` in at least float32, in `out` if that is wide enough."""
    if out.dtype in (torch.float32, torch.float64):
        return torch.addmm(out, hidden, weight.t(), beta=0, alpha=scale, out=out)
    return torch.mm(hidden, weight.t(), out=out).float().mul_(scale)


def _without(logits: Tensor, banned: Tensor | None) -> Tensor:
    """`logits [n, V]`, in place, such that no probability is left to the tokens `banned`; finite, for entropies' sake."""
    return logits if banned is None else logits.index_fill_(-1, banned, _NEVER)


def _softmax(logits: Tensor, out: Tensor) -> Tensor:
    """Probabilities into `out [n, V]`; returns the logarithms of the sums, `[n]`.

    One softmax over a row is quicker than its parts, and the largest entry, of which there always is one, gives the sum back.
    """
    if out.dtype == logits.dtype:
        p = torch.softmax(logits, -1, out=out)
    else:
        p = torch.softmax(logits, -1)
        out.copy_(p)
    return logits.amax(-1) - p.amax(-1).log_()


def _blocks(num_rows: int, vocabulary: int, chunk: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Spans of rows, none of which crosses the edge of a chunk."""
    size = max(_MIN_BLOCK, _CACHED_LOGITS // vocabulary if device.type == "cpu" else chunk // 8)
    for first in range(0, num_rows, chunk):
        last = min(first + chunk, num_rows)
        for start in range(first, last, size):
            yield start, min(start + size, last)
