"""`[faults]`: a rehearsal of what can go wrong, on purpose, in a run of your own."""

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from relax.config.base import Section

FaultKind = Literal["kill", "delay", "lose_messages", "fail_sync"]


class FaultEvent(Section):
    """One fault: what is done to whom, from which step on."""

    kind: FaultKind
    """`kill` ends the target's process with SIGKILL, `delay` slows its calls of the transfer queue down, `lose_messages` loses
    messages between the two, `fail_sync` makes an engine refuse publications."""
    target: str
    """Name of a role or an engine; `queue` for `kill`."""
    step: int = Field(0, ge=0)
    """The fault begins once so many steps are trained."""
    count: int = Field(1, ge=1)
    """How many calls, messages or publications are hit; a kill happens once."""
    seconds: float = Field(1.0, ge=0)
    """How much longer a delayed call takes."""
    probability: float = Field(1.0, gt=0, le=1)
    """Chance of each call or message to be hit, until `count` of them were."""

    @model_validator(mode="before")
    @classmethod
    def _name_what_is_wrong(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        known, kinds = list(cls.model_fields), get_args(FaultKind)
        unknown = sorted(set(raw) - set(known))
        if unknown:
            raise ValueError(f"faults.events: unknown key {unknown[0]!r} in {raw}; known here: {', '.join(known)}")
        if raw.get("kind") not in kinds:
            raise ValueError(f"faults.events: kind = {raw.get('kind')!r} in {raw}: allowed are {', '.join(map(repr, kinds))}")
        return raw


class FaultsConfig(Section):
    """Faults on purpose, to see that a run of yours survives them; nothing by default. Each one is an event of the run."""

    events: tuple[FaultEvent, ...] = ()
    """What goes wrong, each with `kind`, `target`, `step`, and what else that kind needs."""
    random_kills: int = Field(0, ge=0)
    """So many kills besides, spread over the run, of roles, engines and the queue."""
    seed: int = 0
    """Seed of everything that is random here."""
