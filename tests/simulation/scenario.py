"""What one simulated run is like: sizes, bounds, times, faults. All of it follows from a seed."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax.bus.transfer_queue import QueueLimits, Ticket

FAULTS = (
    "kill_producer",
    "kill_column_role",
    "kill_engine",
    "kill_evaluation",
    "add_engine",
    "remove_engine",
    "freeze",
    "kill_actor",
    "kill_everything",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run. Times in virtual seconds; a step of training takes about one.

    `most_faults`: then nothing goes wrong any more, so that there is no excuse for not coming to an end. `redraws`: a prompt
    that is issued again gets answers of other lengths, as newer weights give. `bounds_on_resume`: a run that is restored goes
    on with one of these.
    """

    seed: int
    max_staleness: int = 1
    updates_per_step: int = 1
    publish_every: int = 1
    on_stale: str = "wait"
    num_extra: int = 0
    in_order: bool = False
    takes_turns: bool = False
    prompts_per_step: int = 6
    group_size: int = 4
    num_steps: int = 24
    num_producers: int = 2
    num_engines: int = 2
    num_column_roles: int = 1
    tail: float = 0.8  # sigma of the lengths' log-normal distribution
    token_s: float = 0.03
    lease_s: float = 8.0
    max_groups: int = 1000  # that fit into the queue's memory
    filtered: float = 0.0
    failed: float = 0.0
    rejects: float = 0.0  # share of publications that an engine refuses at first
    skips: float = 0.0  # share of publications that come late, or never if the next one is quicker
    fault_every_s: float = 1.0
    most_faults: int = 0
    redraws: bool = False
    bounds_on_resume: tuple[int, ...] = ()
    faults: tuple[str, ...] = FAULTS
    checkpoint_every: int = 5

    @property
    def limits(self) -> QueueLimits:
        """As `roles/build.py` makes them from a configuration."""
        return QueueLimits(
            prompts_per_step=self.prompts_per_step,
            max_staleness=self.max_staleness,
            num_steps=self.num_steps,
            max_bytes=self.max_groups * 4096,
            lease_s=self.lease_s,
            updates_per_step=self.updates_per_step,
            on_stale=self.on_stale,
            num_extra=self.num_extra,
            in_order=self.in_order or self.num_extra > 0,
        )

    @property
    def deadline_s(self) -> float:
        """By then a run has ended, whatever happens to it."""
        return 30.0 * self.num_steps + 60.0 * self.most_faults + 600.0

    def lengths(self, ticket: Ticket) -> tuple[int, ...]:
        """Tokens of each sample, 1 to 200, with a long tail: fixed by the prompt, as a seed fixes a response."""
        key = [self.seed, ticket.prompt, ticket.version if self.redraws else 0]
        drawn = np.random.default_rng(key).lognormal(2.3, self.tail, self.group_size)
        return tuple(int(length) for length in drawn.clip(1, 200))

    def is_filtered(self, prompt: int) -> bool:
        """Whether the prompt's group has no signal."""
        return random.Random(f"{self.seed}/{prompt}").random() < self.filtered


def draw(seed: int, **fixed: Any) -> Scenario:
    """The scenario of a seed: any combination that a configuration allows."""
    rng = random.Random(seed)
    bound = rng.choice((0, 1, 2, 4))
    pairs = [(n, u) for n in (1, 2, 3) for u in (1, 2) if n * u - 1 <= bound]
    publish_every, updates = rng.choice(pairs)
    on_stale = rng.choice(("wait", "wait", "drop", "mask"))
    prompts = rng.choice((2, 4, 6, 8))
    chosen: dict[str, Any] = {
        "max_staleness": bound,
        "updates_per_step": updates,
        "publish_every": publish_every,
        "on_stale": on_stale,
        "num_extra": rng.randrange(1, prompts + 1) if on_stale == "wait" and rng.random() < 0.3 else 0,
        "in_order": rng.random() < 0.25,
        "takes_turns": bound == 0 and rng.random() < 0.5,
        "prompts_per_step": prompts,
        "group_size": rng.choice((2, 4, 8)),
        "num_producers": rng.randint(1, 3),
        "num_engines": rng.randint(1, 3),
        "num_column_roles": rng.randint(1, 2),
        "tail": rng.choice((0.3, 0.8, 1.3)),
        "token_s": rng.choice((0.01, 0.03, 0.1)),
        "max_groups": rng.choice((prompts, 2 * prompts, 1000)),
        "filtered": rng.choice((0.0, 0.1, 0.4)),
        "failed": rng.choice((0.0, 0.05)),
        "rejects": rng.choice((0.0, 0.2)),
        "skips": rng.choice((0.0, 0.2)),
        "fault_every_s": rng.choice((0.5, 2.0, 5.0)),
        "most_faults": rng.choice((0, 5, 20)),
        "checkpoint_every": rng.choice((2, 5)),
    }
    if chosen["takes_turns"]:
        chosen["num_extra"] = 0  # refused by the configuration
    elif rng.random() < 0.3:
        chosen["bounds_on_resume"] = tuple(k for k in (0, 1, 2, 4) if k >= publish_every * updates - 1)
    return Scenario(seed, **(chosen | fixed))
