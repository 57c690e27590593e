"""Every loss token by token, in plain Python on scalars, straight from the definitions; autograd only for the gradient."""

import math

import torch
from loss_cases import BUDGET

from relax.config.algorithm import (
    CISPOConfig,
    GSPOConfig,
    OPDFullConfig,
    ReinforceConfig,
    SAPOConfig,
)


def loop_loss(case, tokens):
    """The mean loss over the batch, a scalar with a graph."""
    num_tokens = len(tokens.sample)
    by_sample = [[i for i in range(num_tokens) if int(tokens.sample[i]) == s] for s in range(tokens.num_samples)]
    by_sample = [places for places in by_sample if places]
    if case.name == "sft":
        return -sum(tokens.logprobs[i] for i in range(num_tokens)) / num_tokens
    if case.config is None:
        return _scalar(case.name, tokens)
    per_token = _value if case.name == "value" else _policy
    terms = [per_token(case.config, tokens, places) for places in by_sample]
    if case.config.aggregation == "token_mean":
        return sum(map(sum, terms)) / sum(map(len, terms))
    if case.config.aggregation == "sequence_mean":
        return sum(sum(t) / len(t) for t in terms) / len(terms)
    return sum(sum(t) / BUDGET for t in terms) / len(terms)


def _scalar(name, tokens):
    v, targets = tokens.values, [float(target) for target in tokens.returns]
    if name == "bradley_terry":
        gaps = [v[i] - v[i + 1] - (targets[i] - targets[i + 1]) for i in range(0, len(v), 2)]
        return sum((1 + (-gap).exp()).log() for gap in gaps) / len(gaps)
    if name == "squared":
        return sum((v[i] - y) ** 2 for i, y in enumerate(targets)) / len(v)
    p = [1 / (1 + (-value).exp()) for value in v]
    return -sum(y * q.log() + (1 - y) * (1 - q).log() for q, y in zip(p, targets, strict=True)) / len(v)


def _value(config, tokens, places):
    terms = []
    for i in places:
        value, old, target = tokens.values[i], float(tokens.old_values[i]), float(tokens.returns[i])
        term = (value - target) ** 2
        if config.value_clip is not None:
            moved = value.item() - old
            bounded = value if abs(moved) <= config.value_clip else old + math.copysign(config.value_clip, moved)
            if (torch.as_tensor(bounded).item() - target) ** 2 > term.item():
                term = (bounded - target) ** 2 + 0 * value
        terms.append(term / 2)
    return terms


def _policy(config, tokens, places):
    old = {
        i: {"rollout": tokens.rollout, "recompute": tokens.old, "current": tokens.logprobs}[config.old_logprobs][i].item()
        for i in places
    }
    gaps = {i: old[i] - tokens.rollout[i].item() for i in places}
    mean_gap = sum(gaps.values()) / len(places)
    sequence_log_ratio = sum(tokens.logprobs[i] - old[i] for i in places) / len(places)
    terms = []
    for i in places:
        logprob, a = tokens.logprobs[i], tokens.advantages[i].item()
        term = _surrogate(config, tokens, i, logprob, old[i], a, sequence_log_ratio) * _weight(config, gaps[i], mean_gap)
        if config.kl.place == "loss":
            gap = tokens.ref[i].item() - logprob
            term = term + config.kl.coef * {"k1": -gap, "k2": gap**2 / 2, "k3": gap.exp() - gap - 1}[config.kl.kind]
        terms.append(term - config.entropy_coef * tokens.entropy[i])
    return terms


def _weight(config, gap, mean_gap):
    correction, w = config.correction, math.exp(gap)
    if correction.type == "none":
        return 1.0
    if correction.type == "icepop":
        return w if correction.low <= w <= correction.high else 0.0
    if correction.type == "sequence":
        return 1.0 if correction.low <= math.exp(mean_gap) <= correction.high else 0.0
    return min(w, correction.cap)


def _surrogate(config, tokens, i, logprob, old, a, sequence_log_ratio):
    if isinstance(config, OPDFullConfig):
        return _divergence(config, tokens.top[i], tokens.top_teacher[i])
    if isinstance(config, ReinforceConfig) or getattr(config, "objective", "") == "reinforce":
        return -a * logprob
    r = (logprob - old).exp()
    if isinstance(config, SAPOConfig):
        tau = config.tau_positive if a > 0 else config.tau_negative
        return -(4 / tau) / (1 + (-tau * (r - 1)).exp()) * a
    if isinstance(config, CISPOConfig):
        return -min(max(r.item(), 1 - config.clip_low), 1 + config.clip_high) * a * logprob
    if isinstance(config, GSPOConfig):
        s = sequence_log_ratio.exp()
        r = s.item() * (logprob - logprob.item()).exp() if config.token_level else s
    if a > 0:
        term = r * a if r.item() < 1 + config.clip_high else _number((1 + config.clip_high) * a)
    else:
        term = r * a if r.item() > 1 - config.clip_low else _number((1 - config.clip_low) * a)
    dual = getattr(config, "dual_clip", None)
    if a < 0 and dual is not None and term.item() < dual * a:
        term = _number(dual * a)
    return -term


def _number(value):
    return torch.tensor(value, dtype=torch.float64)


def _divergence(config, student, teacher):
    p = [student[k].exp() for k in range(len(student))]
    q = [teacher[k].exp() for k in range(len(teacher))]
    p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
    b = config.js_weight
    m = [b * y + (1 - b) * x for x, y in zip(p, q, strict=True)]

    def kl(first, second):
        return sum(x * (x.log() - y.log()) for x, y in zip(first, second, strict=True))

    return {"reverse": kl(p, q), "forward": kl(q, p), "js": b * kl(q, m) + (1 - b) * kl(p, m)}[config.divergence]
