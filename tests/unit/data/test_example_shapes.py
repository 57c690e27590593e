"""The example about shapes: its pictures are of a seed, and its answers of the pictures."""

import io
from collections import Counter

import numpy as np
from PIL import Image

from examples.shapes_vqa.shapes import COLOURS, question


def pixels(row: dict) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(row["images"])))


def colours_in(row: dict) -> set[str]:
    found = {tuple(colour) for colour in pixels(row).reshape(-1, 3).tolist()}
    return {name for name, rgb in COLOURS.items() if rgb in found}


def test_rows_are_a_function_of_number_and_seed() -> None:
    assert question(7, 1) == question(7, 1)
    assert question(7, 1) != question(7, 2)
    assert pixels(question(0, 0)).shape == (64, 64, 3)


def test_answers_are_what_the_pictures_show() -> None:
    said: Counter[str] = Counter()
    for index in range(400):
        row = question(index, 3)
        said[row["answer"]] += 1
        if row["kind"] == "colour":
            assert colours_in(row) == {row["answer"]}
        elif row["kind"] == "exists":
            asked = row["prompt"].removeprefix("<image>Is anything ").removesuffix("?")
            assert (asked in colours_in(row)) == (row["answer"] == "yes")
        elif row["kind"] == "count":
            corners = [pixels(row)[y : y + 32, x : x + 32] for y in (0, 32) for x in (0, 32)]
            assert str(sum(len(np.unique(c.reshape(-1, 3), axis=0)) > 1 for c in corners)) == row["answer"]
    assert len(said) == 13, "four colours, three shapes, four numbers, yes and no"
    assert max(said.values()) < 80, "no answer is right most of the time"
