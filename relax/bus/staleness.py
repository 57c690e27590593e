"""The staleness bound as arithmetic: which step a group must be consumed in, and who goes first.

Step `b` makes the versions up to `(b + 1) U` (`U = updates_per_step`), so that a group of oldest version `v` has the age
`(b + 1) U - 1 - v` in its last update. At most `K = max_staleness` of it means step `(v + K + 1) // U - 1` at the latest: the
group's *due* step. Each step has `P` places. Admission gives a place only in a batch that is not after the due step, so that
all groups due by step `d` fit into the places up to `d`. A claim keeps it so: a group with a later due step is given only
while, for every step `d` before its own due step, more places than due groups are left up to `d`. At `K = 0` this is
on-policy; at `K = 1` it says that the groups that would be too old one step later go first. (For `K >= 2` looking one step
ahead would not be enough: a run of young groups could push two steps' worth of old ones into one step.)
"""

from collections import Counter
from collections.abc import Mapping

from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError

_ON_STALE = ("wait", "drop", "mask")


def due_step(limits: QueueLimits, version: int) -> int:
    """The last step that may consume tokens of `version`."""
    return (version + limits.max_staleness + 1) // limits.updates_per_step - 1


def age_at(limits: QueueLimits, version: int, step: int) -> int:
    """Age of a token of `version` in the last update of `step`, in optimizer updates."""
    return (step + 1) * limits.updates_per_step - 1 - version


def leaves_behind(limits: QueueLimits) -> bool:
    """Whether a step may leave groups behind that no later step can consume."""
    return limits.on_stale != "wait" or limits.num_extra > 0


def check_limits(limits: QueueLimits) -> None:
    """Raises `BusError` for limits that contradict each other, or with which no step could ever be completed."""
    positive = ("prompts_per_step", "num_steps", "max_bytes", "lease_s", "updates_per_step")
    wrong = [f"{name} must be above 0" for name in positive if getattr(limits, name) <= 0]
    wrong += [f"{name} must not be below 0" for name in ("max_staleness", "num_extra") if getattr(limits, name) < 0]
    if limits.max_staleness < limits.updates_per_step - 1:
        wrong.append(
            f"max_staleness must be {limits.updates_per_step - 1} or more with {limits.updates_per_step} updates a step"
        )
    if limits.on_stale not in _ON_STALE:
        wrong.append(f"on_stale must be one of {', '.join(_ON_STALE)}")
    if limits.num_extra and not limits.in_order:
        wrong.append("num_extra needs in_order: which groups are surplus must not depend on how long they took")
    if not limits.final_tasks:
        wrong.append("final_tasks must name a task")
    elif leaves_behind(limits) and len(limits.final_tasks) > 1:
        wrong.append("on_stale and num_extra need a single final task, which says what is left behind")
    if wrong:
        raise BusError(f"limits of the transfer queue cannot be used: {'; '.join(wrong)} ({limits})")


class Places:
    """Places in the steps of one task, and the groups that have none yet, counted by due step."""

    def __init__(self, prompts_per_step: int, next_step: int = 0) -> None:
        self.prompts_per_step = prompts_per_step
        self.next_step = next_step  # the first step that is not trained
        self._taken: Counter[int] = Counter()  # step -> places taken, of steps that are not trained
        self._untaken: Counter[int] = Counter()  # due step -> live groups without a place

    # -- groups without a place ---------------------------------------------------------------------------------------
    def add(self, due: int) -> None:
        self._untaken[due] += 1

    def remove(self, due: int) -> None:
        self._untaken[due] -= 1
        assert self._untaken[due] >= 0, f"more groups due by step {due} left than came"
        if not self._untaken[due]:
            del self._untaken[due]

    # -- places -------------------------------------------------------------------------------------------------------
    def take(self, step: int, due: int) -> None:
        self.remove(due)
        self._taken[step] += 1

    def give_back(self, step: int, due: int | None) -> None:
        """Frees a place; `due`: the group lives on, `None`: it is gone."""
        self._taken[step] -= 1
        if due is not None:
            self.add(due)

    def close(self, step: int) -> None:
        """Step `step` is trained."""
        assert step == self.next_step, f"step {step} is not the next one"
        assert self._taken[step] == self.prompts_per_step, f"step {step} is not complete"
        del self._taken[step]
        self.next_step += 1

    def rewind(self, step: int) -> None:
        """Nothing is left, and step `step` is the next one."""
        self.next_step = min(self.next_step, step)
        self._taken.clear()
        self._untaken.clear()

    # -- questions ----------------------------------------------------------------------------------------------------
    def taken(self, step: int) -> int:
        return self._taken[step]

    def free(self, step: int) -> int:
        return self.prompts_per_step - self._taken[step]

    def is_next_free(self, step: int) -> bool:
        """Whether `step` has a free place, and no step before it has one."""
        return self.free(step) > 0 and all(self.free(earlier) <= 0 for earlier in range(self.next_step, step))

    def slack(self, step: int) -> int:
        """Places left up to and including `step`, less the groups that are due by then. Below 0: some would age out."""
        due = sum(count for until, count in self._untaken.items() if until <= step)
        return self._places_until(step) - due

    def _places_until(self, step: int) -> int:
        taken = sum(count for taken, count in self._taken.items() if taken <= step)
        return (step - self.next_step + 1) * self.prompts_per_step - taken

    def may_take(self, step: int, due: int) -> bool:
        """Whether a group of this due step may be consumed in `step` without any group ageing out."""
        if due < step or self.free(step) < 1:
            return False
        # slack only falls where a group is due, so that these steps and `step` itself are the ones to look at
        waiting = sorted(self._untaken.items())
        num_due = index = 0
        for until in [step, *(d for d, _ in waiting if step < d < due)] if step < due else []:
            while index < len(waiting) and waiting[index][0] <= until:
                num_due += waiting[index][1]
                index += 1
            if self._places_until(until) <= num_due:
                return False
        return True

    def takeable(self, present: Mapping[int, int]) -> int:
        """How many of the groups that are present (due step -> count, without a place) the next step could consume now."""
        trial = Places(self.prompts_per_step, self.next_step)
        trial._taken, trial._untaken = self._taken.copy(), self._untaken.copy()
        for due in sorted(present):
            for _ in range(present[due]):
                if not trial.may_take(self.next_step, due):
                    break
                trial.take(self.next_step, due)
        return trial._taken[self.next_step] - self._taken[self.next_step]

    def too_old(self) -> int | None:
        """A due step that has passed, if a group of it waits; never where no step leaves groups behind."""
        first = min(self._untaken, default=None)
        return first if first is not None and first < self.next_step else None
