"""The example of easy-VQA: what is made of the package's file, without the package; and that its run files read it."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from made_media import encoded, picture

from examples.easy_vqa.closer import SIZE, closer
from examples.easy_vqa.prepare import balanced, convert
from relax.cli.sft import load_sft_config
from relax.config import load_config
from relax.data.media.decoded import Image
from relax.data.prompts import kinds_of, open_prompts

FOLDER = Path(__file__).parents[3] / "examples" / "easy_vqa"
HAS_BLUE = "is there a blue shape?"
QUESTIONS = [
    ["what shape is present?", "circle", 0],
    ["what color is the shape?", "blue", 0],
    [HAS_BLUE, "yes", 0],
    [HAS_BLUE, "no", 1],
    ["what shape is present?", "circle", 3],
    [HAS_BLUE, "no", 2],
    [HAS_BLUE, "yes", 2],
    [HAS_BLUE, "no", 2],
    ["is there not a circle?", "no", 0],
]


@pytest.fixture
def package() -> zipfile.ZipFile:
    archive = zipfile.ZipFile(io.BytesIO(), "w")
    for split in ("train", "test"):
        archive.writestr(f"easy_vqa/data/{split}/questions.json", json.dumps(QUESTIONS))
        for number in range(4):
            archive.writestr(f"easy_vqa/data/{split}/images/{number}.png", encoded(picture(seed=number)))
    return archive


def test_questions_about_presence_have_yes_as_often_as_no_and_others_stay() -> None:
    kept = balanced([(text, answer, number) for text, answer, number in QUESTIONS])
    assert [list(question) for question in kept] == QUESTIONS[:5]


def test_the_run_files_read_what_is_written(package: zipfile.ZipFile, tmp_path: Path) -> None:
    counts = convert(package, tmp_path)
    assert counts["train"] == counts["test"] == {"shape": 2, "colour": 1, "presence": 2}
    sft, run = load_sft_config(FOLDER / "sft.toml", []), load_config(FOLDER / "run.toml")
    assert run.model.path == sft.output.path
    assert run.eval is not None
    assert run.eval.by == "kind"
    assert sft.eval is not None
    assert (run.data, run.eval.data) == (sft.data, sft.eval.data)
    for data, split in ((run.data, "train"), (run.eval.data, "test")):
        assert data.type == "file"
        assert Path(data.path).name == f"{split}.jsonl"
        source = open_prompts(data.model_copy(update={"path": str(tmp_path / f"{split}.jsonl")}), seed=0)
        rows = [source.row(index) for index in range(len(source))]
        assert sorted(kinds_of(rows, "kind")) == ["colour", "presence", "presence", "shape", "shape"]
        assert {Path(row.media[0].source).relative_to(tmp_path) for row in rows} == {
            Path(f"{split}/{number}.png") for number in (0, 1, 3)
        }
        colour = next(row for row in rows if row.metadata["kind"] == "colour")
        assert list(colour.messages[0]["content"]) == [{"type": "image"}, {"type": "text", "text": "what color is the shape?"}]
        assert colour.answer == "blue"


def test_a_shape_is_shown_as_large_as_the_picture_wherever_it_lies() -> None:
    wide = np.full((64, 64, 3), (249, 241, 240), np.uint8)
    wide[2:8, 50:64] = (200, 10, 20)  # 14 x 6, at the edge
    found = closer(Image(wide)).pixels
    assert found.shape == (SIZE, SIZE, 3)
    is_shape = (found != 128).any(-1)
    assert 0.2 < is_shape.mean() < 0.35
    assert (found[SIZE // 2, SIZE // 2] == (200, 10, 20)).all()
    rows, columns = np.flatnonzero(is_shape.any(1)), np.flatnonzero(is_shape.any(0))
    assert 1.8 < np.ptp(columns) / np.ptp(rows) < 2.8, "as wide as it was"
    empty = closer(Image(np.full((64, 64, 3), 240, np.uint8))).pixels
    assert (empty == 128).all()
