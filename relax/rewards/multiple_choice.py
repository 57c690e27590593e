"""Questions with lettered options, as in GPQA (Rein et al. 2023, arXiv:2311.12022)."""

import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relax.config.reward import MultipleChoiceRewardConfig
from relax.rewards.boxed import last_boxed, without_text_commands
from relax.rewards.table import reference_text

LETTERS = string.ascii_uppercase
NUM_UNKNOWN = 10  # options that a row may have which does not list them
MAX_CHARACTERS = 20_000  # of the response's end
# A letter after "answer", as in "**Answer:** (C)", "the correct option is C", "Final answer: $C$".
_SAID = re.compile(
    r"(?i:\b(?:answer|option|choice)\b)[\s*_]*(?:(?i:is|would be|must be)\b|[:=])[\s*_]*"
    r"(?:(?i:option|choice|letter)\s+)?[\s*_$(\[]*(?:\\(?:text|mathrm|mathbf|textbf|boxed)\s*\{)?[(\[]?"
    r"([A-Z]|[a-z](?=[)\].*]|\s*$))(?![\w'])",
    re.MULTILINE,
)
_LINE = re.compile(r"^[\s*_$(\[]*([A-Z])[)\].:*_$\s]*$", re.MULTILINE)  # a line with a letter and nothing else
_LEAD = re.compile(r"^[(\[]?([A-Za-z])(?:[)\]]|[.:])\s+\S")  # a letter before its option's text


def make_multiple_choice(config: MultipleChoiceRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], float]:
    """1.0 when the last choice that the response names is the right one; else 0.0.

    The row's answer is a letter, the right option's text, or its number from 0 (also as a text, if that is no option's). Texts
    and numbers need the row's options. Raises `ValueError` when they do not fit together.
    """

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> float:
        right, options = right_letter(answer, metadata, config.choices_key)
        return float(chosen(response, options) == right)

    return score


def chosen(response: str, options: Sequence[str]) -> str | None:
    """The letter that a response comes to: in its last box, after its last "answer", or alone on its last such line; or the
    option whose text stands there. None when it names none, or one that there is not."""
    text = response.rpartition("</think>")[2][-MAX_CHARACTERS:]
    boxed = last_boxed(text)
    if boxed is not None:
        return _letter(boxed, options)
    if said := list(_SAID.finditer(text)):
        return _known(said[-1][1].upper(), options)
    if (whole := _letter(text, options)) is not None:
        return whole
    lines = _LINE.findall(text)
    return _known(lines[-1], options) if lines else None


def _letter(text: str, options: Sequence[str]) -> str | None:
    plain = without_text_commands(text).strip().strip("*_$ \t\n")
    bare = plain.strip("()[].:*_ ")
    if len(bare) == 1 and bare.upper() in LETTERS:
        return _known(bare.upper(), options)
    same = [letter for letter, option in zip(LETTERS, options, strict=False) if _plain(option) == _plain(plain) != ""]
    if len(same) == 1:
        return same[0]
    lead = _LEAD.match(plain)
    letter = _known(lead[1].upper(), options) if lead is not None else None
    if lead is None or letter is None:
        return None
    # "B) because ..." names B; "B) the text of C" names none.
    rest = _plain(plain[lead.end() - 1 :])
    of_others = {_plain(option) for other, option in zip(LETTERS, options, strict=False) if other != letter}
    return None if rest in of_others else letter


def _known(letter: str, options: Sequence[str]) -> str | None:
    return letter if LETTERS.index(letter) < (len(options) or NUM_UNKNOWN) else None


def _options(raw: Any, key: str) -> list[str]:
    if raw is None:
        return []
    if isinstance(raw, Mapping) and isinstance(raw.get("text"), list):
        raw = raw["text"]  # as in ARC: {"text": [...], "label": [...]}
    if isinstance(raw, Mapping) and list(raw) == list(LETTERS[: len(raw)]):
        raw = list(raw.values())
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not 2 <= len(raw) <= len(LETTERS):
        raise ValueError(f"the row's {key} must be a list of 2 to {len(LETTERS)} options, or a table from A on")
    return [str(option) for option in raw]


def right_letter(answer: Any, metadata: Mapping[str, Any], choices_key: str | Sequence[str]) -> tuple[str, list[str]]:
    """The right option's letter, and the row's options. Raises `ValueError` when they do not fit together."""
    if isinstance(choices_key, str):
        options = _options(metadata.get(choices_key), choices_key)
    else:
        options = _options(_columns(metadata, choices_key), " and ".join(choices_key))
    return _right(answer, options), options


def _columns(metadata: Mapping[str, Any], keys: Sequence[str]) -> list[Any] | None:
    """The options that stand in columns of their own, as in NExT-QA; questions with fewer options leave the last ones empty."""
    found = [metadata.get(key) for key in keys]
    while found and found[-1] in (None, ""):
        found.pop()
    if any(option is None for option in found):
        raise ValueError(f"the row has no column {keys[found.index(None)]!r}, and options in later ones (reward.choices_key)")
    return found or None


def _right(answer: Any, options: Sequence[str]) -> str:
    count = len(options) or NUM_UNKNOWN
    if isinstance(answer, int) and not isinstance(answer, bool) and options:
        if 0 <= answer < count:
            return LETTERS[answer]
        raise ValueError(f"the row's answer is option number {answer} (from 0), and there are {count}")
    text = reference_text(answer, "multiple_choice")
    same = [letter for letter, option in zip(LETTERS, options, strict=False) if _plain(option) == _plain(text)]
    if len(same) == 1:
        return same[0]
    if text.isdecimal() and len(text) <= 2 and int(text) < len(options):
        return LETTERS[int(text)]
    letter = text.strip("()[]. ").upper()
    if len(letter) == 1 and letter in LETTERS[:count]:
        return letter
    raise ValueError(f"the row's answer {text[:80]!r} is neither a letter of its {count} options nor the text of one")


def _plain(text: str) -> str:
    return " ".join(without_text_commands(text).replace("$", "").split()).strip(" .").casefold()
