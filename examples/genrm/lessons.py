"""The judge's lessons: a right answer, what is claimed, and both compared from the left up to the first difference.

    prompt "143\\n143"   solution "11 44 33 ..\\nyes"   answer "yes"
    prompt "143\\n133"   solution "11 43\\nno"          answer "no"

Side by side is where a tiny model tells digits apart; `.` is the end, and `x` what is no digit. A judge that has never seen
nonsense may say yes to it, and a policy would find that: half of the claims are right, the others wrong in every way we know.
"""

import random
import string
from typing import Any

from relax.data.arithmetic import addition

CHARACTERS = string.digits * 10 + string.ascii_letters + string.punctuation


def lesson(index: int, seed: int, **options: Any) -> dict[str, Any]:
    """Row `index` of the list that `seed` names: `prompt`, `answer` and `solution`. `options` are those of `addition`."""
    right, rng = addition(index, seed, **options)["answer"], random.Random(f"judge {seed} {index}")
    claim = right if rng.random() < 0.5 else wrong_claim(right, rng)
    verdict = "yes" if claim == right else "no"
    return {"prompt": f"{right}\n{claim}", "answer": verdict, "solution": f"{comparison(right, claim)}\n{verdict}"}


def comparison(right: str, claim: str) -> str:
    """Pairs of characters, the last of them the first that differs, or both ends."""
    pairs: list[str] = []
    for place in range(len(right) + 1):
        one, other = (_shown(text[place : place + 1]) for text in (right, claim))
        pairs.append(one + other)
        if one != other:
            break
    return " ".join(pairs)


def _shown(character: str) -> str:
    return "." if not character else character if character in string.digits else "x"


def wrong_claim(right: str, rng: random.Random) -> str:
    """What a policy says that cannot add well, or that tries anything; mostly near the right answer."""
    place = rng.randint(0, len(right))
    head, tail, digit = right[:place], right[place:], rng.choice(string.digits)
    claims = (
        head + digit + tail[1:],  # another digit, or one more at the end
        head + digit + tail,  # one too many
        head + tail[1:],  # one lost
        head + tail[:2][::-1] + tail[2:],  # two swapped
        str(abs(int(right) + rng.choice((-1, 1)) * 10 ** rng.randrange(len(right)))),  # a carry too many, or too few
        head + rng.choice(CHARACTERS) + tail[1:],
        head + "".join(rng.choices(CHARACTERS, k=rng.randint(0, 10))),  # nonsense, or nothing
    )
    return rng.choice([claim for claim in claims if claim != right])
