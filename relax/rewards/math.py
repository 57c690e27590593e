"""Mathematical answers, compared as mathematics with math-verify.

Its own time limits use SIGALRM, which fails silently off the main thread: they are switched off here, since the process that
runs this is killed at `reward.time_limit_s`.
"""

import logging
import re
from collections.abc import Callable
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from relax.config.reward import MathRewardConfig
from relax.rewards.boxed import BOXED, last_boxed
from relax.rewards.table import reference_text

# Powers of powers, powers and factorials of five digits and more: sympy computes them in full, for hours. They are no answer.
_NUMBER = r"[{(\s]*-?\d[\d.]*[)}\s]*"
EXPLOSIVE = re.compile(
    rf"(?<![\d.])\d[\d.]*[)}}\s]*(?:(?:\^|\*\*){_NUMBER}){{2,}}|(?:\^|\*\*)[{{(\s]*-?\d{{5,}}[)}}\s]*|(?<!\d)\d{{5,}}\s*!"
)
PIECE = re.compile(r"\$[^$]*\$|[^$\n]+|\$")  # of a response without a box: a formula, or a line of words
NO_ANSWER = "$\\Upsilon$"  # equals no answer, and no earlier one is taken in its place
# Of these the library keeps only the number behind: relations without a left side, and negations that it does not know.
HALF_RELATION = re.compile(r"^\s*(?=\\(?:neq?|less|gtr|ll|gg|[lg]t|[lg]e(?:q|qq|qslant)?)(?![A-Za-z])|[<>≤≥])")
NEGATION = re.compile(
    r"\\not\s*=|(?<!\S)!=|≠|"
    r"^\s*\\(?:not(?![A-Za-z])\s*(?:[<>]|\\[a-z]+)?|(?:notin|neg|lnot|n(?:less|gtr|[lg]eq)[a-z]*)(?![A-Za-z]))"
)
THIN_SPACE = re.compile(r"(?<=\d)\\[,!:;](?=\d{3}(?!\d))")  # between thousands
MAX_CHARACTERS = 20_000  # of a response without a box: its end, where an answer is looked for
CONFIGS = (LatexExtractionConfig(), ExprExtractionConfig())


def make_math(config: MathRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], float]:
    """1.0 when the last boxed (or else the last plain) answer equals the row's answer; else 0.0."""
    for name in ("math_verify", "math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns at every run that the limits are off
    gold: dict[str, list[Any]] = {}  # the answers of the last few groups, parsed once

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> float:
        reference = reference_text(answer, "math")
        given = last_boxed(response)
        if given is None and BOXED.search(response):
            return 0.0  # a box that is never closed holds no answer
        if given is not None and _plain(given) == _plain(last_boxed(reference) or reference):
            return 1.0
        if reference not in gold:
            if len(gold) >= 64:
                gold.clear()
            gold[reference] = _parse_reference(reference)
        expected = gold[reference]
        if not expected:  # words, which are compared as such
            return float(_plain(given if given is not None else response) == _plain(reference))
        if given is None:
            found = _parse(PIECE.sub(_whole_piece, _tidy(response[-MAX_CHARACTERS:])))
        else:
            found = _parse_boxed(_tidy(given))
        return float(bool(found) and bool(verify(expected, found, timeout_seconds=None)))

    return score


def _tidy(text: str) -> str:
    return THIN_SPACE.sub("", text.replace("°", "^\\circ "))


def _parse(text: str) -> list[Any]:
    return list(parse(text, extraction_config=CONFIGS, parsing_timeout=None))


def _parse_boxed(given: str) -> list[Any]:
    return [] if EXPLOSIVE.search(given) else _parse(f"$\\boxed{{{_whole_relation(given)}}}$")


def _parse_reference(reference: str) -> list[Any]:
    reference = _tidy(reference)
    if "$" in reference or BOXED.search(reference):
        return [] if EXPLOSIVE.search(reference) else _parse(reference)
    boxed = _parse_boxed(reference)
    return [item for item in boxed if not isinstance(item, str)] and boxed


def _whole_piece(match: re.Match[str]) -> str:
    piece = match[0]
    if EXPLOSIVE.search(piece):
        return NO_ANSWER
    return f"${_whole_relation(piece[1:-1])}$" if len(piece) > 2 and piece[0] == "$" else piece


def _whole_relation(formula: str) -> str:
    r"""`< 5` as `x < 5`, and `\not= 5` as `x \neq 5`."""
    return HALF_RELATION.sub("x ", NEGATION.sub(r" \\neq ", formula))


def _plain(text: str) -> str:
    return " ".join(text.replace("$", "").split()).rstrip(".").casefold()
