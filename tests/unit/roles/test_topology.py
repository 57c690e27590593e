"""Roles are started only where the configuration has a use for them, and the actor waits for exactly their columns."""

import pytest

from relax.config import make_config
from relax.roles.topology import actor_columns, engine_names, role_specs

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
