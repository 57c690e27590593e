"""What decoding gives: plain numpy arrays, one class for each kind of media."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Unreadable(Exception):
    """Why an item cannot be decoded. Becomes a `DataError` that names the row and the item."""


@dataclass(frozen=True, slots=True)
class Image:
    """`pixels [H, W, 3]` uint8, RGB."""

    pixels: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Audio:
    """`samples [T]` float32, one channel, at `sampling_rate` per second."""

    samples: NDArray[np.float32]
    sampling_rate: int


@dataclass(frozen=True, slots=True)
class Video:
    """`frames [F, H, W, 3]` uint8, RGB: frame `k` is what is on the screen `k / fps` seconds after the video's start.

    `times [F]` float64: when the frame came on, in seconds after the start: `k / fps` or a little before, and equal for
    neighbours where one frame stands still for long. `audio` begins with the video.
    """

    frames: NDArray[np.uint8]
    times: NDArray[np.float64]
    fps: float
    audio: Audio | None = None


Decoded = Image | Audio | Video
KINDS: dict[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}


def check(item: Any, kind: str) -> int:
    """The size of `item` in bytes. Raises `Unreadable` where it is not what its class says, as a transform may leave it."""
    if not isinstance(item, KINDS[kind]):
        raise Unreadable(f"gave a {type(item).__name__}, and {KINDS[kind].__name__} of relax.data.media.decoded is needed")
    if isinstance(item, Image):
        return _array(item.pixels, "pixels", np.uint8, (None, None, 3))
    if isinstance(item, Audio):
        size = _array(item.samples, "samples", np.float32, (None,))
        if not np.isfinite(item.samples).all():
            raise Unreadable("the samples hold NaN or infinity")
        return size
    size = _array(item.frames, "frames", np.uint8, (None, None, None, 3))
    size += _array(item.times, "times", np.float64, (len(item.frames),))
    return size + (check(item.audio, "audio") if item.audio is not None else 0)


def _array(array: Any, name: str, dtype: type[np.generic], shape: tuple[int | None, ...]) -> int:
    if not isinstance(array, np.ndarray):
        raise Unreadable(f"{name} must be a numpy array, and is a {type(array).__name__}")
    fits = array.ndim == len(shape) and all(want in (None, have) for want, have in zip(shape, array.shape, strict=True))
    if not fits or array.dtype != dtype or array.size == 0:
        wanted = ", ".join("?" if size is None else str(size) for size in shape)
        raise Unreadable(f"{name} must be {np.dtype(dtype)} [{wanted}], and is {array.dtype} {list(array.shape)}")
    return array.nbytes
