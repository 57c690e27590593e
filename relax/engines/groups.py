"""A request in hand: the prompt, its completions so far, and who waits for them."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from relax.errors import EngineError
from relax.types import Completion, FinishReason, GenerateRequest, VersionSegment


@dataclass(frozen=True, slots=True)
class Prefix:
    """A computed prompt: keys and values `[L, 2, P, KV, D]` and the logits `[V]` after it, under the `load`-th weights."""

    kv: Tensor
    logits: Tensor
    load: int


@dataclass(slots=True, eq=False)
class Group:
    """One request. Its seeds enter the batch in order, perhaps not all at once; `prefix` is kept until all of them have."""

    request: GenerateRequest
    future: "Future[list[Completion]]"
    completions: dict[int, Completion] = field(default_factory=dict)
    num_started: int = 0
    prefix: Prefix | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_waiting(self) -> int:
        """Seeds that have not entered the batch."""
        return len(self.request.seeds) - self.num_started

    def finish(self, index: int, completion: Completion) -> None:
        """Takes one seed's completion; the last one ends the request."""
        self.completions[index] = completion
        if len(self.completions) == len(self.request.seeds) and not self.future.done():
            self.future.set_result([self.completions[i] for i in range(len(self.request.seeds))])

    def abort_waiting(self) -> None:
        """Ends the seeds that have not entered the batch."""
        for index in range(self.num_started, len(self.request.seeds)):
            self.finish(index, _completion([], [], [], FinishReason.ABORT))
        self.num_started = len(self.request.seeds)

    def fail(self, error: EngineError) -> None:
        """Ends the request without a result."""
        self.num_started = len(self.request.seeds)
        if not self.future.done():
            self.future.set_exception(error)


def _completion(tokens: list[int], logprobs: list[float], versions: list[VersionSegment], finish: FinishReason) -> Completion:
    return Completion(np.array(tokens, np.int32), np.array(logprobs, np.float32), tuple(versions), finish)
