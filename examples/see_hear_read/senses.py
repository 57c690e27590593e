"""Questions with two answers, of which one is seen and one is heard; the text says which of the things heard is meant.

    the picture   a shape in one of four colours
    the sound     one to three beeps, all low or all high
    the text      "Which colour, which pitch?" or "Which colour, how many beeps?"

Needs numpy and Pillow alone; every row is a function of its number and the seed.
"""

import io
import random
import wave
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (240, 210, 40)}
PITCHES = {"low": (250, 400), "high": (1600, 2400)}  # hertz
MOST_BEEPS = 3
SIDE = 64  # pixels
RATE, SECONDS = 16_000, 0.6


def question(index: int, seed: int, without: str = "") -> dict[str, Any]:
    """One row; the two questions take turns. `without` "picture", "sound" or "text" is a row in which that says nothing."""
    draw = random.Random(f"{seed}/{index}")
    colour, pitch, beeps = draw.choice(list(COLOURS)), draw.choice(list(PITCHES)), draw.randint(1, MOST_BEEPS)
    asked, heard = (("which pitch", pitch), ("how many beeps", str(beeps)))[index % 2]
    text = "" if without == "text" else f"Which colour, {asked}?"
    return {
        "prompt": f"<image><audio>{text}",
        "answer": f"{colour} {heard}",
        "asked": asked.split()[-1],
        "images": picture(None if without == "picture" else colour, draw),
        "audios": sound(0 if without == "sound" else beeps, pitch, draw),
    }


def picture(colour: str | None, draw: random.Random) -> bytes:
    """A PNG of a large shape somewhere on a light background, or of the background alone."""
    grey, size = draw.randint(225, 255), draw.randint(44, 60)
    left, top = draw.randint(0, SIDE - size), draw.randint(0, SIDE - size)
    box = (left, top, left + size - 1, top + size - 1)
    image = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    if colour is not None:
        brush = ImageDraw.Draw(image)
        fill = draw.choice((brush.ellipse, brush.rectangle))
        fill(box, COLOURS[colour])
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def sound(beeps: int, pitch: str, draw: random.Random) -> bytes:
    """A WAV file, always as long: beeps at some pace over a little noise."""
    hertz, length, gap = draw.uniform(*PITCHES[pitch]), draw.uniform(0.06, 0.09), draw.uniform(0.06, 0.09)
    time = np.arange(round(RATE * SECONDS)) / RATE - draw.uniform(0.01, 0.08)
    is_on = (time >= 0) & (time < beeps * (length + gap)) & (time % (length + gap) < length)
    noise = np.random.default_rng(draw.getrandbits(64)).normal(0, 0.003, len(time))
    samples = draw.uniform(0.2, 0.5) * is_on * np.sin(2 * np.pi * hertz * time) + noise
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return out.getvalue()
