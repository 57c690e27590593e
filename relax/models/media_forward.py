"""What trainer and engine ask of a model that sees or hears, beside what they ask of one that reads."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy as np
from torch import Tensor

from relax.models.causal_lm import Attend, FlatForward
from relax.models.omni_lm import Features

Ids: TypeAlias = Sequence[int] | np.ndarray[Any, Any]


class MediaForward(FlatForward, Protocol):
    """A `FlatForward` on prompts with images, sounds or videos. What its encoders give is looked into by itself alone.

    `hears_throughout`: tokens after a prompt attend to its media too, which have no places among the prompt's own tokens.
    """

    hears_throughout: bool

    def encode_prompt(self, ids: Ids, features: Features) -> Any:
        """What encoders make of one prompt's media. Raises `ModelError` where it does not fit the prompt."""
        ...

    def join(self, parts: Sequence[tuple[Any, int]]) -> Any:
        """What is `encoded` for token sequences that lie end to end: of each, what `encode_prompt` gave (or None), and how many
        tokens it has."""
        ...

    def encode_packed(self, prompts: Sequence[tuple[Features | None, int]]) -> Any:
        """What is `encoded` for prompts that lie end to end, each with the features of its media, if any, and its number of
        tokens, those after it included. With a graph where gradients are enabled."""
        ...

    def touch(self, seen: Any = None) -> Tensor:
        """Zero, through every encoder that `seen`, which is `encoded` for a micro-batch, did not come from."""
        ...

    def positions(self, ids: Ids, features: Features | None) -> tuple[Tensor, float]:
        """`[3, P]` float32 on the host, and what the place of a token after the prompt has to be raised by."""
        ...

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, encoded: Any = None) -> Tensor:
        """`ids [T]`, `positions [3, T]` (or `[T]` for text) -> `[T, d]`, after the final norm."""
        ...


def reads_media(forward: FlatForward | None) -> TypeGuard[MediaForward]:
    """Whether it is of a model that reads more than text. Its parts are not asked for: one that says numbers has no head."""
    return hasattr(forward, "encode_packed")
