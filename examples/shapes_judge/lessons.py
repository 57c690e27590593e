"""The judge's lessons: a picture, a question about it and a claim; what the judge sees itself, and whether the claim is right.

    prompt "<image>Which colour?\\nred"    solution "red\\nyes"     answer "yes"
    prompt "<image>How many shapes?\\n3"   solution "2\\nno"        answer "no"

Half of the claims are right. The others are mostly another answer to the question, and some are nonsense, since a policy may
find what its judge has never seen.
"""

import random
import string
from typing import Any

from examples.shapes_vqa.shapes import COLOURS, SHAPES, question

ANSWERS = {"colour": tuple(COLOURS), "shape": SHAPES, "count": ("1", "2", "3", "4"), "exists": ("yes", "no")}
CHARACTERS = string.ascii_letters + string.digits + " .,<|>"


def lesson(index: int, seed: int) -> dict[str, Any]:
    """Row `index` of the list that `seed` names: `prompt`, `images`, `answer` and `solution`."""
    row, draw = question(index, seed), random.Random(f"judge {seed} {index}")
    right = row["answer"]
    claim = right if draw.random() < 0.5 else wrong_claim(right, row["kind"], draw)
    verdict = "yes" if claim == right else "no"
    return {
        "prompt": f"{row['prompt']}\n{claim}",
        "images": row["images"],
        "answer": verdict,
        "solution": f"{right}\n{verdict}",
        "kind": row["kind"],
    }


def wrong_claim(right: str, kind: str, draw: random.Random) -> str:
    """What a policy says that sees badly, or that tries anything."""
    anything = [answer for answers in ANSWERS.values() for answer in answers]
    claims = (
        *[draw.choice([answer for answer in ANSWERS[kind] if answer != right])] * 5,
        draw.choice(anything),
        f"{draw.choice(anything)} {draw.choice(anything)}",
        right + draw.choice(["", " "]) + draw.choice(anything),
        right[: draw.randrange(len(right))],
        "".join(draw.choices(CHARACTERS, k=draw.randint(1, 12))),
    )
    return draw.choice([claim for claim in claims if claim != right])
