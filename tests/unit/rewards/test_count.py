"""How many: which number of a response counts, and what it gets."""

from typing import Any

import pytest

from relax.config.media_reward import CountRewardConfig
from relax.rewards.count import last_number
from relax.rewards.table import make_scorer


def value(config: CountRewardConfig, response: str, answer: Any) -> float:
    return float(make_scorer(config).call("prompt", response, answer, {}))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("There are 3 cats and 4 dogs, so 7.", 7),
        ("**7** animals", 7),
        ("1,000 birds", 1000),
        ("1,2,3", 3),
        ("7.0", 7),
        ("-7", -7),
        ("2-7", None),
        ("2024-01-07", None),
        ("07.01.2024, 7/1/2024, 12:30", None),
        ("There were 7 on 2024-01-09.", 7),
        ("5 or 6", None),
        ("five or maybe six dogs", None),
        ("5 \u2013 6", None),
        ("from 5 cats to 6", None),
        ("6, or 6 to be exact", 6),
        ("4 dogs or cats, and 3 birds", 3),
        ("99999999999999999999", 99999999999999999999),
        ("There are Seven dogs.", 7),
        ("There are twenty of them, and this one.", 20),
        ("one", 1),
        ("zero", 0),
        ("five, in words; 5 in digits", 5),
        ("twenty-one", None),  # not one, and not twenty
        ("someone", None),
        ("the 5th", None),
        ("x7", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_count_gives_a_part_for_what_is_near() -> None:
    assert [value(CountRewardConfig(), text, 7) for text in ("7", "seven", "\\boxed{7} of 9", "8", "7.5", "none")] == [
        1,
        1,
        1,
        0,
        0,
        0,
    ]
    near = CountRewardConfig(tolerance=2)
    assert [value(near, str(number), "7") for number in (4, 5, 6, 7, 8, 9, 10)] == pytest.approx(
        [0, 1 / 3, 2 / 3, 1, 2 / 3, 1 / 3, 0]
    )
    assert value(near, "7.5", 7) == 0.0
    assert value(near, "9" * 5000, 7) == 0.0
    assert value(CountRewardConfig(), "99999999999999999998", 99999999999999999999) == 0.0
    assert value(near, "99999999999999999998", 99999999999999999999) == pytest.approx(2 / 3)
    assert value(CountRewardConfig(marker="Count:"), "Count: 7 (of 9 at most)", 9) == 0.0  # which of them?
    assert value(CountRewardConfig(marker="Count:"), "Count: 7, that is **7** dogs", 7) == 1.0
    assert value(CountRewardConfig(), "\\boxed{5 and 7}", 7) == 0.0
    assert value(CountRewardConfig(marker="Count:"), "of 9 at most. Count: 7", 7) == 1.0
    assert value(CountRewardConfig(), "<think>7</think>", 7) == 0.0
