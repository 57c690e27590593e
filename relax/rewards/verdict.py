"""What a judge's reply says: a number, or that it holds no verdict. Only a reply that has the form asked for says anything.

"It adds up.\nyes"            choice   1.0
"**Score: 7/10**"             number   0.7
'Yes, I think it is "no"'     choice   no verdict
"""

import re

from relax.config.verdict import ChoiceVerdictConfig, JsonVerdictConfig, NumberVerdictConfig, VerdictConfig
from relax.rewards.json_schema import document_of

_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)(?:\s*/\s*(\d+(?:\.\d+)?))?", re.ASCII)
_AROUND, _AFTER = " \t*_`'\"()[]", ".,:;!"  # what models put around a word or a number, and behind it


class NoVerdict(ValueError):
    """The reply has not the form that was asked for."""


def read_verdict(config: VerdictConfig, reply: str) -> float:
    """The reward that the reply gives. Raises `NoVerdict`."""
    _, is_thought_out, said = reply.rpartition("</think>")
    if not is_thought_out and "<think>" in reply:
        raise NoVerdict("it ends within its thoughts")
    match config:
        case ChoiceVerdictConfig():
            return _word(_line(said, config.marker), config.scores)
        case NumberVerdictConfig():
            return _scaled(_number(_line(said, config.marker), config.high), config)
        case JsonVerdictConfig():
            return _in_json(said, config)


def instruction(config: VerdictConfig) -> str:
    """What to tell the judge, so that its reply can be read."""
    match config:
        case ChoiceVerdictConfig(marker=marker):
            words = " or ".join(config.scores)
            return (
                f'End your reply with the line "{marker} " and then {words}.'
                if marker
                else f"End your reply with {words} alone on a line."
            )
        case NumberVerdictConfig(marker=marker):
            after = f' "{marker} " and then' if marker else ""
            return f"End your reply with a line that holds{after} a number from {config.low:g} to {config.high:g}."
        case JsonVerdictConfig():
            what = f"one of {', '.join(config.scores)}" if config.scores else f"a number from {config.low:g} to {config.high:g}"
            return f'Reply with a JSON object whose key "{config.key}" holds {what}.'


def _line(said: str, marker: str) -> str:
    """The rest of the line after the last marker; without one, the last line that is not empty."""
    if marker:
        _, found, rest = said.rpartition(marker)
        if not found:
            raise NoVerdict(f"it has no {marker!r}")
        said = rest.split("\n", 1)[0]
    lines = said.strip().splitlines()
    return _bare(lines[-1]) if lines else ""


def _bare(text: str) -> str:
    return text.strip(_AROUND).rstrip(_AFTER).strip(_AROUND)


def _word(line: str, scores: dict[str, float]) -> float:
    for word, score in scores.items():
        if line.casefold() == _bare(word).casefold():
            return score
    raise NoVerdict(f"it ends with {_short(line)}, wanted was one of {', '.join(scores)}")


def _number(line: str, high: float) -> float:
    found = _NUMBER.fullmatch(line)
    if found is None or (found[2] is not None and float(found[2]) != high):
        raise NoVerdict(f"it ends with {_short(line)}, wanted was a number")
    return float(found[1])


def _in_json(said: str, config: JsonVerdictConfig) -> float:
    try:
        document = document_of(said)
    except (ValueError, RecursionError) as error:
        raise NoVerdict("it is not JSON") from error
    if not isinstance(document, dict) or config.key not in document:
        raise NoVerdict(f"it is not a JSON object with {config.key!r}")
    value = document[config.key]
    if config.scores:
        if not isinstance(value, str):
            raise NoVerdict(f"{config.key!r} is {_short(str(value))}, wanted was one of {', '.join(config.scores)}")
        return _word(_bare(value), config.scores)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NoVerdict(f"{config.key!r} is {_short(str(value))}, wanted was a number")
    return _scaled(value, config)


def _scaled(value: float, config: NumberVerdictConfig | JsonVerdictConfig) -> float:
    low, high = config.low, config.high
    if not low <= value <= high:
        raise NoVerdict(f"{_short(str(value))} is not from {low:g} to {high:g}")
    return (value - low) / (high - low) if config.rescale else float(value)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
