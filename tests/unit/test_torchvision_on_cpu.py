"""torchvision is there for transformers' processors, whichever torch it was built for."""

import sys
from pathlib import Path

import pytest
import torch

from relax import torchvision_on_cpu
from relax.torchvision_on_cpu import watch_for_import

pytest.importorskip("torchvision")


def test_it_is_imported_and_resizes() -> None:
    from torchvision.transforms.v2 import functional

    assert functional.resize(torch.zeros(3, 4, 6), [2, 3]).shape == (3, 2, 3)


def test_watching_twice_changes_nothing() -> None:
    watch_for_import()
    before = list(sys.meta_path)
    watch_for_import()
    assert sys.meta_path == before


def test_where_the_compiled_part_loads_nothing_is_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_C.so").touch()
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(torch.library, "Library", lambda *args: pytest.fail("declared all the same"))
    torchvision_on_cpu._declare_missing(tmp_path)
    assert loaded == [str(tmp_path / "_C.so")]
