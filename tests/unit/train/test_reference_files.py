"""A reference that follows the policy can be brought back to where it was at any checkpoint that is kept."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax.errors import CheckpointError
from relax.train.reference import ReferenceFiles


def weights(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), float(value))}


def test_a_reference_that_keeps_its_weights_writes_nothing(tmp_path: Path) -> None:
    files = ReferenceFiles(tmp_path / "reference", every=0, num_kept=3)
    files.begin(weights(0))
    assert not (tmp_path / "reference").exists()
    assert files.back_to(5) is None
    assert not files.is_due(0, 1000)


def test_back_to_any_kept_version_and_the_future_is_gone(tmp_path: Path) -> None:
    files = ReferenceFiles(tmp_path, every=4, num_kept=2)
    files.begin(weights(0))
    files.begin(weights(99))
    for version in (4, 8, 12, 16):
        files.keep(version, weights(version))
    found = files.back_to(13)
    assert found is not None
    assert (found[0], float(found[1]["w"][0])) == (12, 12.0)
    assert files.back_to(100) is not None
    assert files.back_to(100)[0] == 12, "version 16 was of a future that the run has not"
    first = files.back_to(3)
    assert first is not None
    assert (first[0], float(first[1]["w"][0])) == (0, 0.0)


@given(st.integers(1, 9), st.integers(0, 50), st.integers(0, 50))
def test_due_after_so_many_versions(every: int, held: int, version: int) -> None:
    assert ReferenceFiles(Path("x"), every, 1).is_due(held, version) == (version - held >= every)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    files = ReferenceFiles(tmp_path, every=1, num_kept=1)
    (tmp_path / "version_3.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"version_3\.safetensors"):
        files.back_to(3)
