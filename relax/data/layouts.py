"""Layouts in which open data sets come, turned into rows with a prompt and an answer.

rows           {"question": "...", "answer": "..."}: as it is
conversations  {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}: the last turn is the
               answer, the turns before it are the prompt
choices        {"question": "...", "a0": "...", "a1": "...", "answer": 1}: the choices follow the question, with letters;
               the answer is a letter, and "choices" the list of them
"""

import string
from collections.abc import Mapping, Sequence
from typing import Any

from relax.config.data import FileDataConfig
from relax.data.rows import SPEAKERS, BadRow, missing_column

ANSWERING = "assistant"


def lay_out(row: Any, data: FileDataConfig) -> Any:
    """The row as `data.layout` means it. What is no object is left for the reader to refuse. Raises `BadRow`."""
    if not isinstance(row, Mapping) or data.layout == "rows":
        return row
    if data.prompt_key not in row:
        raise BadRow(missing_column(data.prompt_key, row))
    if data.layout == "conversations":
        return _conversation(row, data.prompt_key, data.answer_key)
    return _choices(row, data)


def _conversation(row: Mapping[str, Any], column: str, answer_key: str | None) -> Mapping[str, Any]:
    turns = row[column]
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes) or not turns:
        raise BadRow(f'{column!r} must be a list of turns (data.layout = "conversations")')
    last = turns[-1]
    if not isinstance(last, Mapping):
        raise BadRow(f"the last turn of {column!r} is not an object with a speaker")
    speaker = last.get("role") or last.get("from")
    if SPEAKERS.get(str(speaker), speaker) != ANSWERING:
        return row
    said = last.get("content") if last.get("content") is not None else last.get("value")
    given = {answer_key: said} if answer_key is not None and row.get(answer_key) is None else {}
    return {**row, **given, column: turns[:-1]}


def _choices(row: Mapping[str, Any], data: FileDataConfig) -> Mapping[str, Any]:
    question = row[data.prompt_key]
    if not isinstance(question, str):
        raise BadRow(f'{data.prompt_key!r} must be a text (data.layout = "choices")')
    for column in data.choices:
        if column not in row:
            raise BadRow(f"there is no column {column!r} (data.choices)")
    found = row[data.choices[0]] if len(data.choices) == 1 else [row[column] for column in data.choices]
    if not isinstance(found, list | tuple):
        raise BadRow(f"{data.choices[0]!r} must be a list of choices, or data.choices name a column for each")
    choices = [None if choice is None else str(choice).strip() for choice in found]
    while choices and choices[-1] is None:  # rows with fewer choices than there are columns
        choices.pop()
    if not 2 <= len(choices) <= len(string.ascii_uppercase) or None in choices:
        raise BadRow(f"between 2 and {len(string.ascii_uppercase)} choices are needed, and they are {found!r}")
    letters = string.ascii_uppercase[: len(choices)]
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True))
    answer: dict[str, Any] = {"choices": choices}
    if data.answer_key is not None and row.get(data.answer_key) is not None:
        answer[data.answer_key] = _letter(row[data.answer_key], choices, letters)
    return {**row, **answer, data.prompt_key: f"{question.rstrip()}\n{listed}"}


def _letter(answer: Any, choices: Sequence[str | None], letters: str) -> str:
    """The letter of an answer given as a number from 0, as the text of a choice, or as a letter."""
    text = str(answer).strip()
    is_number = isinstance(answer, int) and not isinstance(answer, bool)
    if not is_number and text in choices:
        if choices.count(text) > 1:
            raise BadRow(f"the answer {answer!r} is the text of several choices")
        return letters[choices.index(text)]
    bare = text.strip("().").upper()
    if not is_number and len(bare) == 1 and bare in letters:
        return bare
    if text.isdecimal() and int(text) < len(choices):
        return letters[int(text)]
    raise BadRow(f"the answer {answer!r} is none of the {len(choices)} choices: a number from 0, a letter or a choice's text")
