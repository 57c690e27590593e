"""Small pictures, tones and clips for tests, made on the spot."""

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image


def picture(size: tuple[int, int] = (8, 6), mode: str = "RGB", seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def tone(seconds: float, rate: int, hertz: float = 440.0, channels: int = 1, loudness: float = 0.5) -> np.ndarray:
    """`[C, T]` float32."""
    wave = loudness * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
    return np.repeat(wave[None].astype(np.float32), channels, 0)


def sound(samples: np.ndarray, rate: int, container: str = "wav", codec: str = "pcm_s16le") -> bytes:
    """`samples [C, T]` float32 as a file."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        layout = "mono" if len(samples) == 1 else "stereo"
        stream = file.add_stream(codec, rate=rate, layout=layout)
        for frame in _audio_frames(samples, rate, layout):
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def _audio_frames(samples: np.ndarray, rate: int, layout: str):
    for start in range(0, samples.shape[1], 1024):
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[:, start : start + 1024]), "fltp", layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
        yield frame


def clip(
    times_ms: Sequence[int],
    size: tuple[int, int] = (32, 24),
    container: str = "mp4",
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    rotation: int = 0,
    audio: np.ndarray | None = None,
    levels: Sequence[int] | None = None,
) -> bytes:
    """A video whose frame at `times_ms[i]` is grey of level `levels[i]`, brighter in its top left quarter.

    `levels` are 8 * i, below 240, unless given; `audio [1, T]` at 8,000 per second.
    """
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=1000, options={"g": "12", **(options or {})})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        track = file.add_stream("aac", rate=8000, layout="mono") if audio is not None else None
        for number, time in enumerate(times_ms):
            level = levels[number] if levels is not None else 8 * number % 240
            pixels = np.full((size[1], size[0], 3), level, np.uint8)
            pixels[: size[1] // 2, : size[0] // 2] += 40
            frame = av.VideoFrame.from_ndarray(pixels)
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
        if track is not None and audio is not None:
            for frame in _audio_frames(audio, 8000, "mono"):
                file.mux(track.encode(frame))
            file.mux(track.encode())
    return out.getvalue()
