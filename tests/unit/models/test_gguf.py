"""What cannot be converted is refused before anything is written."""

import importlib.util
from pathlib import Path

import pytest

from relax.errors import ModelError
from relax.models import gguf


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf: no such file"):
        gguf.convert_gguf(tmp_path / "nowhere.gguf", tmp_path / "out")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04 a zip")
    with pytest.raises(ModelError, match="not a GGUF file"):
        gguf.convert_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF rest")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"relax-rl\[gguf\]"):
        gguf.convert_gguf(file, tmp_path / "out")


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the extra gguf is not installed")
def test_a_damaged_file_is_an_error_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelError, match="cannot convert it"):
        gguf.convert_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
