"""The example of three senses: answers are what eyes, ears and the text together say, and what is left out is gone."""

import io
import wave
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.see_hear_read.senses import COLOURS, PITCHES, RATE, SECONDS, question
from relax.cli.sft import load_sft_config
from relax.config import load_config

FOLDER = Path(__file__).parents[3] / "examples" / "see_hear_read"


def seen(row: dict) -> set[str]:
    shown = {tuple(rgb) for rgb in np.asarray(Image.open(io.BytesIO(row["images"]))).reshape(-1, 3).tolist()}
    return {name for name, rgb in COLOURS.items() if rgb in shown}


def samples(row: dict) -> np.ndarray:
    with wave.open(io.BytesIO(row["audios"])) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (RATE, 1, round(RATE * SECONDS))
        return np.frombuffer(file.readframes(RATE), "<i2") / 32768


def beeps(row: dict) -> int:
    """Stretches in which the loudest of 5 ms is no noise."""
    is_loud = np.abs(samples(row)).reshape(-1, RATE // 200).max(1) > 0.1
    return int((np.diff(is_loud.astype(int), prepend=0) == 1).sum())


def pitch(row: dict) -> str:
    """Of the strongest frequency."""
    spectrum = np.abs(np.fft.rfft(samples(row)))
    hertz = np.argmax(spectrum) / SECONDS
    return next(name for name, (low, high) in PITCHES.items() if low - 20 <= hertz <= high + 20)


def test_rows_are_a_function_of_number_and_seed() -> None:
    assert question(7, 1) == question(7, 1)
    assert all(question(7, 1)[part] != question(7, 2)[part] for part in ("images", "audios"))


def test_answers_are_what_eyes_and_ears_say() -> None:
    said = Counter[str]()
    for index in range(300):
        row = question(index, 3)
        (colour,) = seen(row)
        heard = {"pitch": pitch, "beeps": beeps}[row["asked"]](row)
        assert row["answer"] == f"{colour} {heard}"
        assert row["prompt"].endswith(f"{row['asked']}?")
        said[row["answer"]] += 1
    assert len(said) == 4 * (2 + 3)
    assert max(said.values()) < 40, "no answer is right often"


@pytest.mark.parametrize("left_out", ["picture", "sound", "text"])
def test_what_is_left_out_is_gone_and_the_answer_is_not(left_out: str) -> None:
    for index in range(8):
        row, whole = question(index, 5, without=left_out), question(index, 5)
        assert row["answer"] == whole["answer"]
        assert seen(row) == (set() if left_out == "picture" else seen(whole))
        assert beeps(row) == (0 if left_out == "sound" else beeps(whole))
        assert row["prompt"] == ("<image><audio>" if left_out == "text" else whole["prompt"])


def test_the_run_begins_where_the_warm_start_ends_and_is_asked_other_questions() -> None:
    sft, run = load_sft_config(FOLDER / "sft.toml", []), load_config(FOLDER / "run.toml")
    assert run.model.path == sft.output.path
    assert sft.eval is not None
    assert run.eval is not None
    assert run.eval.data == sft.eval.data
    assert len({sft.data.seed, run.data.seed, sft.eval.data.seed}) == 3
