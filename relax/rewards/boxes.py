"""Boxes in what models write and in what rows hold, and how well two sets of them agree."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_BOXES = 100  # that are paired; pairing takes their number's cube
MAX_CHARACTERS = 20_000  # of the response's end
_NUMBER = r"-?\d{1,9}(?:\.\d{1,20})?"
_COMMA = r"\s{0,8},\s{0,8}"
_POINT = rf"[\[(]\s{{0,8}}{_NUMBER}{_COMMA}{_NUMBER}\s{{0,8}}[\])]"
_CORNERS = rf"[\[(]\s{{0,8}}{_NUMBER}(?:{_COMMA}{_NUMBER}){{3}}\s{{0,8}}[\])]|{_POINT}\s{{0,8}},?\s{{0,8}}{_POINT}"
_BOX = re.compile(_CORNERS)
_NUMBERS = re.compile(_NUMBER)
# {"bbox_2d": [1, 2, 3, 4], "label": "cat"} as one; else <ref>cat</ref><box>(1,2),(3,4)</box>, and either without a label
_ITEM = re.compile(
    r"(?P<object>\{[^{}]{0,2000}\})"
    rf"|(?:(?:<ref>|<\|object_ref_start\|>)(?P<ref>[^<]{{1,200}})(?:</ref>|<\|object_ref_end\|>)\s{{0,8}})?"
    rf"(?:<box>|<\|box_start\|>)?\s{{0,8}}(?P<box>{_CORNERS})"
)
_LABEL = re.compile(r"""["']label["']\s{0,8}:\s{0,8}["']([^"']{1,200})["']""")
_KEYS = ("bbox_2d", "bbox", "box")


class Box(NamedTuple):
    """From the upper left corner to the lower right one; `label` in lower case, empty without one."""

    left: float
    top: float
    right: float
    bottom: float
    label: str = ""


def boxes_in(text: str) -> list[Box]:
    """The boxes that a text names, in its order: `[x1, y1, x2, y2]`, `(x1,y1),(x2,y2)`, each also in JSON objects with a label
    or between the tags of Qwen."""
    found: list[Box] = []
    for item in _ITEM.finditer(text[-MAX_CHARACTERS:]):
        if item["object"] is None:
            found.append(_read(item["box"], item["ref"] or ""))
        else:
            label = _LABEL.search(item["object"])
            found += [_read(box, label[1] if label else "") for box in _BOX.findall(item["object"])]
    return found


def boxes_of(answer: Any) -> list[Box]:
    """The row's boxes: four numbers, a table with them and a label, a list of either, or a text as a model would write it.

    Raises `ValueError` for anything else, and for a box without an area.
    """
    boxes = boxes_in(answer) if isinstance(answer, str) else _boxes_of(answer)
    if not boxes:
        raise ValueError('the row has no answer with boxes, and reward.type = "iou" needs them: see data.answer_key')
    for box in boxes:
        if not (box.left < box.right and box.top < box.bottom):
            raise ValueError(f"the row's box {list(box[:4])} has no area; it must be left, top, right, bottom")
    if len(boxes) > MAX_BOXES:
        raise ValueError(f"the row has {len(boxes)} boxes, and at most {MAX_BOXES} can be paired")
    return boxes


def _boxes_of(answer: Any) -> list[Box]:
    if isinstance(answer, Mapping):
        key = next((key for key in _KEYS if key in answer), None)
        if key is None:
            raise ValueError(
                f"the row's answer has a box without any of {', '.join(_KEYS)}: it has {', '.join(map(str, answer))}"
            )
        return [box._replace(label=_plain(str(answer.get("label") or ""))) for box in _boxes_of(answer[key])]
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise ValueError(f"the row's answer {str(answer)[:80]!r} is no box: four numbers, or a list of boxes")
    if len(answer) == 4 and all(isinstance(number, int | float) for number in answer):
        left, top, right, bottom = map(float, answer)
        return [Box(left, top, right, bottom)]
    return [box for item in answer for box in _boxes_of(item)]


def _read(text: str, label: str) -> Box:
    left, top, right, bottom = map(float, _NUMBERS.findall(text))
    return Box(left, top, right, bottom, _plain(label))


def _plain(label: str) -> str:
    return " ".join(label.split()).casefold()


def overlap(one: Box, other: Box) -> float:
    """Intersection over union, from 0.0 to 1.0; of a box without an area, 0.0."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box.right - box.left) * (box.bottom - box.top) for box in (one, other)]
    return width * height / (sum(areas) - width * height)


def best_sum(values: Sequence[Sequence[float]]) -> float:
    """The largest sum of entries of which no two share a row or a column (Kuhn 1955; the shortest paths of Jonker and Volgenant
    1987)."""
    if len(values) > len(values[0]):
        values = list(zip(*values, strict=True))
    num_columns = len(values[0])
    of_row, of_column = [0.0] * len(values), [0.0] * num_columns  # potentials: no cost is less than the two together
    row_in: list[int | None] = [None] * num_columns
    for start in range(len(values)):
        # the cheapest way from this row to a column that is free, over columns whose rows move on
        least, came_from, done = [float("inf")] * num_columns, [-1] * num_columns, [False] * num_columns
        row: int | None = start
        column, cost = -1, 0.0
        while row is not None:
            for other in range(num_columns):
                reduced = cost - values[row][other] - of_row[row] - of_column[other]
                if not done[other] and reduced < least[other]:
                    least[other], came_from[other] = reduced, column
            column = min((index for index in range(num_columns) if not done[index]), key=least.__getitem__)
            cost, row, done[column] = least[column], row_in[column], True
        of_row[start] += cost
        for other in range(num_columns):
            if done[other] and (moved := row_in[other]) is not None:
                of_row[moved] += cost - least[other]
                of_column[other] -= cost - least[other]
        while column != -1:
            before = came_from[column]
            row_in[column] = start if before == -1 else row_in[before]
            column = before
    return sum(values[row][column] for column, row in enumerate(row_in) if row is not None)
