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


@pytest.mark.parametrize(
    ("overrides", "extra_roles", "extra_columns"),
    [
        ([], set(), set()),
        (["algorithm.kl.coef=0.01"], {"reference"}, {"ref_logprobs"}),
        (["algorithm.old_logprobs=recompute"], {"actor_fwd"}, {"old_logprobs"}),
    ],
)
def test_useless_roles_are_not_started(overrides: list[str], extra_roles: set[str], extra_columns: set[str]) -> None:
    config = make_config(RAW, overrides)
    assert {spec.name for spec in role_specs(config)} == {"actor", "rollout", "advantages"} | extra_roles
    assert set(actor_columns(config)) >= {"tokens", "advantages"} | extra_columns
    assert extra_columns == set(actor_columns(config)) & {"ref_logprobs", "old_logprobs"}


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
