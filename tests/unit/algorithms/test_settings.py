"""Which settings go together: what cannot learn is refused at the start, with what would be right."""

import pytest
from pydantic import ValidationError

from relax.config import make_config
from relax.config.algorithm import PRESETS
from relax.errors import ConfigError

RUN = {
    "model": {"path": "model"},
    "data": {"type": "generator", "path": "relax.data.arithmetic:addition"},
    "reward": {"type": "exact"},
    "train": {"num_steps": 3},
}


def make(*overrides):
    return make_config(RUN, overrides)


STALE, FRESH = "rollout.max_staleness=4", "rollout.max_staleness=0"
TIS, CURRENT, AGAIN = "algorithm.correction.type=tis", "algorithm.old_logprobs=current", "algorithm.old_logprobs=recompute"
TEACHER = "teacher.model.path=t"
CUSTOM = ("algorithm.type=custom", "algorithm.path=m:f")


@pytest.mark.parametrize(
    "overrides",
    [
        (STALE,),
        (STALE, AGAIN),
        (STALE, AGAIN, TIS),
        (STALE, CURRENT, TIS),
        (FRESH, CURRENT),
        (STALE, AGAIN, "algorithm.correction.type=decoupled", "algorithm.correction.cap=3.0"),
        (STALE, "algorithm.type=reinforce"),
        (FRESH, "algorithm.type=reinforce", "algorithm.correction.type=none"),
        (STALE, "algorithm.type=opd_full", TEACHER),
        (STALE, "algorithm.type=cispo"),
        (STALE, "algorithm.type=sapo"),
        (STALE, *CUSTOM),
        (STALE, *CUSTOM, "algorithm.objective=m:Class", CURRENT),
        ("algorithm.type=ppo", "rollout.group_size=1"),
        ("algorithm.type=reinforce_pp", "rollout.group_size=1", "algorithm.kl.coef=0.1"),
    ],
    ids=" ".join,
)
def test_what_can_learn_is_allowed(overrides):
    assert make(*overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((STALE, CURRENT), "neither a clipped ratio nor a correction for stale samples: use rollout.max_staleness = 0"),
        ((STALE, "algorithm.type=reinforce", "algorithm.correction.type=none"), "takes stale samples for fresh ones"),
        ((STALE, *CUSTOM, "algorithm.objective=reinforce"), "takes stale samples for fresh ones"),
        ((STALE, *CUSTOM, CURRENT), "neither a clipped ratio"),
        ((TIS,), 'algorithm.old_logprobs = "rollout": use "recompute" or "current"'),
        ((CURRENT, "algorithm.correction.type=decoupled"), '= "recompute" (it is "current")'),
        (
            (AGAIN, "algorithm.correction.type=icepop", "algorithm.correction.low=6.0"),
            "must be below algorithm.correction.high",
        ),
        ((AGAIN, "algorithm.correction.type=icepop", "algorithm.correction.cap=6.0"), "algorithm.correction.type = 'tis'"),
        (("algorithm.kl.place=both",), "allowed are 'loss', 'reward'"),
        (("algorithm.type=opd_full", "algorithm.shaping.overlong_buffer=0.1"), "learns from no reward"),
        (("algorithm.type=opd_full", "algorithm.kl.place=reward"), "learns from no reward"),
        (("algorithm.type=gspo", "algorithm.aggregation=token_mean"), "allowed are 'sequence_mean'"),
        (("algorithm.type=gspo", "rollout.group_size=1"), "gspo compares the members of a group"),
        (("algorithm.type=custom",), "algorithm.path: missing"),
        (("algorithm.type=opd",), 'algorithm.type = "opd" learns from a teacher: set teacher.model.path'),
        (("algorithm.type=opd_full",), "set teacher.model.path"),
        ((*CUSTOM, 'algorithm.needs=["teacher_logprobs"]'), "set teacher.model.path"),
        ((*CUSTOM, "algorithm.objective=gspo"), "algorithm.objective = 'gspo'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_learn_is_refused_with_what_would_be_right(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        make(*overrides)
    assert expected in str(caught.value)


def test_kl_in_reward_and_loss_at_once_cannot_be_written():
    """There is one weight and one place: no pair of settings means both."""
    assert make("algorithm.type=reinforce_pp", "algorithm.kl.coef=0.1").algorithm.kl.place == "reward"
    assert make("algorithm.type=reinforce_pp", "algorithm.kl.coef=0.1").algorithm.kl.kind == "k1"
    assert make("algorithm.type=reinforce_pp_baseline", "algorithm.kl.coef=0.1").algorithm.kl.kind == "k2"
    assert make("algorithm.kl.coef=0.1").algorithm.kl.place == "loss"


def test_dapo_trains_on_groups_with_signal_unless_the_file_says_otherwise():
    config = make("algorithm.type=dapo")
    assert config.rollout.filter_zero_signal
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.aggregation) == (0.2, 0.28, "token_mean")
    assert config.algorithm.shaping.overlong_buffer == 0.2
    assert not make("algorithm.type=dapo", "rollout.filter_zero_signal=false").rollout.filter_zero_signal
    assert not make().rollout.filter_zero_signal
    again = make_config(config.model_dump())
    assert again == config


def test_presets_name_settings_that_exist():
    for kind, sections in PRESETS.items():
        config = make(f"algorithm.type={kind}")
        for name, values in sections.items():
            assert values.items() <= getattr(config, name).model_dump().items()


def test_a_setting_is_never_changed_afterwards():
    with pytest.raises(ValidationError):
        make().algorithm.clip_low = 0.1
