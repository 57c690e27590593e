"""`[reward.verdict]`: how a judge's reply becomes a number. What is not of this form is no verdict, and never a zero."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax.config.base import Section


class ChoiceVerdictConfig(Section):
    """One of several words, on a line with nothing else."""

    type: Literal["choice"] = "choice"
    """Kind of verdict."""
    scores: dict[str, float] = {"yes": 1.0, "no": 0.0}
    """The reward of each word; words are compared without case."""
    marker: str = ""
    """The word is what follows this text's last occurrence, on the same line; empty: the reply's last line."""

    @model_validator(mode="after")
    def _tell_words_apart(self) -> "ChoiceVerdictConfig":
        words = {word.strip(" \t*_`'\"()[].,:;!").casefold() for word in self.scores}
        if len(words) < max(2, len(self.scores)) or "" in words:
            raise ValueError(
                f"reward.verdict.scores = {self.scores}: it needs at least two words that differ without punctuation"
            )
        return self


class NumberVerdictConfig(Section):
    """A number, on a line with nothing else; `7/10` is read as 7 where `high` is 10."""

    type: Literal["number"] = "number"
    """Kind of verdict."""
    marker: str = "Score:"
    """The number is what follows this text's last occurrence, on the same line; empty: the reply's last line."""
    low: float = 0.0
    """Lowest number; a lower one is no verdict."""
    high: float = 10.0
    """Highest number; a higher one is no verdict."""
    rescale: bool = True
    """Make a reward from 0 to 1 of it."""

    @model_validator(mode="after")
    def _order(self) -> "NumberVerdictConfig":
        _check_range(self.low, self.high)
        return self


class JsonVerdictConfig(Section):
    """A value in a JSON object, which is the whole reply or its last fenced block."""

    type: Literal["json"] = "json"
    """Kind of verdict."""
    key: str = "score"
    """The object's key with a number from `low` to `high`, or with one of the words in `scores`."""
    low: float = 0.0
    """Lowest number; a lower one is no verdict."""
    high: float = 1.0
    """Highest number; a higher one is no verdict."""
    rescale: bool = True
    """Make a reward from 0 to 1 of a number."""
    scores: dict[str, float] = {}
    """The reward of each word; when there are any, numbers are no verdicts."""

    @model_validator(mode="after")
    def _order(self) -> "JsonVerdictConfig":
        _check_range(self.low, self.high)
        return self


def _check_range(low: float, high: float) -> None:
    if low >= high:
        raise ValueError(f"reward.verdict.low = {low:g} is not below reward.verdict.high = {high:g}")


VerdictConfig = Annotated[ChoiceVerdictConfig | NumberVerdictConfig | JsonVerdictConfig, Field(discriminator="type")]
