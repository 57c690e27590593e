"""The same columns, whoever computes them: a role of its own, or the actor with its own back end."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import FakeBackend

from relax.config import RunConfig, make_config
from relax.roles.build import make_column_maker, make_inside, reference_files
from relax.roles.columns import ColumnMaker
from relax.roles.logprobs import Reference, SwappedReference
from relax.types import Ragged, WeightManifest

RAW = {
    "model": {"path": "m"},
    "data": {"type": "reasoning_gym", "task": "chain_sum"},
    "reward": {"type": "exact"},
    "train": {"num_steps": 100, "checkpoint": {"every": 10, "keep": 2}},
    "rollout": {"max_staleness": 0},
    "algorithm": {"kl": {"coef": 0.1, "update_reference_every": 4}, "old_logprobs": "recompute"},
}


def config_of(mode: str, *overrides: str) -> RunConfig:
    return make_config(RAW, [f"resources.mode={mode}", *overrides])


def scored(maker: ColumnMaker) -> float:
    """What the fake back end makes of the weights: -1 less the number of steps that made them."""
    tokens, mask = Ragged.pack([np.arange(3, dtype=np.int32)]), Ragged.pack([np.array([0, 1, 1], np.uint8)])
    made = maker.make({"tokens": tokens, "loss_mask": mask}, np.zeros(1, np.int64))[maker.columns[0]]
    assert isinstance(made, Ragged)
    return float(made.values[1])


class Published(FakeBackend):
    """Takes a version without bytes: the weight is the version."""

    def load_weights(self, manifest: WeightManifest) -> float:
        self.weight.fill_(manifest.version)
        return 0.0


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version, "shm", "", 0, {}, "", (), ())


def served(tmp_path: Path, first_step: int = 0, *overrides: str) -> Reference:
    maker = make_column_maker("reference", config_of("fully_async", *overrides), tmp_path, first_step, lambda _: Published())
    assert isinstance(maker, Reference)
    maker.load()
    return maker


def test_a_followed_reference_takes_the_policy_every_so_many_versions(tmp_path: Path) -> None:
    maker = served(tmp_path)
    found = []
    for version in range(1, 10):
        maker.adopt(manifest(version))
        found.append(-1 - scored(maker))
    assert found == [0, 0, 0, 4, 4, 4, 4, 8, 8]


def test_a_restarted_reference_has_the_weights_that_it_had(tmp_path: Path) -> None:
    first = served(tmp_path)
    for version in range(1, 10):
        first.adopt(manifest(version))
    assert -1 - scored(served(tmp_path, first_step=9)) == 8
    assert -1 - scored(served(tmp_path, first_step=7)) == 4


def test_a_reference_goes_back_with_the_policy(tmp_path: Path) -> None:
    maker = served(tmp_path)
    for version in (4, 8, 6):
        maker.adopt(manifest(version))
    assert (maker.version, -1 - scored(maker)) == (4, 4)


def test_a_reference_that_does_not_follow_sees_no_publication(tmp_path: Path) -> None:
    maker = served(tmp_path, 0, "algorithm.kl.update_reference_every=0")
    assert not maker.follows_policy
    assert not (tmp_path / "reference").exists()


def test_the_actor_computes_the_reference_with_swapped_weights(tmp_path: Path) -> None:
    backend = FakeBackend()
    config = config_of("colocate")
    makers = {maker.columns[0]: maker for maker in make_inside(config, backend, tmp_path)}
    assert list(makers) == ["ref_logprobs", "old_logprobs", "advantages"]
    for maker in makers.values():
        maker.load()
    found = []
    for version in range(1, 10):
        backend.weight.fill_(version)
        for maker in makers.values():
            maker.published(version)
        found.append((-1 - scored(makers["ref_logprobs"]), -1 - scored(makers["old_logprobs"])))
    assert found == [(0, 1), (0, 2), (0, 3), (4, 4), (4, 5), (4, 6), (4, 7), (8, 8), (8, 9)]
    again = SwappedReference(FakeBackend(), reference_files(config, tmp_path))
    again.load()
    again.resumed(7)
    assert -1 - scored(again) == 4
    assert torch.equal(backend.weight, torch.full((8,), 9.0))


@pytest.mark.parametrize(
    ("every", "keep", "update", "updates", "num_kept"), [(10, 2, 4, 1, 7), (0, 2, 4, 1, 1), (3, 1, 4, 2, 2)]
)
def test_enough_reference_files_for_the_kept_checkpoints(
    tmp_path: Path, every: int, keep: int, update: int, updates: int, num_kept: int
) -> None:
    overrides = [f"train.checkpoint.every={every}", f"train.checkpoint.keep={keep}", f"train.updates_per_step={updates}"]
    config = config_of(
        "hybrid", *overrides, f"rollout.max_staleness={updates - 1}", f"algorithm.kl.update_reference_every={update}"
    )
    files = reference_files(config, tmp_path)
    assert files.every == update * updates
    for version in range(files.every, 20 * files.every, files.every):
        files.keep(version, {"w": torch.zeros(1)})
    assert len(list(tmp_path.glob("reference/version_*"))) == num_kept + 1
