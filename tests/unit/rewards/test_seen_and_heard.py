"""Rewards for transcripts, read text, boxes, counts and questions that several people answered."""

import time
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.config.media_reward import (
    CountRewardConfig,
    IouRewardConfig,
    OcrRewardConfig,
    VqaRewardConfig,
    WerRewardConfig,
)
from relax.config.reward import MultipleChoiceRewardConfig, RewardConfig, _One
from relax.rewards.boxes import Box, best_sum, boxes_in, overlap
from relax.rewards.edit_distance import edit_distance
from relax.rewards.row_check import fault_of
from relax.rewards.table import make_scorer
from relax.types import Prompt


def value(config: RewardConfig, response: str, answer: Any, **metadata: Any) -> float:
    raw = make_scorer(config).call("prompt", response, answer, metadata)
    return float(raw["reward"] if isinstance(raw, dict) else raw)


# -- edit distance --------------------------------------------------------------------------------------------------------
def by_the_table(one: str, other: str) -> int:
    """Wagner and Fischer (1974), entry by entry."""
    above = list(range(len(other) + 1))
    for row, item in enumerate(one, 1):
        entries = [row]
        for column, there in enumerate(other, 1):
            entries.append(min(above[column] + 1, entries[-1] + 1, above[column - 1] + (item != there)))
        above = entries
    return above[-1]


@settings(max_examples=200, deadline=1000)
@given(st.text("abc", max_size=30), st.text("abc", max_size=90))
def test_the_edit_distance_is_that_of_the_table(one: str, other: str) -> None:
    assert edit_distance(one, other) == by_the_table(one, other) == edit_distance(list(other), list(one))


# -- wer ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("the cat sat down", "the cat sat down", 1),
        ("The cat, sat down!", "the cat sat down", 1),
        ("the cat sat", "the cat sat down", 3 / 4),
        ("a the cat sat down", "the cat sat down", 3 / 4),
        ("down sat cat the", "the cat sat down", 0),
        ("the cat sat down and then it went away", "the cat sat down", 0),  # more errors than words
        ("don't", "Don\u2019t", 1),
        ("it costs 3.5 euros", "it costs 3.5 euros", 1),
        ("it costs 35 euros", "it costs 3.5 euros", 3 / 4),
        ("it costs three euros", "it costs 3 euros", 3 / 4),  # numbers are left as they are
        ("\uff54\uff48\uff45 cat", "the cat", 1),
        ("<think>a dog</think>the cat", "the cat", 1),
        ("the cat", ["a dog ran", "the cat"], 1),
        ("", "the cat", 0),
        ("?!", "the cat", 0),
    ],
)
def test_wer_is_one_less_the_errors_over_the_references_words(response: str, answer: Any, expected: float) -> None:
    assert value(WerRewardConfig(), response, answer) == pytest.approx(expected)


def test_wer_compares_characters_case_and_punctuation_if_it_is_told_to() -> None:
    characters = WerRewardConfig(unit="character")
    assert value(characters, "今天天气很好", "今天 天气好。") == pytest.approx(4 / 5)
    assert value(characters, "kitten", "sitting") == pytest.approx(1 - 3 / 7)
    strict = WerRewardConfig(ignore_case=False, ignore_punctuation=False)
    assert value(strict, "The cat", "the cat") == 0.5
    assert value(strict, "the cat.", "the cat") == 0.5
    assert value(strict, "?", "?") == 1.0
    assert value(WerRewardConfig(marker="Transcript:"), "I hear it. Transcript: the cat", "the cat") == 1.0
    assert value(WerRewardConfig(marker="Transcript:"), "the cat", "the cat") == 0.0


def test_long_transcripts_take_no_longer_than_they_must() -> None:
    text = "one two three four five " * 300  # 7,200 characters
    start = time.process_time()
    assert value(WerRewardConfig(unit="character"), text.replace("four", "for"), text) == pytest.approx(1 - 1 / 19)
    assert value(WerRewardConfig(), text * 10, text) == 0.0
    assert value(OcrRewardConfig(), text, text) == 1.0
    assert time.process_time() - start < 5.0


# -- ocr ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("University of  California\n", "university of california", 1),
        ("universty of california", "university of california", 1 - 1 / 24),
        ("univ", "university", 0),  # too far from it
        ("abcd", "abxd", 3 / 4),
        ("abcd", "abxy", 0),  # at the threshold
        ("42", ["17", "42"], 1),
        ("<think>17</think> 42", "42", 1),
        ("", "42", 0),
        ("42" * 1000, "42", 0),
    ],
)
def test_ocr_is_the_similarity_to_the_nearest_answer(response: str, answer: Any, expected: float) -> None:
    assert value(OcrRewardConfig(), response, answer) == pytest.approx(expected)


def test_ocr_has_a_threshold_and_may_keep_case() -> None:
    assert value(OcrRewardConfig(threshold=0.2), "abcd", "abxd") == 0.0
    assert value(OcrRewardConfig(threshold=1.0), "a", "abcd") == 0.25
    assert value(OcrRewardConfig(ignore_case=False), "ABcd", "abcd") == 0.0


# -- boxes ----------------------------------------------------------------------------------------------------------------
TWO = [[0, 0, 10, 10], [20, 20, 30, 30]]


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        ("[1, 2, 3, 4]", [Box(1, 2, 3, 4)]),
        ("It is at [1,2,3.5,4], and at (5, 6, 7, 8).", [Box(1, 2, 3.5, 4), Box(5, 6, 7, 8)]),
        ("[[1, 2, 3, 4], [5, 6, 7, 8]]", [Box(1, 2, 3, 4), Box(5, 6, 7, 8)]),
        ("<box>(1,2),(3,4)</box>", [Box(1, 2, 3, 4)]),
        ("<ref>a Cat</ref><box>(1,2),(3,4)</box>", [Box(1, 2, 3, 4, "a cat")]),
        (
            "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>, <|box_start|>(5,6),(7,8)<|box_end|>",
            [Box(1, 2, 3, 4, "cat"), Box(5, 6, 7, 8)],
        ),
        ("cat(1,2),(3,4)", [Box(1, 2, 3, 4)]),  # without the special tokens
        (
            '```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "cat"},\n{"label": "dog", "bbox_2d": [5, 6, 7, 8]}]\n```',
            [Box(1, 2, 3, 4, "cat"), Box(5, 6, 7, 8, "dog")],
        ),
        ('{"boxes": [{"box": [[1, 2], [3, 4]]}]}', [Box(1, 2, 3, 4)]),
        ("[1, 2, 3]", []),
        ("[1, 2, 3, 4, 5]", []),
        ("1, 2, 3, 4", []),
        ("(1,2)", []),
        ("[a, b, c, d]", []),
    ],
)
def test_boxes_are_found_in_the_forms_that_models_use(text: str, boxes: list[Box]) -> None:
    assert boxes_in(text) == boxes


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("[0, 0, 10, 10]", [0, 0, 10, 10], 1),
        ("[0, 0, 10, 5]", [0, 0, 10, 10], 0.5),
        ("[5, 0, 15, 10]", [0, 0, 10, 10], 1 / 3),
        ("[10, 0, 20, 10]", [0, 0, 10, 10], 0),
        ("[10, 10, 0, 0]", [0, 0, 10, 10], 0),  # the corners the wrong way round
        ("[0, 0, 10, 10]", TWO, 0.5),
        ("[20, 20, 30, 30] and [0, 0, 10, 10]", TWO, 1),
        ("[0, 0, 10, 10]" * 9 + "[20, 20, 30, 30]", TWO, 0.2),  # boxes at random do not pay
        ("[0,0,10,10][0,0,10,10]", [0, 0, 10, 10], 0.5),
        ("<think>[0, 0, 10, 10]</think> nowhere", [0, 0, 10, 10], 0),
        ("[0, 0, 10, 10]", "[[0, 0, 10, 10]]", 1),
        ("[0, 0, 10, 10]", '{"bbox_2d": [0, 0, 10, 10], "label": "cat"}', 1),
        ("[0, 0, 10, 10]", {"bbox": [0, 0, 10, 10]}, 1),
        ("", [0, 0, 10, 10], 0),
    ],
)
def test_iou_is_the_mean_overlap_of_the_best_pairs(response: str, answer: Any, expected: float) -> None:
    assert value(IouRewardConfig(), response, answer) == pytest.approx(expected)


def test_iou_counts_hits_and_compares_labels() -> None:
    hits = IouRewardConfig(score="hits", threshold=0.5)
    assert value(hits, "[0, 0, 10, 5]", [0, 0, 10, 10]) == 1.0
    assert value(hits, "[0, 0, 10, 4]", [0, 0, 10, 10]) == 0.0
    assert value(hits, "[0, 0, 10, 8] [21, 20, 30, 30] [40, 40, 50, 50]", TWO) == pytest.approx(2 / 3)
    labels = IouRewardConfig(labels=True)
    answer = [{"bbox_2d": TWO[0], "label": "Cat"}, {"bbox_2d": TWO[1], "label": "dog"}]
    assert value(labels, '[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}]', answer) == 0.5
    assert value(labels, '[{"bbox_2d": [0, 0, 10, 10], "label": "dog"}]', answer) == 0.0
    assert value(labels, "[0, 0, 10, 10]", answer) == 0.0


@pytest.mark.parametrize(
    ("ours", "theirs", "response"),
    [
        ("thousand", "pixels", "[0, 0, 500, 1000]"),
        ("unit", "pixels", "[0.0, 0.0, 0.5, 1.0]"),
        ("pixels", "pixels", "[0, 0, 100, 50]"),
        ("pixels", None, "[0, 0, 100, 50]"),
    ],
)
def test_boxes_of_other_coordinates_are_compared_by_the_images_size(ours: Any, theirs: Any, response: str) -> None:
    config = IouRewardConfig(coordinates=ours, answer_coordinates=theirs)
    assert value(config, response, [0, 0, 100, 50], image_size=[200, 50]) == pytest.approx(1.0)


def test_shares_and_thousandths_need_no_size() -> None:
    config = IouRewardConfig(coordinates="thousand", answer_coordinates="unit")
    assert value(config, "[0, 0, 500, 1000]", [0, 0, 0.5, 1.0]) == pytest.approx(1.0)


@settings(max_examples=100, deadline=1000)
@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_the_best_pairs_are_found(num_rows: int, num_columns: int, data: st.DataObject) -> None:
    entry = st.sampled_from([0.0, 0.25, 0.5, 0.7, 1.0])
    values = [[data.draw(entry) for _ in range(num_columns)] for _ in range(num_rows)]
    table = values if num_rows <= num_columns else list(zip(*values, strict=True))
    ways = permutations(range(len(table[0])), len(table))
    assert best_sum(values) == pytest.approx(max(sum(map(list.__getitem__, map(list, table), way)) for way in ways))


@settings(max_examples=100, deadline=1000)
@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=2, max_size=2))
def test_an_overlap_is_a_share_and_the_same_both_ways(corners: list[tuple[int, int, int, int]]) -> None:
    one, other = (Box(x, y, x + width + 1, y + height + 1) for x, y, width, height in corners)
    assert 0.0 <= overlap(one, other) == overlap(other, one) <= 1.0
    assert (overlap(one, other) == 1.0) is (one == other)


def test_a_hundred_boxes_are_paired_in_time() -> None:
    text = " ".join(f"[{x}, {y}, {x + 5}, {y + 5}]" for x in range(0, 100, 3) for y in range(0, 30, 3))
    boxes = [[x, y, x + 4, y + 6] for x in range(0, 100, 5) for y in range(0, 25, 5)]
    start = time.process_time()
    assert 0.0 < value(IouRewardConfig(), text, boxes) < 1.0
    assert time.process_time() - start < 5.0


# -- vqa ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("num_same", "expected"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_vqa_is_the_accuracy_of_ten_annotators(num_same: int, expected: float) -> None:
    answers = ["Two dogs"] * num_same + [f"other {number}" for number in range(10 - num_same)]
    assert value(VqaRewardConfig(), "the 2 dogs.", answers) == pytest.approx(expected)
    assert value(VqaRewardConfig(), "two dogs", [{"answer": text, "answer_id": 1} for text in answers]) == pytest.approx(
        expected
    )


def test_vqa_gives_nothing_for_silence_that_annotators_share() -> None:
    assert value(VqaRewardConfig(), "", [""] * 9 + ["x"]) == 0.0
    assert value(VqaRewardConfig(marker="Answer:"), "yes", ["yes"] * 10) == 0.0
    assert value(VqaRewardConfig(marker="Answer:"), "Answer: Yes!", ["yes"] * 10) == 1.0


# -- multiple choice of videos --------------------------------------------------------------------------------------------
def test_options_may_stand_in_columns_of_their_own() -> None:
    """As in NExT-QA: `a0` to `a4`, and the answer's number."""
    config = MultipleChoiceRewardConfig(choices_key=("a0", "a1", "a2", "a3", "a4"))
    row = {"a0": "run", "a1": "sleep", "a2": "eat", "a3": "play", "a4": "swim", "video": "1.mp4", "type": "CW"}
    for answer in (3, "3", "D", "play"):
        assert [value(config, f"Answer: {letter}", answer, **row) for letter in "ABCDE"] == [0, 0, 0, 1, 0]
    assert value(config, "play", 3, **row) == 1.0
    assert value(config, "B", 1, **row | {"a3": "", "a4": None}) == 1.0
    assert value(config, "E", 1, **row | {"a3": "", "a4": None}) == 0.0
    assert value(MultipleChoiceRewardConfig(), "C", "2", choices=["2", "4", "6"]) == 0.0  # the text of an option comes first
    with pytest.raises(ValueError, match="no column 'a1', and options in later ones"):
        value(config, "A", 0, **row | {"a1": None})


# -- junk that looks like answers ------------------------------------------------------------------------------------------
PIECES = [
    "[",
    "]",
    "(",
    ")",
    "{",
    "}",
    ",",
    ", ",
    "1",
    "23",
    "4.5",
    "-",
    " ",
    '"bbox_2d":',
    '"label": "cat"',
    "<box>",
    "</box>",
]
PIECES += ["<ref>", "</ref>", "one", "two", "the cat", "Answer:", "\\boxed{", "</think>", ".", "\n"]
SCORED: list[tuple[RewardConfig, Any]] = [
    (WerRewardConfig(), "a dog ran over there"),
    (WerRewardConfig(unit="character"), "a dog ran over there"),
    (OcrRewardConfig(), "a dog ran over there"),
    (IouRewardConfig(), [[100, 100, 200, 200], [7, 7, 9, 9]]),
    (IouRewardConfig(labels=True, score="hits", threshold=0.1), {"bbox": [100, 100, 200, 200], "label": "dog"}),
    (CountRewardConfig(), 77),
    (VqaRewardConfig(), ["a dog"] * 10),
]
SCORERS = [(make_scorer(config).call, answer) for config, answer in SCORED]


@settings(max_examples=150, deadline=2000)
@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
def test_what_only_looks_like_an_answer_is_never_right(text: str) -> None:
    for call, answer in SCORERS:
        raw = call("prompt", text, answer, {})
        assert 0.0 <= (raw["reward"] if isinstance(raw, dict) else raw) < 0.5


@pytest.mark.parametrize("piece", ["[1,2,3,", "(1,2)", "[1,2,3,4]", '{"label":"a",', "<ref>", "<box>(", "one ", "-1,", "a'"])
def test_repeated_pieces_end_at_once(piece: str) -> None:
    start = time.process_time()
    for call, answer in SCORERS:
        raw = call("prompt", piece * 20_000, answer, {})
        assert 0.0 <= (raw["reward"] if isinstance(raw, dict) else raw) < 0.5
    assert time.process_time() - start < 5.0


# -- rows -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("reward", "answer", "metadata", "words"),
    [
        ({"type": "wer"}, None, {}, "needs an answer"),
        ({"type": "wer"}, ["the cat", "..."], {}, "nothing but punctuation"),
        ({"type": "wer"}, "the cat", {}, None),
        ({"type": "wer"}, {"text": "the cat"}, {}, "in the row's answer is a dict"),
        ({"type": "ocr"}, None, {}, "needs an answer"),
        ({"type": "ocr"}, {"text": "42"}, {}, "needs a text or a list of texts"),
        ({"type": "ocr"}, ["42", ["43"]], {}, "in the row's answer is a list"),
        ({"type": "ocr"}, 7.5, {}, "in the row's answer is a float"),  # 7.50?
        ({"type": "ocr"}, True, {}, "in the row's answer is a bool"),
        ({"type": "ocr"}, [42, "forty-two"], {}, None),
        ({"type": "iou"}, None, {}, "is no box"),
        ({"type": "iou"}, [], {}, "no answer with boxes"),
        ({"type": "iou"}, "nowhere", {}, "no answer with boxes"),
        ({"type": "iou"}, [3, 2, 1, 4], {}, "has no area"),
        ({"type": "iou"}, [1, 2, 3], {}, "is no box"),
        ({"type": "iou"}, {"where": [1, 2, 3, 4]}, {}, "without any of bbox_2d, bbox, box: it has where"),
        ({"type": "iou"}, [[0, 0, 1, 1]] * 101, {}, "at most 100"),
        ({"type": "iou", "labels": True}, [1, 2, 3, 4], {}, "box without a label"),
        ({"type": "iou", "coordinates": "unit", "answer_coordinates": "pixels"}, [1, 2, 3, 4], {}, "image_size must be"),
        ({"type": "iou", "coordinates": "unit", "answer_coordinates": "pixels"}, [1, 2, 3, 4], {"image_size": [9, 9]}, None),
        ({"type": "iou"}, [1, 2, 3, 4], {}, None),
        ({"type": "count"}, "many", {}, "not a number of things"),
        ({"type": "count"}, "2024-01-07", {}, "not a number of things"),
        ({"type": "count"}, -1, {}, "not a number of things"),
        ({"type": "count"}, 0, {}, None),
        ({"type": "vqa"}, "yes", {}, "has 0 answers"),
        ({"type": "vqa"}, ["yes"] * 3, {}, "has 3 answers"),
        ({"type": "vqa"}, ["yes"] * 4, {}, None),
        ({"type": "multiple_choice", "choices_key": ["a0", "a1"]}, 1, {"a0": "x", "a1": "y"}, None),
        ({"type": "multiple_choice", "choices_key": ["a0", "a1"]}, 2, {"a0": "x", "a1": "y"}, "option number 2"),
    ],
)
def test_what_a_row_lacks(reward: dict[str, Any], answer: Any, metadata: dict[str, Any], words: str | None) -> None:
    config: RewardConfig = _One.model_validate({"reward": reward}).reward
    found = fault_of(config, Prompt("p", text="x", answer=answer, metadata=metadata))
    assert found is None if words is None else words in str(found)
