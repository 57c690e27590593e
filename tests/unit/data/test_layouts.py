"""Layouts of open data sets become prompts and answers."""

from typing import Any

import pytest

from relax.config.data import FileDataConfig
from relax.data.layouts import lay_out
from relax.data.rows import BadRow


def config(layout: str, **changes: Any) -> FileDataConfig:
    return FileDataConfig(path="x.jsonl", layout=layout, **changes)


def test_plain_rows_stay_as_they_are() -> None:
    row = {"prompt": "?", "answer": 1}
    assert lay_out(row, config("rows")) is row
    assert lay_out("no row", config("choices")) == "no row"


def test_the_last_turn_of_a_conversation_is_the_answer() -> None:
    turns = [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42"}]
    laid = lay_out({"prompt": turns, "level": 1}, config("conversations"))
    assert laid == {"prompt": turns[:1], "answer": "42", "level": 1}
    assert lay_out({"prompt": turns, "answer": "given"}, config("conversations"))["answer"] == "given"
    assert "answer" not in lay_out({"prompt": turns}, config("conversations", answer_key=None))
    assert lay_out({"prompt": turns[:1]}, config("conversations")) == {"prompt": turns[:1]}  # nothing is answered yet


@pytest.mark.parametrize(
    ("answer", "letter"),
    [(1, "B"), (0, "A"), ("green", "B"), ("b", "B"), ("(C)", "C"), ("C.", "C"), ("2", "C"), (" red ", "A")],
)
def test_answers_of_choices_become_letters(answer: Any, letter: str) -> None:
    row = {"prompt": "Which? ", "choices": ["red", "green", "blue"], "answer": answer}
    laid = lay_out(row, config("choices"))
    assert laid["prompt"] == "Which?\nA. red\nB. green\nC. blue"
    assert laid["answer"] == letter
    assert laid["choices"] == ["red", "green", "blue"]


def test_the_text_of_a_choice_goes_before_its_letter_or_number() -> None:
    assert lay_out({"prompt": "?", "choices": ["2", "1", "0"], "answer": "1"}, config("choices"))["answer"] == "B"
    assert lay_out({"prompt": "?", "choices": ["2", "1", "0"], "answer": 0}, config("choices"))["answer"] == "A"
    assert lay_out({"prompt": "?", "choices": ["B", "A"], "answer": "A"}, config("choices"))["answer"] == "B"


def test_rows_may_have_fewer_choices_than_there_are_columns() -> None:
    row = {"prompt": "?", "a": "x", "b": 2, "c": None, "answer": 1}
    assert lay_out(row, config("choices", choices=["a", "b", "c"]))["prompt"] == "?\nA. x\nB. 2"
    assert "answer" not in lay_out({"prompt": "?", "choices": ["x", "y"]}, config("choices"))  # none is known


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "?"}, "no column 'prompt'"),
        ({"prompt": "?"}, "no column 'choices'"),
        ({"prompt": ["?"], "choices": ["x", "y"]}, "must be a text"),
        ({"prompt": "?", "choices": "xy"}, "must be a list"),
        ({"prompt": "?", "choices": ["x"]}, "between 2 and 26"),
        ({"prompt": "?", "choices": ["x", None, "y"]}, "between 2 and 26"),
        ({"prompt": "?", "choices": ["x", "y"], "answer": 2}, "answer 2 is none of the 2"),
        ({"prompt": "?", "choices": ["x", "y"], "answer": -1}, "answer -1 is none"),
        ({"prompt": "?", "choices": ["x", "y"], "answer": "z"}, "answer 'z' is none"),
        ({"prompt": "?", "choices": ["x", "x"], "answer": "x"}, "several"),
    ],
)
def test_rows_that_do_not_fit_are_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRow, match=words):
        lay_out(row, config("choices"))


def test_conversations_that_do_not_fit_are_named() -> None:
    for turns in ("text", [], ["turn"]):
        with pytest.raises(BadRow, match="turn"):
            lay_out({"prompt": turns}, config("conversations"))
