"""What scoring one response gives, and how a reward function's return value becomes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from relax.errors import RewardError
from relax.types import Outcome

LARGEST_REWARD = 3.0e38  # rewards travel as float32


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The reward of one response. `value` is None and `error` says why when `outcome` is `REWARD_ERROR`; else it is `OK`.

    >>> RewardResult(0.5, {"format": 1.0, "answer": 0.0})
    RewardResult(value=0.5, parts={'format': 1.0, 'answer': 0.0}, outcome=<Outcome.OK: 'ok'>, error=None)
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome = Outcome.OK
    error: str | None = None

    @staticmethod
    def failed(error: str) -> "RewardResult":
        """A response that could not be scored. It is never counted as a zero."""
        return RewardResult(None, {}, Outcome.REWARD_ERROR, error)


def read_return_value(raw: Any) -> tuple[float, dict[str, float]]:
    """The reward and its parts from what a reward function returned for one response.

    A finite number (bool, int, float, a numpy or torch scalar), or `{"reward": number, "name of a part": number, ...}`.
    Raises `RewardError` for anything else.
    """
    if not isinstance(raw, Mapping):
        return _read_number(raw, "the reward"), {}
    if "reward" not in raw:
        raise RewardError(f"the reward function returned a dict without the key 'reward': it has {sorted(map(str, raw))}")
    parts = {str(name): _read_number(value, f"the part {name!r}") for name, value in raw.items() if name != "reward"}
    return _read_number(raw["reward"], "the reward"), parts


def _read_number(raw: Any, what: str) -> float:
    if not isinstance(raw, Real) and getattr(raw, "ndim", None) == 0 and hasattr(raw, "item"):
        raw = raw.item()  # a zero-dimensional array or tensor
    if not isinstance(raw, Real):
        shown = repr(raw)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise RewardError(f"{what} must be a number, and is {type(raw).__name__}: {shown}")
    try:
        value = float(raw)
    except OverflowError:
        value = float("inf")
    if not abs(value) <= LARGEST_REWARD:
        raise RewardError(f"{what} must be a finite number, and is {value}")
    return value
