"""Images by Pillow, whatever their mode, to upright RGB."""

import math
import warnings
from typing import BinaryIO

import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError
from PIL.Image import DecompressionBombError, Resampling

from relax.config.media import ImageConfig
from relax.data.media.decoded import Image, Unreadable

# Formats of pictures. Pillow opens more, among them some that start other programs (EPS).
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "AVIF", "BMP", "DIB", "TIFF", "PPM", "ICO", "TGA", "JPEG2000")


def read_image(file: BinaryIO, config: ImageConfig) -> Image:
    """The image in `file`. Raises `Unreadable`, or whatever Pillow raises on what is damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes, which have a limit here, and of damaged data beside the pixels
        return _read(file, config)


def _read(file: BinaryIO, config: ImageConfig) -> Image:
    try:
        opened = Pillow.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        raise Unreadable("it is not an image, or of a format that is not read") from None
    except DecompressionBombError:
        raise Unreadable(_too_large("more", config)) from None
    with opened:
        if opened.width * opened.height > config.pixel_limit:
            raise Unreadable(_too_large(f"{opened.width} x {opened.height}", config))
        picture = _rgb(ImageOps.exif_transpose(opened))
    width, height = fit(picture.width, picture.height, config.min_pixels, config.max_pixels)
    if (width, height) != picture.size:
        picture = picture.resize((width, height), Resampling.BICUBIC)
    return Image(np.array(picture))


def fit(width: int, height: int, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
    """The size of the same shape with at most `max_pixels` and about at least `min_pixels`."""
    scale = 1.0
    if max_pixels is not None and width * height > max_pixels:
        scale = math.sqrt(max_pixels / (width * height))
        return max(1, min(max_pixels, int(width * scale))), max(1, min(max_pixels, int(height * scale)))
    if min_pixels is not None and width * height < min_pixels:
        scale = math.sqrt(min_pixels / (width * height))
    return max(1, math.ceil(width * scale)), max(1, math.ceil(height * scale))


def _rgb(picture: Pillow.Image) -> Pillow.Image:
    if picture.mode == "F":
        raise Unreadable("its pixels are floating-point numbers, of which the range is not known")
    if picture.mode.startswith("I"):  # 16 bits, or 32 of which 16 are used
        values = np.asarray(picture)
        if values.min() < 0 or values.max() > 65_535:
            raise Unreadable("its pixels are whole numbers beyond 16 bits, of which the range is not known")
        return Pillow.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8)).convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        return Pillow.alpha_composite(Pillow.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return picture.convert("RGB")


def _too_large(found: str, config: ImageConfig) -> str:
    return f"it has {found} pixels, and {config.pixel_limit} are allowed (image.pixel_limit)"
