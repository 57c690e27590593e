"""Questions about short clips of moving shapes. Needs PyAV alone; every row is a function of its number and the seed.

A clip has two by two quarters. In one a shape leaves at the side, in another one comes in, in a third one stays about where
it is. Whatever is asked, the first frame by itself leaves two answers open, and so does the last.
"""

import dataclasses
import io
import random
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from relax.data.media.decoded import Video

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (240, 210, 40)}
SHAPES = ("circle", "square", "triangle")
QUARTER, SIZE, FPS = 32, 24, 2  # pixels, pixels, frames a second
# How far outwards a shape is in each of the four frames, in pixels.
OUTWARDS = {"leaves": (0, 12, 32, 44), "comes": (44, 32, 12, 0), "stays": (0, 2, 0, -2)}


def question(index: int, seed: int) -> dict[str, Any]:
    """One row. The four kinds of questions take turns: what leaves, what comes, what stays, and which way something goes."""
    draw = random.Random(f"{seed}/{index}")
    colours, places = draw.sample(list(COLOURS), 3), draw.sample(range(4), 3)
    asked = index % 4
    if asked < 3:
        text, answer = f"Which colour {list(OUTWARDS)[asked]}?", colours[asked]
    else:
        number = draw.randrange(3)
        is_right = places[number] % 2 == 1
        text = f"Which way does the {colours[number]} one go?"
        answer = "nowhere" if number == 2 else "right" if is_right == (number == 0) else "left"
    kind = (*OUTWARDS, "way")[asked]
    return {"prompt": f"<video>{text}", "answer": answer, "kind": kind, "videos": _clip(colours, places, draw)}


def still(video: Video) -> Video:
    """The first frame all the time: a transform that takes away what answers depend on."""
    return dataclasses.replace(video, frames=np.repeat(video.frames[:1], len(video.frames), axis=0))


def backwards(video: Video) -> Video:
    """The frames in reverse: a transform after which what left comes, and what went right goes left."""
    return dataclasses.replace(video, frames=np.ascontiguousarray(video.frames[::-1]))


def _clip(colours: list[str], places: list[int], draw: random.Random) -> bytes:
    """An mp4 of four frames on a grey background."""
    frames = np.full((4, 2 * QUARTER, 2 * QUARTER, 3), draw.randint(108, 148), np.uint8)
    for colour, place, outwards in zip(colours, places, OUTWARDS.values(), strict=True):
        rows, columns = np.nonzero(_mask(draw.choice(SHAPES)))
        rows += QUARTER * (place // 2) + draw.randint(2, QUARTER - SIZE - 2)
        columns += QUARTER * (place % 2) + draw.randint(2, QUARTER - SIZE - 2)
        for frame, far in zip(frames, outwards, strict=True):
            moved = columns + (far if place % 2 else -far)
            is_inside = (moved >= 0) & (moved < 2 * QUARTER)
            frame[rows[is_inside], moved[is_inside]] = COLOURS[colour]
    return _mp4(frames)


def _mask(shape: str) -> NDArray[np.bool_]:
    """`[SIZE, SIZE]`: where the shape is."""
    y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    if shape == "circle":
        return x**2 + y**2 <= (SIZE / 2) ** 2
    return 2 * np.abs(x) <= y + SIZE / 2 if shape == "triangle" else np.ones((SIZE, SIZE), bool)


def _mp4(frames: NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=FPS, options={"x264-params": "mbtree=0"})
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        stream.thread_count = 1  # and no look into coming frames: so a clip has the same bytes at every call
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        file.mux(stream.encode())
    return out.getvalue()
