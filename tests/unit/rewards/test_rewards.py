"""Each reward by itself: right answers score, junk never does, and a row without an answer is an error and not a zero."""

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relax.config.data import ReasoningGymDataConfig
from relax.config.reward import (
    ExactRewardConfig,
    FormatRewardConfig,
    MathRewardConfig,
    ReasoningGymRewardConfig,
    RewardConfig,
)
from relax.data.prompts import open_prompts
from relax.errors import RewardError
from relax.rewards.boxed import last_boxed
from relax.rewards.pool import RewardPool
from relax.rewards.table import COMBINED, REWARDS, make_scorer
from relax.rewards.worker import describe
from relax.types import Prompt

MATH = make_scorer(MathRewardConfig())
# Junk: no digits, so that it can hold no number; braces, dollars and backslashes, so that parsers are led astray.
JUNK = st.text(st.sampled_from("abcxyz \n\t{}()[]$\\^_.,;:!?<>=+-*/%&|'\"#~éßπ∞文😀\u200b\u202e\x00"), max_size=60)


def score(config: RewardConfig, response: str, answer: Any, metadata: dict[str, Any] | None = None) -> float:
    scorer = MATH if isinstance(config, MathRewardConfig) else make_scorer(config)
    return float(scorer.call("prompt", response, answer, metadata or {}))


def test_every_reward_type_has_a_line_in_the_table() -> None:
    types = {member.model_fields["type"].default for member in RewardConfig.__args__[0].__args__}
    assert types == set(REWARDS) | set(COMBINED)
    assert not set(REWARDS) & set(COMBINED)


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("\\boxed{1/2}", "0.5", 1),
        ("first \\boxed{\\frac{1}{2}}, or rather \\boxed{3}", "3", 1),
        ("first \\boxed{3}, or rather \\boxed{4}", "3", 0),
        ("\\boxed{3} and then 4", 4, 0),  # what is boxed counts
        ("so the answer is 42.", "42", 1),
        ("1, 2, 3", 3, 1),
        ("1, 2, 3", 1, 0),
        ("$\\frac{\\sqrt{8}}{2}$", "\\sqrt{2}", 1),
        ("\\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
        ("12,345", "12345", 1),
        ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}", 1),
        ("\\boxed{(1, 2)}", "(1,2)", 1),
        ("\\boxed{(2, 1)}", "(1,2)", 0),
        ("\\boxed{50\\%}", "50%", 1),
        ("\\boxed{Blue}", "blue", 1),
        ("blue", "Blue.", 1),
        ("red", "blue", 0),
        ("\\boxed{5}", "$\\boxed{5}$", 1),
        ("\\boxed{}", "5", 0),
        ("\\boxed{5", "5", 0),
        ("\\boxed{\\text{5}", "5", 0),
        ("", "5", 0),
        ("\\boxed{10^{100}}", 10**100, 1),
        ("\\fbox{7}", "7", 1),
        ("-3", "3", 0),
        # units, degrees, money, percent
        ("\\boxed{5\\text{ cm}}", "5", 1),
        ("\\boxed{5 \\text{ km/h}}", "5", 1),
        ("\\boxed{90°}", "90", 1),
        ("\\boxed{90^\\circ}", "90°", 1),
        ("\\boxed{\\$5}", "5", 1),
        ("\\boxed{50\\%}", "0.5", 1),
        ("\\boxed{5\\text{ cm}}", "6", 0),
        # thousands, mixed numbers, forms of fractions
        ("\\boxed{1{,}000}", "1000", 1),
        ("\\boxed{1\\,000}", "1000", 1),
        ("\\boxed{1,5}", "15", 0),
        ("\\boxed{2\\frac{1}{2}}", "2.5", 1),
        ("\\boxed{\\dfrac12}", "0.5", 1),
        ("\\boxed{0.33}", "1/3", 0),
        ("\\boxed{0.333333}", "1/3", 1),  # six digits are enough
        ("\\boxed{5.0000001}", "5", 0),
        # intervals and unions
        ("\\boxed{[1, 2)}", "[1,2)", 1),
        ("\\boxed{(1, 2]}", "[1,2)", 0),
        ("\\boxed{[1, 2]}", "[1,2)", 0),
        ("\\boxed{(1, 2)}", "[1,2]", 0),
        ("\\boxed{(5,\\infty)\\cup(-\\infty,3)}", "(-\\infty,3)\\cup(5,\\infty)", 1),
        ("\\boxed{(-\\infty,3)}", "(-\\infty,3]", 0),
        ("\\boxed{x \\in [1,2]}", "[1,2]", 1),
        # sets and tuples
        ("\\boxed{\\{3, 2, 1\\}}", "\\{1,2,3\\}", 1),
        ("\\boxed{\\{1, 2\\}}", "\\{1,2,3\\}", 0),
        ("\\boxed{\\emptyset}", "\\emptyset", 1),
        ("\\boxed{(1, \\frac{4}{2}, 3)}", "(1,2,3)", 1),
        ("\\boxed{(1, 3, 2)}", "(1,2,3)", 0),
        ("\\boxed{(1, 2)}", "(1,2,3)", 0),
        # matrices
        ("\\boxed{\\begin{bmatrix}2/2&2\\\\3&4\\end{bmatrix}}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", 1),
        ("\\boxed{\\begin{bmatrix}1&3\\\\2&4\\end{bmatrix}}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", 0),
        # what only looks like an answer
        ("\\boxed{\\infty}", "5", 0),
        ("\\boxed{1/0}", "5", 0),
        ("\\boxed{x}", "y", 0),
        ("\\boxed{1 2}", "12", 0),
        ("\\boxed{5=5}", "7", 0),
        ("\\boxed{?}", "5", 0),
        ("\\boxed{5 or 6}", "5", 0),
        # relations are no numbers
        ("\\boxed{\\neq 5}", "5", 0),
        ("\\boxed{\\ne5}", "5", 0),
        ("\\boxed{\\not= 5}", "5", 0),
        ("\\boxed{\\not< 5}", "5", 0),
        ("\\boxed{!= 5}", "5", 0),
        ("\\boxed{≠ 5}", "5", 0),
        ("\\boxed{< 5}", "5", 0),
        ("\\boxed{≥ 5}", "5", 0),
        ("\\boxed{\\leq 5}", "5", 0),
        ("\\boxed{> \\pi}", "\\pi", 0),
        ("It is $\\neq 5$.", "5", 0),
        ("\\boxed{< 5}", "<5", 1),
        ("\\boxed{\\ge 5}", "x \\geq 5", 1),
        ("\\boxed{5 < x}", "x > 5", 1),
        ("\\boxed{n! = 120}", "120", 1),
        # what cannot be computed is no answer, and what is left of it is none either
        ("5^{100000}", "5", 0),
        ("5^{100\\,000}", "5", 0),
        ("\\boxed{5^{123456}}", "5", 0),
        ("\\boxed{100000! + 5}", "5", 0),
        ("\\boxed{12345!5}", "5", 0),
        ("100000! + 5", "5", 0),
        ("2 + 3 = 5, and the answer is\n$$5^{100000}$$", "5", 0),
        ("\\boxed{5^{100000}}", "5^{100000}", 1),
        ("Since $2^{100000}$ is even, the answer is $5$.", "5", 1),
        ("2^{100000} is even.\nThe answer is 5.", "5", 1),
    ],
)
def test_math_compares_answers_as_mathematics(response: str, answer: Any, expected: int) -> None:
    assert score(MathRewardConfig(), response, answer) == expected


@pytest.mark.slow
async def test_math_works_in_a_worker_where_what_hangs_is_killed() -> None:
    pool = RewardPool(MathRewardConfig(time_limit_s=1.0))
    await pool.start()
    try:
        endless = "\\boxed{9999^9999 ^ x + 9999^{999} / 99999^{9999}}"
        results = await pool.score(Prompt("p", text="1+1", answer="2"), ["\\boxed{2}", "4/2", "3", "\\boxed{" * 2000, endless])
        assert [result.value for result in results[:4]] == [1.0, 1.0, 0.0, 0.0]
        assert results[4].value in (0.0, None)
    finally:
        await pool.close()


def test_the_last_box_is_found_whatever_is_in_it() -> None:
    assert last_boxed("\\boxed{a{b{c}d}e} x \\boxed{1}") == "1"
    assert last_boxed("\\boxed{a{b{c}d}e} x \\boxed{1") == "a{b{c}d}e"
    assert last_boxed("\\boxed{\\{1\\}}") == "\\{1\\}"
    assert last_boxed("none") is None


@settings(max_examples=80, deadline=5000, derandomize=True)
@given(response=JUNK)
@example("")
@example("\\boxed{\\boxed{\\boxed{}}}")
@example("$$")
@example("\\frac{}{}")
@example("{" * 500)
@example("9" * 2000)
@example("9^9^9^9^9")
@example("2^{10^{10}}")
@example("2**999999999")
@example("\\boxed{123456789!}")
@example("(" * 200 + ")" * 200)
def test_math_gives_junk_no_reward_and_does_not_fall_over(response: str) -> None:
    assert score(MathRewardConfig(), response, "17") == 0.0


@settings(max_examples=100, deadline=1000)
@given(response=JUNK)
def test_exact_and_format_give_junk_no_reward(response: str) -> None:
    assert score(ExactRewardConfig(marker="="), response, "17") == 0.0
    assert score(ExactRewardConfig(), response, "17") == 0.0
    assert score(FormatRewardConfig(pattern=r"<think>.*</think>\s*\d+"), response, None) == 0.0


def test_exact_takes_what_follows_the_last_marker() -> None:
    marked = ExactRewardConfig(marker="=")
    assert score(marked, "71;51;30=357", "357") == 1.0
    assert score(marked, "1=2 = 357 \n", 357) == 1.0
    assert score(marked, "357", "357") == 0.0
    assert score(marked, "357=", "357") == 0.0
    assert score(marked, "=357.", "357") == 0.0
    assert score(ExactRewardConfig(), " yes ", "yes") == 1.0
    assert score(ExactRewardConfig(), "YES", "yes") == 0.0
    assert score(ExactRewardConfig(ignore_case=True), "YES", "yes") == 1.0


def test_format_must_match_the_whole_response() -> None:
    config = FormatRewardConfig(pattern=r"<think>.*</think>\s*\d+")
    assert score(config, "<think>a\nb</think>\n5", None) == 1.0
    assert score(config, "<think>a</think> 5 and more", None) == 0.0


@pytest.mark.parametrize("config", [MathRewardConfig(), ExactRewardConfig()])
@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_row_without_an_answer_is_not_a_wrong_response(config: RewardConfig, answer: Any) -> None:
    with pytest.raises(ValueError, match=r"the row has no answer.*data\.answer_key"):
        score(config, "5", answer)


@pytest.mark.parametrize(
    "task", ["chain_sum", "prime_factorization", "rearc", "countdown", "boxnet", "spell_backward", "mini_sudoku"]
)
def test_reasoning_gyms_verifiers_work_on_rows_that_have_travelled(task: str) -> None:
    row = open_prompts(ReasoningGymDataConfig(task=task, size=2), seed=0).row(1)
    metadata = json.loads(json.dumps(row.metadata))
    plain, marked = ReasoningGymRewardConfig(), ReasoningGymRewardConfig(marker="Answer:")
    if row.answer is not None:
        assert score(plain, row.answer, row.answer, metadata) == 1.0
        assert score(marked, f"I think so. Answer: {row.answer}", row.answer, metadata) == 1.0
    for junk in ("", "   ", "no number at all", "]]](((", "0", "\\boxed{}", "null"):
        assert score(plain, junk, row.answer, metadata) < 0.5
        assert score(marked, junk, row.answer, metadata) == 0.0


@settings(max_examples=60, deadline=2000)
@given(response=JUNK)
def test_reasoning_gym_gives_junk_little_reward(response: str) -> None:
    entry = {"question": "x", "answer": "17", "metadata": {}}
    metadata = {"task": "chain_sum", "options": {}, "entry": entry}
    assert score(ReasoningGymRewardConfig(), response, "17", metadata) < 0.5


def test_reasoning_gym_needs_its_own_rows() -> None:
    with pytest.raises(ValueError, match="has no verifier"):
        score(ReasoningGymRewardConfig(), "5", "5", {})


def test_an_error_in_a_users_function_is_placed_and_one_of_relax_is_not() -> None:
    def failed(error: Exception) -> str:
        try:
            raise error
        except (KeyError, RewardError) as raised:
            return describe(raised)

    assert re.fullmatch(r"KeyError: 'x' \(test_rewards\.py, line \d+, in failed\)", failed(KeyError("x")))
    assert failed(RewardError("no verdict")) == "RewardError: no verdict"
