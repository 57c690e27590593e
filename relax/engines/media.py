"""What images, sounds and videos add to a prompt's first pass: embeddings, and positions that do not count tokens. Sounds that
tokens attend to are there in later passes, too."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relax.models.media_forward import MediaForward
from relax.types import GenerateRequest


class PromptMedia:
    """The media of one prompt: encoded once for all its seeds, and again when weights have changed.

    `positions [3, P]` of the prompt's tokens; token `t` after them stands at `t + delta`.
    """

    def __init__(self, positions: Tensor, delta: float) -> None:
        self.positions, self.delta = positions, delta
        self.encoded: Any = None
        self.heard: Any = None  # by tokens after the prompt, if they hear it
        self._load = -1

    def see(self, forward: MediaForward, request: GenerateRequest, load: int) -> None:
        """Runs the encoders, unless they have run under the `load`-th weights. Raises `ModelError` where what they give does
        not fill the prompt's places."""
        if self._load != load:
            self.encoded, self._load = forward.encode_prompt(request.prompt_ids, request.features), load
            self.heard = self.encoded if forward.hears_throughout else None

    def forget(self) -> None:
        """Gives the embeddings' memory back: the prompt has passed, and with it what stood in its places."""
        self.encoded, self.heard, self._load = None, None, -1

    def positions_of(self, length: int) -> Tensor:
        """`[3, length]`: the prompt's, and those of tokens after it."""
        later = torch.arange(self.positions.shape[1], length, dtype=torch.float32) + self.delta
        return torch.cat((self.positions, later.expand(3, -1)), 1)


def with_media(forward: MediaForward, prompts: Sequence[tuple[PromptMedia | None, int]]) -> tuple[Tensor, Any]:
    """Positions `[3, T]` and media of prompts that lie end to end, given by their media, if they have any, and lengths."""
    positions = [
        torch.arange(length, dtype=torch.float32).expand(3, -1) if media is None else media.positions_of(length)
        for media, length in prompts
    ]
    return torch.cat(positions, 1), forward.join([(media and media.encoded, length) for media, length in prompts])
