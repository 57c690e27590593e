"""The rule-based reward of DAPO (Yu et al. 2025, arXiv:2503.14476): the text behind the last "Answer:", in a plain form."""

import re
from collections.abc import Callable
from typing import Any

from relax.config.reward import DapoRewardConfig
from relax.rewards.boxed import last_boxed, without_text_commands
from relax.rewards.table import reference_texts

_ANSWER = re.compile(r"\banswer\**[ \t]*:[ \t]*([^\n]+)", re.IGNORECASE)
_SPACES = re.compile(r"\\[,;:! ]|~|\s+")
_FRACTION = re.compile(r"\\[dt]frac")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\w)")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_UNITS = re.compile(
    r"(?<=[\d})])(?:degrees?|\^\{?\\?(?:circ|degree)\}?|dollars?|cents?|percent|units?|square|cubic|feet|foot|inch(?:es)?|"
    r"miles?|mph|km|cm|mm|met(?:er|re)s?|hours?|minutes?|seconds?|days?|weeks?|months?|years?|points?|students?|people)+$"
)


def make_dapo(config: DapoRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], dict[str, float]]:
    """`right` or `wrong`, and the part `accuracy`, 1.0 or 0.0. Of a box behind "Answer:", its content counts."""

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> dict[str, float]:
        expected = {plain_answer(text) for text in reference_texts(answer, "dapo")}
        found = _ANSWER.findall(response[-config.window :])
        given = plain_answer(found[-1]) if found else ""
        is_right = given != "" and given in expected
        return {"reward": config.right if is_right else config.wrong, "accuracy": float(is_right)}

    return score


def plain_answer(text: str) -> str:
    r"""An answer without what does not change it: `$\dfrac12$ dollars.` becomes `\frac{1}{2}`, `x = 1,000` becomes `1000`."""
    boxed = last_boxed(text)
    text = without_text_commands(text if boxed is None else boxed)
    text = text.replace("$", "").replace("\\%", "").replace("%", "").replace("**", "").replace("\\(", "").replace("\\)", "")
    text = text.replace("\\left", "").replace("\\right", "").replace("°", "")
    text = _SPACES.sub("", text).rstrip(".")
    head, equals, tail = text.rpartition("=")
    text = tail if equals and len(head) <= 8 else text  # x = 5; not an equation
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", _FRACTION.sub(r"\\frac", text)))
    text = _UNITS.sub("", _THOUSANDS.sub("", text))
    return _plain_number(text).casefold()


def _plain_number(text: str) -> str:
    """A decimal number without zeros that say nothing: +05.50 is 5.5."""
    match = re.fullmatch(r"([+-]?)0*(\d*)(?:\.(\d*?)0*)?", text)
    if match is None or not any(character.isdigit() for character in text):
        return text
    sign, whole, rest = match[1].replace("+", ""), match[2] or "0", match[3] or ""
    number = f"{whole}.{rest}" if rest else whole
    return number if number == "0" else sign + number
