"""A verdict is read from replies of the form that was asked for, and from no other: no crash, no number out of garbage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.config.verdict import ChoiceVerdictConfig, JsonVerdictConfig, NumberVerdictConfig
from relax.rewards.verdict import NoVerdict, instruction, read_verdict

CHOICE, MARKED = ChoiceVerdictConfig(), ChoiceVerdictConfig(marker="Verdict:", scores={"A": 1.0, "tie": 0.5, "B": 0.0})
NUMBER, JSON = NumberVerdictConfig(), JsonVerdictConfig()
WORDS = JsonVerdictConfig(key="is_right", scores={"right": 1.0, "wrong": -1.0})


@pytest.mark.parametrize(
    ("config", "reply", "wanted"),
    [
        (CHOICE, "yes", 1.0),
        (CHOICE, "It adds up.\n\n**No.**\n ", 0.0),
        (CHOICE, "<think>no</think>YES", 1.0),
        (MARKED, "Verdict: B\nno, wait.\n**Verdict:** `tie`.\nThat is all.", 0.5),
        (NUMBER, "Score: 7", 0.7),
        (NUMBER, "**Score:** 7.5 / 10.", 0.75),
        (NUMBER, "Score: 3\nScore: 10", 1.0),
        (NumberVerdictConfig(low=-5, high=5, rescale=False), "Score: -2", -2.0),
        (NumberVerdictConfig(marker=""), "It is\n8", 0.8),
        (JSON, '{"why": "it is", "score": 0.25}', 0.25),
        (JSON, 'So:\n```json\n{"score": 1}\n```', 1.0),
        (WORDS, '{"is_right": "Wrong"}', -1.0),
    ],
)
def test_what_has_the_form_is_read(config, reply: str, wanted: float) -> None:
    assert read_verdict(config, reply) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("config", "reply"),
    [
        (CHOICE, ""),
        (CHOICE, "yes or no"),
        (CHOICE, 'I would say "yes"'),
        (CHOICE, "yes\nmaybe"),
        (CHOICE, "<think>it is\nyes"),
        (MARKED, "A"),
        (MARKED, "Verdict: A\nVerdict: C"),
        (MARKED, "Verdict:\nA"),
        (NUMBER, "Score: 11"),
        (NUMBER, "Score: -1"),
        (NUMBER, "Score: 7/5"),
        (NUMBER, "Score: .5"),
        (NUMBER, "Score: 7 or 8"),
        (NUMBER, "Score: 1e1"),
        (NUMBER, "Score: \u0667"),
        (NUMBER, "7"),
        (JSON, '{"score": true}'),
        (JSON, '{"score": "1"}'),
        (JSON, '{"score": 2}'),
        (JSON, '{"score": NaN}'),
        (JSON, '{"score": 1e999}'),
        (JSON, f'{{"score": 1{"0" * 400}}}'),
        (JSON, '{"score": 1, "score": 0}'),
        (JSON, "[1]"),
        (JSON, '{"value": 1}'),
        (WORDS, '{"is_right": 1}'),
        (WORDS, '{"is_right": "perhaps"}'),
    ],
)
def test_what_has_not_is_no_verdict(config, reply: str) -> None:
    with pytest.raises(NoVerdict):
        read_verdict(config, reply)


FORMS = st.sampled_from([CHOICE, MARKED, NUMBER, JSON, WORDS])
PIECES = st.sampled_from(
    ["yes", "no", "Score:", "Verdict:", "7", "11", "A", "\n", " ", "{", "}", '"score"', ":", "</think>", "`"]
)


@given(FORMS, st.text() | st.lists(PIECES, max_size=12).map("".join))
def test_no_reply_crashes_and_every_reward_is_one_of_the_form(config, reply: str) -> None:
    try:
        found = read_verdict(config, reply)
    except NoVerdict:
        return
    words = getattr(config, "scores", {})
    assert found in words.values() if words else 0.0 <= found <= 1.0


LETTERS = st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789 .,\n", min_size=1)


@given(LETTERS.filter(lambda text: not {"yes", "no"} & {line.strip(" .,") for line in text.splitlines()}))
def test_garbage_has_no_verdict(text: str) -> None:
    for config in (CHOICE, MARKED, NUMBER, JSON, WORDS):
        with pytest.raises(NoVerdict):
            read_verdict(config, text)


def test_the_judge_is_told_what_can_be_read() -> None:
    assert instruction(CHOICE) == "End your reply with yes or no alone on a line."
    assert instruction(MARKED) == 'End your reply with the line "Verdict: " and then A or tie or B.'
    assert "0 to 10" in instruction(NUMBER)
    assert '"score" holds a number from 0 to 1' in instruction(JSON)
    assert "one of right, wrong" in instruction(WORDS)
