"""What images, sounds and videos add to a prompt's first pass: embeddings, and positions that do not count tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from relax.models.omni_lm import Encoded, OmniForward
from relax.types import GenerateRequest


class PromptMedia:
    """The media of one prompt: encoded once for all its seeds, and again when weights have changed.

    `positions [3, P]` of the prompt's tokens; token `t` after them stands at `t + delta`.
    """

    def __init__(self, positions: Tensor, delta: float) -> None:
        self.positions, self.delta = positions, delta
        self.encoded = Encoded()
        self._load = -1

    def see(self, forward: OmniForward, request: GenerateRequest, load: int) -> None:
        """Runs the encoders, unless they have run under the `load`-th weights. Raises `ModelError` where what they give does
        not fill the prompt's places."""
        if self._load != load:
            encoded = forward.encode(request.features)
            forward.check(torch.from_numpy(np.asarray(request.prompt_ids, np.int64)), encoded)
            self.encoded, self._load = encoded, load

    def forget(self) -> None:
        """Gives the embeddings' memory back: the prompt has passed, and with it what stood in its places."""
        self.encoded, self._load = Encoded(), -1

    def positions_of(self, length: int) -> Tensor:
        """`[3, length]`: the prompt's, and those of tokens after it."""
        later = torch.arange(self.positions.shape[1], length, dtype=torch.float32) + self.delta
        return torch.cat((self.positions, later.expand(3, -1)), 1)


def with_media(prompts: Sequence[tuple[PromptMedia | None, int]]) -> tuple[Tensor, Encoded]:
    """Positions `[3, T]` and media of prompts that lie end to end, given by their media, if they have any, and lengths."""
    positions = [
        torch.arange(length, dtype=torch.float32).expand(3, -1) if media is None else media.positions_of(length)
        for media, length in prompts
    ]
    return torch.cat(positions, 1), Encoded.join([media.encoded for media, _ in prompts if media is not None])
