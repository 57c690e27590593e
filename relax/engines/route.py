"""A request on its way through a pool, and an engine of the pool as the pool knows it."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from relax.engines.engine import Engine
from relax.engines.groups import nothing
from relax.errors import EngineError
from relax.types import Completion, FinishReason, GenerateRequest


class State(StrEnum):
    """What an engine said last. Requests go to those that are ready."""

    READY = "ready"
    NO_WEIGHTS = "without weights"  # asleep, or not yet loaded: it answers, and is asked until it has some
    DOWN = "down"


@dataclass(slots=True, eq=False)
class Member:
    """An engine; `load` counts the completions that it has in hand for the pool."""

    name: str
    engine: Engine
    state: State = State.READY
    load: int = 0
    reason: EngineError | None = None  # why it is down


@dataclass(slots=True, eq=False)
class Route:
    """A request in hand: where it is, since when, and what is known of its completions."""

    request: GenerateRequest
    member: Member | None = None
    engine_id: str = ""  # what the engine knows the request by: another name each time, should an earlier one still be there
    since_s: float = 0.0
    is_aborted: bool = False
    failed: set[Member] = field(default_factory=set)  # engines that have failed it since the last pause

    @property
    def num_tokens(self) -> int:
        """Tokens that are known of all its completions."""
        return sum(len(completion.token_ids) for completion in self.request.partials)

    def told(self, completions: list[Completion]) -> None:
        """An engine says what there is: that is what another one would go on from."""
        if sum(len(completion.token_ids) for completion in completions) >= self.num_tokens:
            self.request = replace(self.request, partials=tuple(completions))

    def what_there_is(self) -> list[Completion]:
        """The completions as far as they are known."""
        return list(self.request.partials) or [nothing() for _ in self.request.seeds]

    @property
    def is_complete(self) -> bool:
        """Whether every completion ended before its engine did."""
        partials = self.request.partials
        return bool(partials) and all(completion.finish is not FinishReason.ABORT for completion in partials)
