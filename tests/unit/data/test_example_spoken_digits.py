"""The example of spoken digits: what is said, that nobody speaks in both splits, and what is refused. Nothing is fetched."""

import io
import json
import subprocess
import wave
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from examples.spoken_digits import prepare
from relax.cli.sft import load_sft_config
from relax.config import load_config
from relax.config.data import FileDataConfig

FOLDER = Path(__file__).parents[3] / "examples" / "spoken_digits"


class FakeSpeaker:
    """Says as many samples as the digit."""

    def __init__(self, path: str, voices: Path | None) -> None:
        assert (path, voices) == ("a library", None)

    def say(self, said: prepare.Utterance, path: Path) -> None:
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, 22050, 0, "NONE", ""))
            file.writeframes(bytes(2 * said.digit))


def test_the_same_is_said_at_every_call_and_every_digit_about_as_often() -> None:
    said = list(prepare.utterances("train"))
    assert said == list(prepare.utterances("train"))
    assert len(said) == prepare.SIZES["train"]
    counts = Counter(one.digit for one in said)
    assert sorted(counts) == list(range(10))
    assert max(counts.values()) < 1.5 * min(counts.values())


def test_nobody_speaks_in_both_splits() -> None:
    train, held_out = ({one.voice.partition("+")[2] for one in prepare.utterances(split)} for split in prepare.SIZES)
    assert train == {*prepare.VOICES["train"].split()}
    assert held_out == {*prepare.VOICES["held-out"].split()}
    assert not train & held_out


def test_rows_say_what_their_sounds_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "Speaker", FakeSpeaker)
    monkeypatch.setattr(prepare, "SIZES", {"train": 12, "held-out": 5})
    prepare.write(tmp_path, "a library", None)
    for split, size in prepare.SIZES.items():
        rows = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text("utf-8").splitlines()]
        assert len(rows) == size
        for row in rows:
            with wave.open(str(tmp_path / row["audios"])) as file:
                assert str(file.getnframes()) == row["answer"]


def test_another_wheel_than_those_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], check: bool) -> None:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("espeakng_loader/libespeak-ng.so", "not that one")
        (Path(command[command.index("--dest") + 1]) / "espeakng_loader-0.2.4-py3-none-any.whl").write_bytes(out.getvalue())

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(SystemExit, match="sha256"):
        prepare.fetch(tmp_path)
    assert not (tmp_path / "espeakng_loader").exists()


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is there already"):
        prepare.main(tmp_path)


def test_the_run_begins_where_the_warm_start_ends_on_the_sounds_that_are_made() -> None:
    sft, run = load_sft_config(FOLDER / "sft.toml", []), load_config(FOLDER / "run.toml")
    assert run.model.path == sft.output.path
    assert sft.eval is not None
    assert run.eval is not None
    for data, split in ((sft.data, "train"), (run.data, "train"), (sft.eval.data, "held-out"), (run.eval.data, "held-out")):
        assert isinstance(data, FileDataConfig)
        assert data.path == str(prepare.DEFAULT / f"{split}.jsonl")
