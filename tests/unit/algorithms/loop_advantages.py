"""Every estimator in plain Python, one trajectory and one token at a time, straight from the definitions."""

import math


def loop_advantages(config, rows):
    """`rows`: dicts with `reward`, `group`, `mask` and columns, lists of numbers. Returns (advantages, returns) a row."""
    for row in rows:
        row["trained"] = [t for t, m in enumerate(row["mask"]) if m]
        row["kl"] = {t: _kl(config, row, t) for t in row["trained"]}
        row["total"] = row["reward"] - sum(row["kl"].values())
    kinds = {"reinforce_pp": _returns, "ppo": _gae, "opd": _opd}
    per_token = [kinds.get(config.type, _spread)(config, row, rows) for row in rows]
    advantages = [a for a, _ in per_token]
    if config.type in ("reinforce_pp", "reinforce_pp_baseline") or getattr(config, "whiten", False):
        every = [value for a in advantages for value in a.values()]
        mean = math.fsum(every) / len(every)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in every) / len(every))
        advantages = [{t: (v - mean) / (std + 1e-8) for t, v in a.items()} for a in advantages]
    return advantages, [r for _, r in per_token]


def _policy(config):
    return "old_logprobs" if config.old_logprobs == "recompute" else "rollout_logprobs"


def _kl(config, row, t):
    if config.kl.place == "loss" or not config.kl.coef:
        return 0.0
    gap = row[_policy(config)][t] - row["ref_logprobs"][t]
    return config.kl.coef * {"k1": gap, "k2": gap**2 / 2, "k3": math.exp(-gap) + gap - 1}[config.kl.kind]


def _spread(config, row, rows):
    return {t: _scalar(config, row, rows) for t in row["trained"]}, None


def _scalar(config, row, rows):
    members = [other["total"] for other in rows if other["group"] == row["group"]]
    if len(members) == 1 or len(set(members)) == 1:
        return 0.0
    if config.type == "rloo":
        return row["total"] - (math.fsum(members) - row["total"]) / (len(members) - 1)
    mean = math.fsum(members) / len(members)
    scale = 1.0
    if getattr(config, "normalize_std", False):
        scale = math.sqrt(math.fsum((r - mean) ** 2 for r in members) / len(members)) + 1e-6
    return (row["total"] - mean) / scale


def _rewards(row):
    rewards = {t: -row["kl"][t] for t in row["trained"]}
    if row["trained"]:
        rewards[row["trained"][-1]] += row["reward"]
    return rewards


def _returns(config, row, rows):
    rewards, result, later = _rewards(row), {}, 0.0
    for t in reversed(row["trained"]):
        later = result[t] = rewards[t] + config.gamma * later
    return result, None


def _gae(config, row, rows):
    rewards, result, returns, later, next_value = _rewards(row), {}, {}, 0.0, 0.0
    for t in reversed(row["trained"]):
        value = row["values"][t]
        later = rewards[t] + config.gamma * next_value - value + config.gamma * config.gae_lambda * later
        result[t], returns[t], next_value = later, later + value, value
    return result, returns


def _opd(config, row, rows):
    own = config.reward_coef * _scalar(config, row, rows) if config.reward_coef else 0.0
    return {t: own - config.coef * (row[_policy(config)][t] - row["teacher_logprobs"][t]) for t in row["trained"]}, None
