"""`relax explain`: the figures and reasons follow from the settings."""

import re

import pytest

from relax.cli.explain import explain
from relax.cli.memory import human_bytes, memory_bytes
from relax.config import load_config
from relax.models.folder import read_model_folder

JUDGE = ["reward.type=genrm", "genrm.judges.default.type=local", "genrm.judges.default.model.path=m"]
SERVED = [f"genrm.judges.default.{key}" for key in ("type=openai", "url=http://h/v1", "model=big")]


def _lines(run, *overrides) -> dict[str, str]:
    """First word(s) of each line -> the rest."""
    found = {}
    for line in explain(load_config(run, list(overrides))).splitlines():
        name, _, text = line.strip().partition("  ")
        found[name] = text.strip()
    return found


def test_samples_and_bounds_are_worked_out(small_run):
    lines = _lines(small_run, "rollout.max_staleness=2", "rollout.group_size=8")
    assert lines["samples"] == "4 prompts x 8 = 32"
    assert lines["running ahead"].startswith("at most 12 groups (96 samples)")
    assert "768 generated, 8,192 with prompts" in lines["tokens"]
    assert lines["whole run"] == "10 steps, 320 samples"


def test_micro_batches_are_counted_where_tokens_are_all_that_fills_them(small_run):
    assert _lines(small_run)["micro-batches"].startswith("at most ")
    seeing = _lines(small_run, "data.media.num_workers=1")["micro-batches"]
    assert seeing == "of 8192 tokens, those included that encoding media costs as much as"


def test_on_policy_is_said_in_words(small_run):
    assert _lines(small_run, "rollout.max_staleness=0")["bound"].startswith("0: every sample")


@pytest.mark.parametrize(
    ("override", "role", "started"),
    [
        ("algorithm.kl.coef=0.1", "reference", True),
        ("algorithm.kl.coef=0", "reference", False),
        ("algorithm.old_logprobs=recompute", "actor_fwd", True),
        ("algorithm.old_logprobs=rollout", "actor_fwd", False),
    ],
)
def test_a_role_is_named_with_the_reason_for_it(small_run, override, role, started):
    lines = _lines(small_run, override)
    key = override.partition("=")[0]
    assert (role in lines) is started
    assert key in lines[role if started else f"({role})"]


@pytest.mark.parametrize(
    ("overrides", "name", "expected"),
    [
        (["algorithm.normalize_std=false"], "advantage", "reward - mean of its group"),
        (["algorithm.type=rloo"], "advantage", "reward - mean of the other members of its group"),
        (["algorithm.type=dr_grpo"], "mean", "rollout.max_new_tokens (24)"),
        (["algorithm.clip_high=0.28"], "loss", "[0.8, 1.28]"),
        (["algorithm.correction.type=tis", "algorithm.old_logprobs=recompute"], "loss", "min(trainer / engine probability, 2)"),
        (["algorithm.kl.coef=0.01"], "KL", "+ 0.01 x k3"),
        (["train.schedule=cosine", "train.lr=1e-4", "train.warmup_steps=2"], "learning rate", "0 to 0.0001 over 2 step(s)"),
        (["train.schedule=cosine", "train.lr=1e-4", "train.min_lr_ratio=0.5"], "learning rate", "down to 5e-05 at step 10"),
        (["eval.data.type=file", "eval.data.path=x", "eval.every=4"], "evaluation", "at steps 0, 4, 8, 10"),
        (["train.checkpoint.every=3"], "checkpoints", "every 3 step(s) and at the end"),
        (["run.runtime=inprocess"], "runtime", "without Ray"),
        (["algorithm.type=ppo", "critic.lr=1e-3", "critic.warmup_steps=4"], "critic", "learns alone for 4 step(s)"),
        (["algorithm.type=ppo", "resources.mode=hybrid"], "actor", "computes critic, advantages itself"),
        (["algorithm.type=opd", "teacher.model.path=big"], "teacher", "big"),
        (JUDGE, "judge-default-0", "judge default: m on a local engine"),
        (JUDGE, "genrm", "asks judges what responses are worth (default)"),
        ([*JUDGE, *SERVED], "(judge default)", "big at http://h/v1, which this run does not start"),
    ],
)
def test_a_setting_shows_in_what_it_turns_into(small_run, overrides, name, expected):
    assert expected in _lines(small_run, *overrides)[name]


def test_a_model_that_is_not_there_only_leaves_its_figures_out(small_run):
    text = explain(load_config(small_run, ["model.path=nowhere"]))
    assert "there is no such folder" in text
    assert "memory" not in text
    assert "at most 768 generated" in text


def test_the_parts_of_the_memory_add_up_and_grow_with_their_settings(small_run):
    config = load_config(small_run)
    model = read_model_folder(config.model)
    assert (model.num_params, model.kv_numbers_per_token, model.context) == (3200, 2 * 2 * 2 * 8, 256)
    small = memory_bytes(config, model)
    assert small["actor: weights, gradients, AdamW"] == 3200 * 16
    assert small["engines: key-value cache, all slots full"] == 256 * 256 * 64 * 4
    two_engines = memory_bytes(load_config(small_run, ["rollout.num_engines=2"]), model)
    assert two_engines["engines: weights"] == 2 * small["engines: weights"]
    assert "together" in _lines(small_run)


def test_models_beside_the_policy_take_memory_in_every_mode(small_run):
    model = read_model_folder(load_config(small_run).model)
    for mode in ("hybrid", "fully_async"):
        where = f"resources.mode={mode}"
        critic = memory_bytes(load_config(small_run, ["algorithm.type=ppo", where]), model)
        assert critic["critic: weights, gradients, AdamW"] == 3200 * 16
        teacher = memory_bytes(load_config(small_run, ["algorithm.type=opd", f"teacher.model.path={model.path}", where]), model)
        assert teacher["teacher: weights"] == 3200 * 4


def test_sizes_are_written_for_people():
    assert [human_bytes(n) for n in (12, 3400, 5_600_000, 7_800_000_000)] == ["12 B", "3 kB", "6 MB", "7.8 GB"]


def test_faults_on_purpose_are_listed_in_their_order(small_run):
    events = '{kind="delay", target="rollout", step=5, count=3, probability=0.5}, {kind="kill", target="actor", step=2}'
    text = explain(load_config(small_run, [f"faults.events=[{events}]", "faults.random_kills=2"]))
    _, lines = text.split("faults on purpose\n")
    steps = re.findall(r"after step (\d+)", lines)
    assert steps == sorted(steps, key=int)
    assert "after step 2  actor is killed" in lines
    assert "after step 5  rollout: 3 call(s) of the queue take 1 s longer, each with a chance of 0.5" in lines
    assert lines.count("is killed") == 3
    assert "faults on purpose" not in explain(load_config(small_run))
