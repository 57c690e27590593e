"""Rewards that compare a response with the row's answer: hard answers by table, and junk of all kinds, which is never right."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relax.config.media_reward import (
    CountRewardConfig,
    IouRewardConfig,
    OcrRewardConfig,
    VqaRewardConfig,
    WerRewardConfig,
)
from relax.config.reward import (
    CodeRewardConfig,
    DapoRewardConfig,
    DeepscalerRewardConfig,
    DiversityRewardConfig,
    ExactRewardConfig,
    F1RewardConfig,
    JsonSchemaRewardConfig,
    MultipleChoiceRewardConfig,
    RegexRewardConfig,
    RewardConfig,
)
from relax.errors import ConfigError
from relax.rewards.boxed import last_boxed
from relax.rewards.code import make_code, program_of
from relax.rewards.json_schema import document_of
from relax.rewards.multiple_choice import chosen
from relax.rewards.table import make_scorer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OPTIONS = ["a red fox", "12 metres", "$\\frac{1}{2}$", "none of these"]
# No digits and no letters of options; braces, dollars, quotes and backslashes, so that parsers are led astray.
JUNK = st.text(st.sampled_from("xyzw \n\t{}()[]$\\^_.,;:!?<>=+-*/%&|'\"`#~éßπ∞文😀\u200b\u202e\x00"), max_size=80)
NASTY = (
    "",
    " \n\t\r\n ",
    "\x00" * 100,
    "{" * 3000,
    "[" * 100_000,
    '{"name":' * 3000,
    "\\boxed{" * 3000,
    "\\boxed{}</think>\\boxed{}",
    "</think>" * 2000,
    "Answer:" * 3000,
    "Answer: " + "\\frac{" * 2000,
    "answer is " * 3000,
    "```json\n" * 2000,
    '"' + "\\" * 9999,
    "\\text{" * 3000 + "}" * 3000,
    "\\frac" * 3000,
    "=" * 10_000,
    "A " * 5000 + "\u202e",
    "(" * 500 + ")" * 500,
    "9" * 100_000,
    "\ud83d\ude00" * 1000,
)
# (reward, a row's answer, its metadata): what is scored with junk below.
ROWS: list[tuple[RewardConfig, Any, dict[str, Any]]] = [
    (DapoRewardConfig(), "17", {}),
    (DeepscalerRewardConfig(), ["17", "18"], {}),
    (DeepscalerRewardConfig(needs_think=False), "17", {}),
    (MultipleChoiceRewardConfig(), "B", {"choices": OPTIONS}),
    (MultipleChoiceRewardConfig(), "c", {}),
    (F1RewardConfig(), ["blue whale", "ocean"], {}),
    (F1RewardConfig(marker="Answer:"), "blue", {}),
    (ExactRewardConfig(), "17", {}),
    (RegexRewardConfig(pattern=r"<answer>(.*?)</answer>"), "17", {}),
    (JsonSchemaRewardConfig(definition=SCHEMA), None, {}),
    (WerRewardConfig(), ["seventeen 17", "18 or 18"], {}),
    (WerRewardConfig(unit="character", ignore_case=False, ignore_punctuation=False), "17", {}),
    (OcrRewardConfig(), ["17", "blue"], {}),
    (OcrRewardConfig(threshold=1.0, marker="Answer:"), "17", {}),
    (IouRewardConfig(), [[1, 2, 3, 4], [5, 6, 7, 8]], {}),
    (IouRewardConfig(score="hits", labels=True), [{"bbox_2d": [1, 2, 3, 4], "label": "a"}], {}),
    (CountRewardConfig(tolerance=9), 17, {}),
    (VqaRewardConfig(), ["17"] * 6 + ["blue"] * 3 + [""], {}),
    (MultipleChoiceRewardConfig(choices_key=("a0", "a1", "a2")), 1, {"a0": "run", "a1": "sleep", "a2": "eat"}),
]
SCORERS = [(make_scorer(config), answer, metadata) for config, answer, metadata in ROWS]


def value(config: RewardConfig, response: str, answer: Any = None, metadata: dict[str, Any] | None = None) -> float:
    raw = make_scorer(config).call("prompt", response, answer, metadata or {})
    return float(raw["reward"] if isinstance(raw, dict) else raw)


@settings(max_examples=150, deadline=2000, derandomize=True)
@given(JUNK)
def test_junk_is_never_right_and_breaks_nothing(junk: str) -> None:
    for scorer, answer, metadata in SCORERS:
        raw = scorer.call("prompt", junk, answer, metadata)
        assert (raw["reward"] if isinstance(raw, dict) else raw) <= 0.0


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: f"{number}-{ROWS[number][0].type}")
def test_texts_that_lead_parsers_astray_end_at_once_and_are_wrong(number: int) -> None:
    scorer, answer, metadata = SCORERS[number]
    for text in NASTY:
        raw = scorer.call("prompt", text, answer, metadata)
        assert (raw["reward"] if isinstance(raw, dict) else raw) <= 0.0


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("so x = 5.\nAnswer: 5", "5", True),
        ("Answer: 4\nno, wait\nAnswer: 5", "5", True),
        ("Answer: 5\nno, wait\nAnswer: 4", "5", False),
        ("**Answer:** $\\dfrac12$", "\\frac{1}{2}", True),
        ("Answer: $\\boxed{1{,}234}$.", "1234", True),
        ("Answer: 1,234,567 dollars", "1234567", True),
        ("Answer: $x = 0.50$", "0.5", True),
        ("Answer: 5\\text{ cm}", "5", True),
        ("Answer: 90^\\circ", "90", True),
        ("Answer: -5", "5", False),
        ("Answer: 15", "5", False),
        ("Answer: 5.01", "5", False),
        ("Answer: (1,2)", "(1, 2)", True),
        ("Answer: 1,2", "12", False),
        ("Answer:", "5", False),
        ("5", "5", False),
        ("\\boxed{5}", "5", False),
        ("Answer: 5" + " and so on" * 100, "5", False),  # too far from the end
        ("Answer: \\text{Monday}", "monday", True),
        ("Answer: 7", ["6", "7"], True),
        ("Answer: 0", "00.0", True),
        ("Answer: .", "5", False),
    ],
)
def test_dapo_takes_the_last_answer_near_the_end(response: str, answer: Any, right: bool) -> None:
    scored = make_scorer(DapoRewardConfig()).call("p", response, answer, {})
    assert scored == {"reward": 1.0 if right else -1.0, "accuracy": float(right)}
    assert value(DapoRewardConfig(right=2.0, wrong=0.0), response, answer) == 2.0 * right


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("<think>a</think> \\boxed{5}", "5", 1),
        ("<think>\\boxed{5}</think> so it is 5", "5", 0),
        ("<think>\\boxed{4}</think> \\boxed{10/2}", "5", 1),
        ("\\boxed{5}", "5", 0),
        ("</think> \\boxed{\\frac{1}{2}}", ["0.7", "0.5"], 1),
        ("</think> \\boxed{3} \\boxed{4}", "3", 0),
        ("</think> \\boxed{}", "5", 0),
        ("</think> 5", "5", 0),
    ],
)
def test_deepscaler_looks_behind_the_thinking(response: str, answer: Any, expected: int) -> None:
    assert value(DeepscalerRewardConfig(), response, answer) == expected
    assert value(DeepscalerRewardConfig(needs_think=False), "\\boxed{5}", "5") == 1.0


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("**C**", "C"),
        ("The answer is (B).", "B"),
        ("The correct answer is B, since A is wrong.", "B"),
        ("Answer: A\nOr rather:\nAnswer: D", "D"),
        ("**Answer:** C", "C"),
        ("Final answer: $\\text{D}$", "D"),
        ("the correct option is C", "C"),
        ("I choose \\boxed{B}", "B"),
        ("\\boxed{\\text{(D)}}", "D"),
        ("\\boxed{A} no: \\boxed{B}", "B"),
        ("\\boxed{a red fox}", "A"),
        ("\\boxed{\\frac{1}{2}}", "C"),
        ("12 metres.", "B"),
        ("D) none of these", "D"),
        ("B. It is 12 metres long", "B"),
        ("some thoughts\n\nC", "C"),
        ("<think>Answer: A</think>\nAnswer: D", "D"),
        ("\\boxed{E}", None),  # there are four
        ("Answer: E", None),
        ("A or B", None),
        ("A) 12 metres", None),  # a letter and another's text
        ("I have a plan", None),
        ("The answer is a matter of taste", None),
        ("The answer is about 12", None),
        ("Because of Answers", None),
        ("\\boxed{AB}", None),
        ("", None),
    ],
)
def test_the_choice_that_a_response_comes_to(response: str, letter: str | None) -> None:
    assert chosen(response, OPTIONS) == letter


def test_multiple_choice_follows_the_order_in_which_the_row_shows_its_options() -> None:
    config = MultipleChoiceRewardConfig()
    for shown in (OPTIONS, OPTIONS[::-1], OPTIONS[2:] + OPTIONS[:2]):
        row = {"choices": shown}
        for answer in ("12 metres", shown.index("12 metres"), "ABCD"[shown.index("12 metres")]):
            scores = [value(config, f"Answer: {letter}", answer, row) for letter in "ABCD"]
            assert scores == [float(option == "12 metres") for option in shown]
    assert value(config, "B", "B", {"choices": {"text": ["x", "y"], "label": ["A", "B"]}}) == 1.0
    assert value(config, "B", "y", {"choices": {"A": "x", "B": "y"}}) == 1.0
    assert value(MultipleChoiceRewardConfig(choices_key="options"), "J", "J", {}) == 1.0


@pytest.mark.parametrize(
    ("answer", "choices", "words"),
    [
        ("E", OPTIONS, "neither a letter of its 4 options"),
        (7, OPTIONS, "option number 7"),
        ("zebra", OPTIONS, "nor the text of one"),
        ("zebra", None, "nor the text of one"),
        (None, OPTIONS, "has no answer"),
        ("A", "abc", "must be a list of 2 to 26 options"),
        ("A", ["one"], "must be a list of 2 to 26 options"),
    ],
)
def test_a_question_that_nobody_can_answer_is_an_error(answer: Any, choices: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        value(MultipleChoiceRewardConfig(), "A", answer, {} if choices is None else {"choices": choices})


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("Eiffel", "the Eiffel Tower", 2 / 3),
        ("tower tower tower", "eiffel tower", 2 / 5),  # a word counts as often as it is in both
        ("tower eiffel", "eiffel tower", 1.0),
        ("London", "Eiffel Tower", 0.0),
        ("London", ["Paris", "London"], 1.0),
        ("", "Paris", 0.0),
        ("the", "a", 0.0),
        ("A", "A", 1.0),
        ("?!", "Paris", 0.0),
    ],
)
def test_f1_is_that_of_squad(response: str, answer: Any, expected: float) -> None:
    assert value(F1RewardConfig(), response, answer) == pytest.approx(expected)


def test_f1_records_whether_all_words_agree_and_looks_behind_a_marker() -> None:
    scored = make_scorer(F1RewardConfig(marker="Answer:")).call("p", "hm. Answer: the Tower Eiffel", "Eiffel Tower", {})
    assert scored == {"reward": 1.0, "exact": 0.0}
    assert value(F1RewardConfig(marker="Answer:"), "Eiffel Tower", "Eiffel Tower") == 0.0


def test_regex_compares_what_the_last_match_holds() -> None:
    config = RegexRewardConfig(pattern=r"<answer>(.*?)</answer>")
    assert value(config, "<answer>3</answer> <answer> 4\n</answer>", 4) == 1.0
    assert value(config, "<answer>4</answer> <answer>3</answer>", 4) == 0.0
    assert value(config, "4", "4") == 0.0
    named = RegexRewardConfig(pattern=r"(is|was) (?P<answer>\w+)", ignore_case=True)
    assert value(named, "It WAS Blue", "blue") == 1.0
    optional = RegexRewardConfig(pattern=r"x(y)?")
    assert value(optional, "x", "y") == 0.0  # a group that took no part
    for pattern in ("a", "(a)(b)", "("):
        with pytest.raises(ConfigError, match=r"reward\.pattern"):
            make_scorer(RegexRewardConfig(pattern=pattern))


@pytest.mark.parametrize(
    ("response", "expected", "is_json"),
    [
        ('{"name": "x", "age": 3}', 1, 1),
        ('Here it is:\n```json\n{"name": "x", "age": 3}\n```\nDone.', 1, 1),
        ('```\n{"name": "x"}\n```\n```json\n{"name": "x", "age": 3}\n```', 1, 1),
        ('<think>{"a": 1}</think>{"name": "x", "age": 3}', 1, 1),
        ('{"name": "x", "age": 3.0}', 1, 1),  # a whole number, by the standard
        ('{"name": "x", "age": "3"}', 0, 1),
        ('{"name": "x", "age": -1}', 0, 1),
        ('{"name": "", "age": 1}', 0, 1),
        ('{"name": "x", "age": 3, "more": 1}', 0, 1),
        ('{"name": "x", "age": true}', 0, 1),
        ("[]", 0, 1),
        ('{"name": "x", "age": NaN}', 0, 0),
        ('{"name": "x", "name": "y", "age": 3}', 0, 0),
        ('{"name": "x", "age": 3}{"name": "x", "age": 3}', 0, 0),
        ("{'name': 'x', 'age': 3}", 0, 0),
        ('{"name": "x", "age": 3,}', 0, 0),
        ('{"name": "x", "age": ' + "9" * 5000 + "}", 0, 0),
        ('Sure: {"name": "x", "age": 3}', 0, 0),
    ],
)
def test_json_must_be_json_and_what_the_schema_allows(response: str, expected: int, is_json: int) -> None:
    scored = make_scorer(JsonSchemaRewardConfig(definition=SCHEMA)).call("p", response, None, {})
    assert scored == {"reward": float(expected), "json": float(is_json)}


def test_json_that_is_too_deep_is_refused_and_brackets_in_texts_do_not_count() -> None:
    anything = JsonSchemaRewardConfig(definition={})
    assert value(anything, "[" * 99 + "]" * 99) == 1.0
    assert value(anything, "[" * 101 + "]" * 101) == 0.0
    assert document_of(json.dumps("[" * 500 + '\\"')) == "[" * 500 + '\\"'


def test_a_rows_own_schema_comes_first_and_what_is_no_schema_is_an_error() -> None:
    config = JsonSchemaRewardConfig(definition={"type": "integer"})
    assert value(config, '"x"', None, {"schema": {"type": "string"}}) == 1.0
    assert value(config, '"x"', None, {"schema": '{"type": "string"}'}) == 1.0
    assert value(config, "3") == 1.0
    with pytest.raises(ValueError, match="not a JSON schema"):
        value(config, "3", None, {"schema": {"type": "strin"}})
    with pytest.raises(ValueError, match="has no schema"):
        value(JsonSchemaRewardConfig(), "3")
    with pytest.raises(ConfigError, match=r"reward\.definition: not a JSON schema"):
        make_scorer(JsonSchemaRewardConfig(definition={"type": 5}))
    with pytest.raises(Exception, match="Unresolvable"):  # nothing is fetched, and nothing is taken for valid
        value(JsonSchemaRewardConfig(definition={"$ref": "http://127.0.0.1:9/x.json"}), "3")


def test_diversity_is_what_a_response_does_not_share_with_its_group() -> None:
    call = make_scorer(DiversityRewardConfig(num_words=2)).call
    assert call("p", ["a b c", "a b c"], None, {}) == [0.0, 0.0]
    assert call("p", ["a b c", "d e f", ""], None, {}) == [1.0, 1.0, 0.0]
    assert call("p", ["a b c", "a b d"], None, {}) == [pytest.approx(2 / 3)] * 2
    assert call("p", ["alone"], None, {}) == [0.0]
    assert call("p", ["a", "A", "b"], None, {}) == [0.5, 0.5, 1.0]


@settings(max_examples=50, deadline=2000)
@given(st.lists(JUNK, min_size=1, max_size=6))
def test_diversity_lies_between_nothing_and_one_and_does_not_depend_on_the_order(responses: list[str]) -> None:
    call = make_scorer(DiversityRewardConfig()).call
    values = call("p", responses, None, {})
    assert all(0.0 <= item <= 1.0 for item in values)
    assert call("p", responses[::-1], None, {})[::-1] == pytest.approx(values)
    assert all(item == 0.0 for item, text in zip(values, responses, strict=True) if not text.split())


@settings(max_examples=200, deadline=1000)
@given(JUNK)
@example("\\boxed{\\{}")
@example("\\boxed{a\\}")
@example("\\\\boxed{a}")
def test_a_box_found_is_in_the_text_and_balanced(text: str) -> None:
    found = last_boxed(text)
    if found is not None:
        assert found in text
        assert last_boxed(f"\\boxed{{{found}}}") == found


def test_the_program_is_the_last_block_behind_the_thinking() -> None:
    two = "First:\n```python\na = 1\n```\nthen\n```py\nb = 2\n```\nand\n```bash\nls\n```"
    assert program_of(two, [], {}) == "b = 2\n"
    assert program_of("<think>```python\na\n```</think>x = 1", [], {}) == "x = 1"
    assert program_of("```\nc = 3\n```", [], {}) == "c = 3\n"
    assert program_of("```python\n \n```", [], {}) == ""
    assert program_of("So:\n```python\nd = 4\n", [], {}) == "d = 4\n"  # never closed
    row = {"entry_point": "f"}
    assert program_of("    return 1", "def f():\n", row) == "def f():\n    return 1"
    assert program_of("def f():\n    return 1", "def f():\n", row) == "def f():\n    return 1"
    early = "from __future__ import annotations\ndef f():\n    return 1"
    assert program_of(early, "import os\ndef f():\n", row) == early
    imports = "import os\nfrom typing import List\n\ndef f():\n"
    assert program_of("def f():\n    return 1", imports, row) == "import os\nfrom typing import List\ndef f():\n    return 1"
    assert program_of("    return 1", [{"role": "user"}], {**row, "code_prefix": "def f():\n"}) == "def f():\n    return 1"


def test_a_test_that_cannot_fit_into_the_time_limit_is_a_mistake_of_the_file() -> None:
    with pytest.raises(ConfigError, match=r"reward\.test_time_limit_s = 5.*reward\.time_limit_s = 10"):
        make_code(CodeRewardConfig(test_time_limit_s=5.0))
