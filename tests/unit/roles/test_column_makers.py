"""The same columns, whoever computes them: a role of its own, or the actor with its own back end."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import FakeBackend

from relax.config import RunConfig, make_config
from relax.errors import ConfigError
from relax.roles.build import make_column_maker, make_inside, reference_files
from relax.roles.columns import ColumnMaker
from relax.roles.logprobs import Reference, SwappedReference
from relax.train.backend import TrainBatch
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


class FakeTeacher(FakeBackend):
    """Remembers how its likeliest tokens were asked for."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.asked = path, (0, 0)

    def top_logprobs(self, batch: TrainBatch, top_k: int, num_ids: int) -> tuple[Ragged, Ragged]:
        self.asked = (top_k, num_ids)
        zeros = np.zeros((len(batch.tokens.values), top_k), np.float32)
        return Ragged(zeros.astype(np.int32), batch.tokens.offsets), Ragged(zeros, batch.tokens.offsets)


def teacher_of(tmp_path: Path, config: RunConfig) -> tuple[ColumnMaker, FakeTeacher]:
    made: list[FakeTeacher] = []

    def make_backend(of: RunConfig) -> FakeTeacher:
        made.append(FakeTeacher(of.model.path))
        return made[-1]

    if config.resources.mode == "fully_async":
        maker = make_column_maker("teacher", config, tmp_path, 0, make_backend)
    else:
        maker = make_inside(config, FakeBackend(), tmp_path, make_backend)[0]
    maker.load()
    return maker, made[0]


@pytest.mark.parametrize("mode", ["colocate", "fully_async"])
def test_a_teacher_scores_with_its_own_model(tmp_path: Path, mode: str) -> None:
    raw = RAW | {"algorithm": {"type": "opd"}, "teacher": {"model": {"path": "t"}}}
    maker, backend = teacher_of(tmp_path, make_config(raw, [f"resources.mode={mode}"]))
    assert (maker.columns, backend.path) == (("teacher_logprobs",), "t")
    assert scored(maker) == -1.0


def test_a_teacher_tells_its_likeliest_tokens_of_those_that_the_policy_has(
    tmp_path: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    padded = tmp_path_factory.mktemp("padded")
    for file in tiny_model.iterdir():
        (padded / file.name).write_bytes(file.read_bytes())
    described = json.loads((padded / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps(described | {"vocab_size": described["vocab_size"] + 64}))
    raw = RAW | {"model": {"path": str(tiny_model)}, "teacher": {"model": {"path": str(padded)}}}
    raw |= {"algorithm": {"type": "opd_full", "top_k": 3}}
    maker, backend = teacher_of(tmp_path, make_config(raw))
    tokens, mask = Ragged.pack([np.arange(3, dtype=np.int32)]), Ragged.pack([np.array([0, 1, 1], np.uint8)])
    made = maker.make({"tokens": tokens, "loss_mask": mask}, np.zeros(1, np.int64))
    assert tuple(made) == maker.columns == ("teacher_top_ids", "teacher_top_logprobs")
    assert backend.asked == (3, described["vocab_size"])
    with pytest.raises(ConfigError, match=rf"share {described['vocab_size']} tokens"):
        teacher_of(tmp_path, make_config(raw, ["algorithm.top_k=5000"]))
