"""The rehearsal: which faults of `[faults]` are due."""

import random
from collections.abc import Callable

from relax.config.faults import FaultEvent
from relax.config.mistakes import nearest
from relax.config.run import RunConfig
from relax.control.runtime import QUEUE
from relax.errors import ConfigError
from relax.roles.topology import engine_names, engine_pools, role_specs


class FaultPlan:
    """The faults of one run, each of which happens once; those of steps that a resumed run has behind it do not.

    Kills come one after another: the next one waits until the last was noticed. Raises `ConfigError` for a target that this run
    does not have.
    """

    def __init__(self, config: RunConfig, first_step: int = 0) -> None:
        engines = [name for names in engine_pools(config).values() for name in names]
        self._targets = [*(spec.name for spec in role_specs(config)), *engines]
        for event in config.faults.events:
            self._check(event, config)
        events = [*config.faults.events, *_random_kills(config, [*self._targets, QUEUE])]
        kept = (event for event in events if event.step > first_step or not first_step)
        self._left = sorted(kept, key=lambda event: event.step)
        self._unnoticed_at: int | None = None

    def due(self, step: int, num_failures: int, is_ok: Callable[[str], bool]) -> list[FaultEvent]:
        """The faults to begin now: `step` steps are done, `num_failures` failures were noticed so far."""
        if self._unnoticed_at is not None and num_failures > self._unnoticed_at:
            self._unnoticed_at = None
        begun, may_kill = [], self._unnoticed_at is None
        for event in [event for event in self._left if event.step <= step]:
            if event.kind == "kill":
                if not may_kill:
                    continue
                may_kill = False  # kills keep their order, so that one whose target is down already is waited for
            if not is_ok(event.target):
                continue
            if event.kind == "kill":
                self._unnoticed_at = num_failures
            self._left.remove(event)
            begun.append(event)
        return begun

    def not_begun(self, event: FaultEvent) -> None:
        """The fault could not be begun: nobody will notice it, and the next one need not wait."""
        if event.kind == "kill":
            self._unnoticed_at = None

    @property
    def left(self) -> tuple[FaultEvent, ...]:
        """The faults that have not begun."""
        return tuple(self._left)

    def _check(self, event: FaultEvent, config: RunConfig) -> None:
        engines = list(engine_names(config))
        allowed = {"kill": [*self._targets, QUEUE], "fail_sync": engines}.get(event.kind, self._targets)
        if event.target not in allowed:
            near = nearest(event.target, allowed)
            raise ConfigError(
                f"faults.events: target = {event.target!r} of kind {event.kind!r}: this run has {', '.join(allowed)}"
                + (f"; did you mean {near!r}?" if near else "")
            )
        if event.kind == "lose_messages" and config.run.runtime == "inprocess":
            raise ConfigError('faults.events: kind = "lose_messages" needs run.runtime = "ray": in one process there are none')
        if event.step >= config.train.num_steps:
            raise ConfigError(
                f"faults.events: step = {event.step} is not before the end of the run (train.num_steps = "
                f"{config.train.num_steps}): the fault would never come"
            )


def _random_kills(config: RunConfig, targets: list[str]) -> list[FaultEvent]:
    """Spread evenly over the run, with a random shift each; every target is killed once before one is killed again."""
    count, last = config.faults.random_kills, config.train.num_steps - 1
    if not count or last < 1:
        return []
    chance = random.Random(config.faults.seed)
    order: list[str] = []
    while len(order) < count:
        order += chance.sample(targets, len(targets))
    steps = [min(last, 1 + int((index + chance.random()) * last / count)) for index in range(count)]
    return [FaultEvent(kind="kill", target=target, step=step) for target, step in zip(order, steps, strict=False)]
