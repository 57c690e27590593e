"""A transform of pictures: what lies before the background, larger, and the background grey."""

from dataclasses import replace

import numpy as np
from PIL import Image as Picture

from relax.data.media.decoded import Image

SIZE = 96  # pixels each way
_MARGIN = 3
_FAR = 12  # in any colour, of 255: the background is of one colour
_GREY = 128  # what a tiny vision tower is given as 0


def closer(image: Image) -> Image:
    """uint8 `[SIZE, SIZE, 3]`: the square around all that differs from the colour of most pixels."""
    colours, counts = np.unique(image.pixels.reshape(-1, 3), axis=0, return_counts=True)
    is_shape = np.abs(image.pixels.astype(np.int16) - colours[counts.argmax()]).max(-1) > _FAR
    pixels = np.where(is_shape[..., None], image.pixels, np.uint8(_GREY))
    if is_shape.any():
        rows, columns = np.flatnonzero(is_shape.any(1)), np.flatnonzero(is_shape.any(0))
        half = int(max(np.ptp(rows), np.ptp(columns))) // 2 + 1 + _MARGIN
        middle = ((rows[0] + rows[-1]) // 2 + half, (columns[0] + columns[-1]) // 2 + half)
        padded = np.pad(pixels, ((half, half), (half, half), (0, 0)), constant_values=_GREY)
        pixels = padded[middle[0] - half : middle[0] + half, middle[1] - half : middle[1] + half]
    return replace(image, pixels=np.array(Picture.fromarray(pixels).resize((SIZE, SIZE), Picture.Resampling.BILINEAR)))
