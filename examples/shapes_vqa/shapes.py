"""Questions about small pictures of coloured shapes. Needs Pillow alone; every row is a function of its number and the seed."""

import io
import random
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (240, 210, 40)}
SHAPES = ("circle", "square", "triangle")
CELL = 32  # pixels; a picture has two by two cells, with at most one shape in each


def question(index: int, seed: int) -> dict[str, Any]:
    """One row. The four kinds of questions take turns: colour, shape, how many, is a colour there."""
    draw = random.Random(f"{seed}/{index}")
    kind = ("colour", "shape", "count", "exists")[index % 4]
    count = 1 if kind in ("colour", "shape") else draw.randint(1, 4)
    shown = [(draw.choice(list(COLOURS)), draw.choice(SHAPES)) for _ in range(count)]
    [(colour, shape), *_] = shown
    if kind == "colour":
        text, answer = "Which colour?", colour
    elif kind == "shape":
        text, answer = "Which shape?", shape
    elif kind == "count":
        text, answer = "How many shapes?", str(count)
    else:
        absent = sorted(COLOURS.keys() - {other for other, _ in shown})
        is_there = not absent or draw.random() < 0.5
        text, answer = f"Is anything {colour if is_there else draw.choice(absent)}?", "yes" if is_there else "no"
    return {"prompt": f"<image>{text}", "answer": answer, "kind": kind, "images": _picture(shown, draw)}


def _picture(shown: list[tuple[str, str]], draw: random.Random) -> bytes:
    """A PNG on a light background, each shape somewhere in a cell of its own."""
    grey = draw.randint(225, 255)
    image = Image.new("RGB", (2 * CELL, 2 * CELL), (grey, grey, grey))
    brush = ImageDraw.Draw(image)
    for cell, (colour, shape) in zip(draw.sample(range(4), len(shown)), shown, strict=True):
        size = draw.randint(24, 28)
        left = CELL * (cell % 2) + draw.randint(1, CELL - size - 1)
        top = CELL * (cell // 2) + draw.randint(1, CELL - size - 1)
        box = (left, top, left + size, top + size)
        if shape == "circle":
            brush.ellipse(box, COLOURS[colour])
        elif shape == "square":
            brush.rectangle(box, COLOURS[colour])
        else:
            brush.polygon([(left, top + size), (left + size, top + size), (left + size / 2, top)], COLOURS[colour])
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
