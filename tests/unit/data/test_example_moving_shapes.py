"""The example about clips: they are of a seed, and their answers are what their first and last frames show together."""

import io
from collections import Counter

import numpy as np

from examples.moving_shapes.clips import COLOURS, QUARTER, backwards, question, still
from relax.config.media import MediaConfig
from relax.data.media.decoded import Video
from relax.data.media.video import read_video


def watch(row: dict) -> Video:
    return read_video(io.BytesIO(row["videos"]), MediaConfig())


def places(frame: np.ndarray) -> dict[str, float]:
    """Where each colour that is there has its middle, in pixels from the left."""
    masks = {name: np.abs(frame.astype(int) - rgb).sum(-1) < 120 for name, rgb in COLOURS.items()}
    return {name: float(np.nonzero(mask)[1].mean()) for name, mask in masks.items() if mask.sum() > 50}


def answer(kind: str, asked: str, video: Video) -> str:
    first, last = places(video.frames[0]), places(video.frames[-1])
    if kind == "way":
        if asked in first and asked in last:
            return "nowhere"
        is_right = (first | last)[asked] > QUARTER
        return "right" if is_right == (asked in first) else "left"
    [found] = {"leaves": first.keys() - last, "comes": last.keys() - first, "stays": first.keys() & last}[kind]
    return found


def test_rows_are_a_function_of_number_and_seed() -> None:
    assert len({question(2, 1)["videos"] for _ in range(50)}) == 1
    assert question(7, 1) == question(7, 1)
    assert question(7, 1) != question(7, 2)
    video = watch(question(0, 0))
    assert video.frames.shape == (4, 64, 64, 3)
    assert video.times.tolist() == [0, 0.5, 1, 1.5]


def test_answers_are_what_the_clips_show() -> None:
    said: Counter[str] = Counter()
    for index in range(80):
        row = question(index, 3)
        [asked] = [name for name in COLOURS if name in row["prompt"]] or [""]
        assert answer(row["kind"], asked, watch(row)) == row["answer"], row["prompt"]
        said[row["answer"]] += 1
    assert len(said) == 7, "four colours, left, right, nowhere"
    assert max(said.values()) < 27, "no answer is right most of the time"


def test_a_still_clip_shows_what_is_there_first_and_a_reversed_one_the_opposite() -> None:
    video = watch(question(0, 5))
    first, last = places(video.frames[0]), places(video.frames[-1])
    assert len(first) == len(last) == 2
    assert first.keys() != last.keys()
    assert places(still(video).frames[-1]) == first
    assert places(backwards(video).frames[0]) == last
