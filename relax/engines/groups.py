"""A request in hand: the prompt, its completions so far, and who waits for them."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from relax.engines.media import PromptMedia
from relax.errors import EngineError
from relax.types import Completion, FinishReason, GenerateRequest


@dataclass(frozen=True, slots=True)
class Prefix:
    """Computed tokens: keys and values `[L, 2, P, KV, D]` and the logits `[V]` after them, under the `load`-th weights."""

    kv: Tensor
    logits: Tensor
    load: int


@dataclass(slots=True, eq=False)
class Group:
    """One request, its seeds' completions as they end, and the future of whoever asked for it."""

    request: GenerateRequest
    future: "Future[list[Completion]]"
    completions: dict[int, Completion] = field(default_factory=dict)
    media: PromptMedia | None = None

    def known(self, index: int) -> Completion:
        """What there was of a seed's completion when the request came."""
        return self.request.partials[index] if self.request.partials else nothing()

    def finish(self, index: int, completion: Completion) -> None:
        """Takes one seed's completion; the last one ends the request."""
        self.completions[index] = completion
        if len(self.completions) == len(self.request.seeds) and not self.future.done():
            self.future.set_result([self.completions[i] for i in range(len(self.request.seeds))])

    def fail(self, error: EngineError) -> None:
        """Ends the request without a result."""
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class Branch:
    """Seeds of one request that go on from the same `tokens [P]` int64: those of the prompt, or one seed's after its partial.

    They enter the batch in the order of `indices`, perhaps not all at once; `prefix` is kept until all of them have.
    """

    group: Group
    indices: list[int]
    tokens: NDArray[np.int64]
    num_started: int = 0
    prefix: Prefix | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def waiting(self) -> list[int]:
        """Seeds that have not entered the batch."""
        return self.indices[self.num_started :]


def branches(group: Group, *, replays: bool) -> list[Branch]:
    """The seeds that are still to be completed, by what they go on from.

    `replays`: all go on from the prompt, and tokens that are there already are passed again one by one.
    """
    prompt = np.asarray(group.request.prompt_ids, np.int64)
    left = [index for index in range(len(group.request.seeds)) if index not in group.completions]
    fresh = [index for index in left if replays or not len(group.known(index).token_ids)]
    found = [Branch(group, fresh, prompt)] if fresh else []
    for index in left:
        if index not in fresh:
            found.append(Branch(group, [index], np.concatenate([prompt, group.known(index).token_ids])))
    return found


def nothing() -> Completion:
    """A completion that has no token yet."""
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), FinishReason.ABORT)
