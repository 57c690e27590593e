"""Rewards for what is seen and heard: transcripts, boxes, counts, read text, questions that many people answered."""

from typing import Literal

from pydantic import Field

from relax.config.reward_section import RewardSection

Coordinates = Literal["pixels", "thousand", "unit"]


class WerRewardConfig(RewardSection):
    """1 less the error rate of a transcript, at best of several references: edits over the reference's length."""

    type: Literal["wer"] = "wer"
    """Name of the reward."""
    unit: Literal["word", "character"] = "word"
    """What is compared; `character` leaves white space out, for writing without spaces between words."""
    ignore_case: bool = True
    """Compare without case."""
    ignore_punctuation: bool = True
    """Compare without punctuation and symbols, except inside numbers; numbers are never spelled out."""
    marker: str = ""
    """The transcript is what follows the last occurrence of this text; empty: what follows `</think>`, or all of it."""


class OcrRewardConfig(RewardSection):
    """How alike the response and the row's answer (the best of several) are: ANLS, as in DocVQA."""

    type: Literal["ocr"] = "ocr"
    """Name of the reward."""
    threshold: float = Field(0.5, gt=0, le=1)
    """From this edit distance on, as a share of the longer text, the reward is 0."""
    ignore_case: bool = True
    """Compare without case."""
    marker: str = ""
    """The answer is what follows the last occurrence of this text; empty: what follows `</think>`, or all of it."""


class IouRewardConfig(RewardSection):
    """How well boxes in the response cover the row's: the overlap of the best pairs, over the number of boxes."""

    type: Literal["iou"] = "iou"
    """Name of the reward."""
    score: Literal["mean", "hits"] = "mean"
    """What a pair counts: its overlap, or 1 where that reaches `threshold`."""
    threshold: float = Field(0.5, gt=0, le=1)
    """Overlap (intersection over union) of a hit."""
    labels: bool = False
    """Whether a pair counts only if both boxes have the same label, case aside."""
    coordinates: Coordinates = "pixels"
    """What the response's numbers are: pixels, thousandths of the image's sides, or shares of them."""
    answer_coordinates: Coordinates | None = None
    """What the row's numbers are; unset: the same as the response's."""
    size_key: str = "image_size"
    """The row's column with the image's width and height, needed where one side is in pixels and the other is not."""
    marker: str = ""
    """Boxes are looked for behind the last occurrence of this text; empty: behind `</think>`, or everywhere."""


class CountRewardConfig(RewardSection):
    """1 when the number in the response's last box, or behind the marker, or its last number, is the row's; less when near."""

    type: Literal["count"] = "count"
    """Name of the reward."""
    tolerance: int = Field(0, ge=0)
    """Numbers off by so many at most get a part: 1 less the difference over `tolerance + 1`."""
    marker: str = ""
    """The number, which is the only one there, is behind the last occurrence of this text; empty: the last one counts."""


class VqaRewardConfig(RewardSection):
    """The share of annotators who agree, as in VQA: a third of it for each, at most 1, averaged over all but one of them."""

    type: Literal["vqa"] = "vqa"
    """Name of the reward."""
    marker: str = ""
    """The answer is what follows the last occurrence of this text; empty: what follows `</think>`, or all of it."""
