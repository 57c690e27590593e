"""Log-probs of chosen tokens from hidden states, without ever holding all logits.

    logits = hidden weight^T / temperature,   logprob = logits[target] - logsumexp(logits)

The head runs over `chunk` rows at a time, and neither pass has an element-wise step on gradients of logits: with
`E = exp(logits - max)`, its row sums `s` and the incoming gradients `c`,

    d hidden = c weight[target] - (c / s) (E weight)        d weight[v] = sum over rows of (c [v = target] - c E[v] / s) hidden

`E weight` is computed on the way forward, where `E` is at hand, and gives the entropy as well. `E` is kept for the way back if
it fits into one chunk, else computed again. This is the one place of the trainer that knows the sampling temperature.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CACHED_LOGITS = 1 << 18  # 1 MiB in float32: the passes over one block of logits find it in a core's own cache
_MIN_BLOCK = 32


def token_logprobs(
    hidden: Tensor,
    head: tuple[Tensor, Tensor | None],
    targets: Tensor,
    rows: Tensor | None = None,
    *,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs `[S]` of `targets [S]`, and entropies `[S]` of the distributions that they were drawn from.

    `hidden [U, d]`; `head`: weight `[V, d]` and bias `[V]` or none; `rows [S]` names the hidden state of each target (several
    may share one), default one each. `chunk`: rows of logits held at once. Results are float32 (float64 from float64). The
    gradient flows through the log-probs, and through the entropies if `entropy_gradient`.
    """
    weight, bias = head
    if bias is not None:
        hidden = torch.cat((hidden, hidden.new_ones(len(hidden), 1)), 1)
        weight = torch.cat((weight, bias[:, None]), 1)
    if rows is None:
        rows = torch.arange(len(targets), device=targets.device)
    apply: Any = _TokenLogprobs.apply
    logprobs, entropy = apply(hidden, weight, rows, targets, 1.0 / temperature, chunk, entropy_gradient)
    return logprobs, entropy[rows]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        rows: Tensor,
        targets: Tensor,
        scale: float,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums, tops = hidden.new_empty(len(hidden), dtype=wide), hidden.new_empty(len(hidden), dtype=wide)
        chosen = hidden.new_empty(len(targets), dtype=wide)
        mixed = torch.empty_like(hidden)
        by_row = torch.argsort(rows, stable=True)
        spans = list(_blocks(len(hidden), len(weight), chunk, hidden.device))
        edges = torch.tensor([start for start, _ in spans] + [len(hidden)], device=rows.device)
        bounds = torch.searchsorted(rows[by_row], edges).tolist()
        exps = hidden.new_empty(min(chunk, len(hidden)), len(weight))
        for (start, end), first, last in zip(spans, bounds[:-1], bounds[1:], strict=True):
            out = exps[start % chunk : start % chunk + end - start]
            z = _logits(hidden[start:end], weight, scale, out)
            mine = by_row[first:last]
            chosen[mine] = z[rows[mine] - start, targets[mine]]
            tops[start:end] = z.amax(-1)
            z.sub_(tops[start:end, None]).exp_()
            sums[start:end] = z.sum(-1)
            if z is not out:
                out.copy_(z)
            torch.mm(out, weight, out=mixed[start:end])
        log_sums = tops + sums.log()
        entropy = log_sums - scale * (hidden.to(wide) * mixed.to(wide)).sum(-1) / sums
        kept = exps if len(hidden) <= chunk else None
        ctx.save_for_backward(hidden, weight, rows, targets, sums, log_sums, mixed, entropy, kept)
        ctx.scale, ctx.chunk = scale, chunk
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return chosen - log_sums[rows], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, targets, sums, log_sums, mixed, entropy, kept = ctx.saved_tensors
        of_logprob, of_entropy = grads
        if of_logprob is None:
            of_logprob = sums.new_zeros(len(targets))
        share = torch.zeros_like(sums).index_add_(0, rows, of_logprob).div_(sums).neg_()
        d_hidden = mixed.to(sums.dtype) * share[:, None]
        d_hidden.index_add_(0, rows, weight[targets].to(sums.dtype) * of_logprob[:, None])
        d_weight = torch.zeros_like(weight)
        d_weight.index_add_(0, targets, (hidden[rows].to(sums.dtype) * of_logprob[:, None]).to(weight.dtype))
        shared = (hidden.to(sums.dtype) * share[:, None]).to(hidden.dtype)
        buffer = hidden.new_empty(min(ctx.chunk, len(hidden)), len(weight)) if kept is None else kept
        for start in range(0, len(hidden), ctx.chunk):
            span = slice(start, min(start + ctx.chunk, len(hidden)))
            exps = buffer[: span.stop - start]
            if kept is None:
                exps.copy_(_logits(hidden[span], weight, ctx.scale, exps).sub_((log_sums - sums.log())[span, None]).exp_())
            d_weight.addmm_(exps.t(), shared[span])
            if of_entropy is not None:
                logprobs = _logits(hidden[span], weight, ctx.scale, torch.empty_like(exps)) - log_sums[span, None]
                d_logits = (logprobs + entropy[span, None]).mul_(logprobs.exp_()).mul_(-of_entropy[span, None]).to(weight.dtype)
                d_weight.addmm_(d_logits.t(), hidden[span])
                d_hidden[span].add_(d_logits @ weight)
        return d_hidden.mul_(ctx.scale).to(hidden.dtype), d_weight.mul_(ctx.scale), None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: float, out: Tensor) -> Tensor:
    """`[n, V]` in at least float32, in `out` if that is wide enough."""
    if out.dtype in (torch.float32, torch.float64):
        return torch.addmm(out, hidden, weight.t(), beta=0, alpha=scale, out=out)
    return torch.mm(hidden, weight.t(), out=out).float().mul_(scale)


def _blocks(num_rows: int, vocabulary: int, chunk: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Spans of rows, none of which crosses the edge of a chunk."""
    size = chunk if device.type != "cpu" else max(_MIN_BLOCK, _CACHED_LOGITS // vocabulary)
    for first in range(0, num_rows, chunk):
        last = min(first + chunk, num_rows)
        for start in range(first, last, size):
            yield start, min(start + size, last)
