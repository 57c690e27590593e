"""What relax asks of a generation engine. The embedded one is `engines/local.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from relax.errors import EngineError
from relax.types import Completion, GenerateRequest, WeightManifest


class RequestError(EngineError):
    """The request is at fault: no engine can serve it, so there is no sense in trying another."""


class EngineAsleep(EngineError):
    """The engine has given its weights up for the trainer's turn; it generates again once it has taken the next version."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and what is in hand now. Times in seconds."""

    version: int
    num_running: int
    num_waiting: int
    generated_tokens: int
    prefilled_tokens: int
    busy_s: float


class Engine(Protocol):
    """Generates completions. Calls may overlap; a publication takes effect between two decoding steps."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """One completion for each seed, in their order. Raises `EngineError` before any weights are loaded."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests now: their `generate` returns what there is, with `FinishReason.ABORT`."""
        ...

    async def load_weights(self, manifest: WeightManifest) -> float:
        """Takes a version: bytes, digest, canary. Returns the canary's difference.

        Raises `WeightSyncError` and goes on with the version it has when anything disagrees. Running requests continue with
        the new weights and a new version segment.
        """
        ...

    async def progress(self, request_ids: Sequence[str]) -> dict[str, list[Completion]]:
        """What there is now of each of these requests, one completion for each seed; `FinishReason.ABORT` on those under way.

        Ids of requests that are not in hand are left out.
        """
        ...

    async def sleep(self) -> None:
        """Gives weights and caches up, so that the devices' memory is free. Raises `EngineError` while requests are in hand.

        From then on `generate` raises `EngineAsleep`, until `load_weights`. A second call does nothing.
        """
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
