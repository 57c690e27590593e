"""Where things are: boxes in the response against the row's, by intersection over union."""

from collections.abc import Callable, Mapping
from typing import Any

from relax.config.media_reward import Coordinates, IouRewardConfig
from relax.rewards.boxes import MAX_BOXES, Box, best_sum, boxes_in, boxes_of, overlap
from relax.rewards.table import text_said


def make_iou(config: IouRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], dict[str, float]]:
    """What the best pairs count, over the number of boxes of the response or of the row, whichever is larger. One too many is
    as bad as one too few. The part `has_box` says whether there was one."""

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> dict[str, float]:
        expected, size = right_boxes(config, answer, metadata)
        given = boxes_in(text_said(response, config.marker))
        if not given:
            return {"reward": 0.0, "has_box": 0.0}
        pairs = [[worth(_scaled(box, config.coordinates, size), other) for other in expected] for box in given[:MAX_BOXES]]
        return {"reward": best_sum(pairs) / max(len(given), len(expected)), "has_box": 1.0}

    def worth(one: Box, other: Box) -> float:
        if config.labels and one.label != other.label:
            return 0.0
        shared = overlap(one, other)
        return shared if config.score == "mean" else float(shared >= config.threshold)

    return score


def right_boxes(
    config: IouRewardConfig, answer: Any, metadata: Mapping[str, Any]
) -> tuple[list[Box], tuple[float, float] | None]:
    """The row's boxes, and the image's size where the two kinds of coordinates need it to be compared; both then as shares.

    Raises `ValueError` when the row lacks something.
    """
    boxes = boxes_of(answer)
    if config.labels and not all(box.label for box in boxes):
        raise ValueError("the row has a box without a label, and reward.labels = true compares them")
    theirs = config.answer_coordinates or config.coordinates
    if theirs == config.coordinates:
        return boxes, None
    size = _size(metadata, config.size_key) if "pixels" in (theirs, config.coordinates) else (1.0, 1.0)
    return [_scaled(box, theirs, size) for box in boxes], size


def _size(metadata: Mapping[str, Any], key: str) -> tuple[float, float]:
    size = metadata.get(key)
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(n, int | float) and n > 0 for n in size):
        raise ValueError(
            f"the row's {key} must be the image's width and height: pixels are compared with other coordinates "
            "(reward.size_key names the column)"
        )
    return float(size[0]), float(size[1])


def _scaled(box: Box, coordinates: Coordinates, size: tuple[float, float] | None) -> Box:
    """The box in shares of the image's sides; as it is where both kinds of coordinates are the same, since no ratio changes."""
    if size is None:
        return box
    width, height = size if coordinates == "pixels" else (1000.0, 1000.0) if coordinates == "thousand" else (1.0, 1.0)
    return Box(box.left / width, box.top / height, box.right / width, box.bottom / height, box.label)
