"""Roles are started only where the configuration has a use for them, and the actor waits for exactly their columns."""

import pytest

from relax.config import make_config
from relax.errors import ConfigError
from relax.roles.topology import actor_claims, actor_columns, engine_devices, engine_names, in_actor, role_specs, takes_turns

RAW = {
    "model": {"path": "m"},
    "data": {"type": "reasoning_gym", "task": "chain_sum"},
    "reward": {"type": "exact"},
    "train": {"num_steps": 1},
}


CUSTOM, TEACHER, CRITICS = ("algorithm.type=custom", "algorithm.path=m:f"), "teacher.model.path=t", ("values", "returns")


@pytest.mark.parametrize(
    ("overrides", "extra_roles", "extra_columns"),
    [
        ([], set(), set()),
        (["algorithm.kl.coef=0.01"], {"reference"}, {"ref_logprobs"}),
        (["algorithm.old_logprobs=recompute"], {"actor_fwd"}, {"old_logprobs"}),
        ([*CUSTOM, 'algorithm.needs=["ref_logprobs"]'], {"reference"}, {"ref_logprobs"}),
        (
            [*CUSTOM, 'algorithm.needs=["old_logprobs", "values"]'],
            {"actor_fwd", "critic"},
            {"old_logprobs", "values", "returns"},
        ),
        ([*CUSTOM, TEACHER, 'algorithm.needs=["teacher_logprobs"]'], {"teacher"}, {"teacher_logprobs"}),
        ([TEACHER, "algorithm.type=opd"], {"teacher"}, {"teacher_logprobs"}),
        (["algorithm.type=ppo", "algorithm.whiten=false"], {"critic"}, {"values", "returns"}),
        (["critic.lr=1.0", TEACHER], set(), set()),
    ],
)
def test_useless_roles_are_not_started(overrides: list[str], extra_roles: set[str], extra_columns: set[str]) -> None:
    config = make_config(RAW, overrides)
    assert {spec.name for spec in role_specs(config)} == {"actor", "rollout", "advantages"} | extra_roles
    assert set(actor_columns(config)) >= {"tokens", "advantages"} | extra_columns
    optional = {"ref_logprobs", "old_logprobs", "teacher_logprobs", "values", "returns"}
    assert extra_columns == set(actor_columns(config)) & optional


def test_a_loss_that_looks_at_a_teacher_needs_no_advantages() -> None:
    config = make_config(RAW, [TEACHER, "algorithm.type=opd_full"])
    assert [spec.name for spec in role_specs(config)] == ["rollout", "teacher", "actor"]
    assert actor_columns(config)[-2:] == ("teacher_top_ids", "teacher_top_logprobs")


@pytest.mark.parametrize(
    ("overrides", "inside"),
    [
        (["algorithm.type=ppo"], ("advantages",)),
        ([*CUSTOM, "algorithm.scope=batch", 'algorithm.needs=["values"]'], ("critic", "advantages")),
        ([*CUSTOM, "algorithm.scope=group", 'algorithm.needs=["values"]'], ()),
    ],
    ids=["whitened gae: the returns are those of each row", "a function of whole steps: the returns too", "of groups"],
)
def test_a_critic_is_in_the_actor_where_its_targets_need_a_whole_step(overrides: list[str], inside: tuple[str, ...]) -> None:
    config = make_config(RAW, overrides)
    assert in_actor(config) == inside
    assert ("values" in actor_columns(config)) == ("critic" not in inside)
    hybrid = make_config(RAW, [*overrides, "resources.mode=hybrid", "algorithm.kl.coef=0.1"])
    assert in_actor(hybrid) == ("reference", "critic", "advantages"), "what is needed first comes first"


def test_devices_of_teacher_and_critic_are_set_aside() -> None:
    config = make_config(RAW, ["algorithm.type=ppo", "resources.critic_gpus=0.5"])
    assert {spec.name: spec.num_gpus for spec in role_specs(config)}["critic"] == 0.5
    config = make_config(RAW, ["algorithm.type=opd", TEACHER, "resources.teacher_gpus=2"])
    assert {spec.name: spec.num_gpus for spec in role_specs(config)}["teacher"] == 2


def test_engines_have_names_of_their_own() -> None:
    assert engine_names(make_config(RAW, ["rollout.num_engines=3"])) == ("engine-0", "engine-1", "engine-2")


EVERYTHING = ["algorithm.kl.coef=0.01", "algorithm.old_logprobs=recompute", "rollout.max_staleness=0"]


@pytest.mark.parametrize("mode", ["colocate", "hybrid"])
def test_the_actor_computes_the_columns_where_no_role_does(mode: str) -> None:
    config = make_config(RAW, [*EVERYTHING, f"resources.mode={mode}"])
    assert [spec.name for spec in role_specs(config)] == ["rollout", "actor"]
    assert in_actor(config) == ("reference", "actor_fwd", "advantages")
    assert not {"advantages", "ref_logprobs", "old_logprobs"} & set(actor_columns(config))


def test_roles_of_their_own_leave_the_actor_nothing_to_compute() -> None:
    config = make_config(RAW, [*EVERYTHING, "resources.mode=fully_async"])
    assert in_actor(config) == ()
    assert {"advantages", "reference", "actor_fwd"} < {spec.name for spec in role_specs(config)}


@pytest.mark.parametrize("mode", ["colocate", "hybrid", "fully_async"])
def test_advantages_over_a_whole_step_are_computed_in_the_actor(mode: str) -> None:
    overrides = ["algorithm.type=reinforce_pp", "algorithm.kl.coef=0.1", "rollout.max_staleness=0", f"resources.mode={mode}"]
    config = make_config(RAW, overrides)
    assert "advantages" in in_actor(config)
    assert "advantages" not in {spec.name for spec in role_specs(config)}
    assert "advantages" not in actor_columns(config)
    assert actor_claims(config).at_least == config.rollout.prompts_per_step
    assert ("ref_logprobs" in actor_columns(config)) == (mode == "fully_async")


def test_turns_share_the_devices_and_take_the_whole_step() -> None:
    overrides = ["resources.mode=colocate", "rollout.max_staleness=0", "resources.actor_gpus=1", "rollout.num_engines=2"]
    config = make_config(RAW, overrides)
    assert takes_turns(config)
    actor = next(spec for spec in role_specs(config) if spec.name == "actor")
    assert actor.num_gpus + 2 * engine_devices(config)[1] == 1.0
    assert actor_claims(config).at_least == config.rollout.prompts_per_step


def test_parts_are_the_same_in_every_mode_when_sums_must_not_depend_on_timing() -> None:
    base = ["run.deterministic=true", "rollout.max_staleness=0", "rollout.prompts_per_step=10"]
    claims = [
        actor_claims(make_config(RAW, [*base, f"resources.mode={mode}"])) for mode in ("colocate", "hybrid", "fully_async")
    ]
    assert {claim.part for claim in claims} == {3}
    assert (claims[2].at_least, claims[2].at_most) == (3, 3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["resources.mode=colocate"], "rollout.max_staleness = 0"),
        (["train.publish_every=3"], "rollout.max_staleness = 2 or more"),
        (["train.updates_per_step=2", "train.publish_every=2"], "rollout.max_staleness = 3 or more"),
        (["rollout.oversampling=1.5", "run.deterministic=true"], "leaves to timing"),
        (["rollout.oversampling=1.5", "rollout.on_stale=drop"], 'on_stale = "wait"'),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(RAW, overrides)
