"""The staleness bound as arithmetic: which step a group must be consumed in, and who goes first.

A group of oldest version `v` may be consumed by step `v + K` at the latest (`K = max_staleness`): its *due* step. Each
step has `P` places. Admission gives a place only when `batch <= v + K`, so that all groups due by step `d` fit into the
places up to `d`. A claim keeps it so: a group with a later due step is given only while, for every step `d` before its own
due step, more places than due groups are left up to `d`. At `K = 0` this is on-policy; at `K = 1` it says that the groups
that would be too old one step later go first. (For `K >= 2` looking one step ahead would not be enough: a run of young
groups could push two steps' worth of old ones into one step.)
"""

from collections import Counter
from collections.abc import Mapping


class Places:
    """Places in the steps of one task, and the groups that have none yet, counted by version."""

    def __init__(self, prompts_per_step: int, max_staleness: int, next_step: int = 0) -> None:
        self.prompts_per_step, self.max_staleness = prompts_per_step, max_staleness
        self.next_step = next_step  # the first step that is not trained
        self._taken: Counter[int] = Counter()  # step -> places taken, of steps that are not trained
        self._untaken: Counter[int] = Counter()  # version -> live groups without a place

    # -- groups without a place ---------------------------------------------------------------------------------------
    def add(self, version: int) -> None:
        self._untaken[version] += 1

    def remove(self, version: int) -> None:
        self._untaken[version] -= 1
        assert self._untaken[version] >= 0, f"more groups of version {version} left than came"
        if not self._untaken[version]:
            del self._untaken[version]

    # -- places -------------------------------------------------------------------------------------------------------
    def take(self, step: int, version: int) -> None:
        self.remove(version)
        self._taken[step] += 1

    def give_back(self, step: int, version: int | None) -> None:
        """Frees a place; `version`: the group lives on, `None`: it is gone."""
        self._taken[step] -= 1
        if version is not None:
            self.add(version)

    def close(self, step: int) -> None:
        """Step `step` is trained."""
        assert step == self.next_step, f"step {step} is not the next one"
        assert self._taken[step] == self.prompts_per_step, f"step {step} is not complete"
        del self._taken[step]
        self.next_step += 1

    # -- questions ----------------------------------------------------------------------------------------------------
    def taken(self, step: int) -> int:
        return self._taken[step]

    def free(self, step: int) -> int:
        return self.prompts_per_step - self._taken[step]

    def slack(self, step: int) -> int:
        """Places left up to and including `step`, less the groups that are due by then. Below 0: some would age out."""
        due = sum(count for version, count in self._untaken.items() if version + self.max_staleness <= step)
        return self._places_until(step) - due

    def _places_until(self, step: int) -> int:
        taken = sum(count for taken, count in self._taken.items() if taken <= step)
        return (step - self.next_step + 1) * self.prompts_per_step - taken

    def may_take(self, step: int, version: int) -> bool:
        """Whether a group of this version may be consumed in `step` without any group ageing out."""
        due = version + self.max_staleness
        if due < step or self.free(step) < 1:
            return False
        # slack only falls where a group is due, so that these steps and `step` itself are the ones to look at
        waiting = sorted((v + self.max_staleness, count) for v, count in self._untaken.items())
        num_due = index = 0
        for until in [step, *(d for d, _ in waiting if step < d < due)] if step < due else []:
            while index < len(waiting) and waiting[index][0] <= until:
                num_due += waiting[index][1]
                index += 1
            if self._places_until(until) <= num_due:
                return False
        return True

    def takeable(self, present: Mapping[int, int]) -> int:
        """How many of the groups that are present (version -> count, without a place) the next step could consume now."""
        trial = Places(self.prompts_per_step, self.max_staleness, self.next_step)
        trial._taken, trial._untaken = self._taken.copy(), self._untaken.copy()
        for version in sorted(present):
            for _ in range(present[version]):
                if not trial.may_take(self.next_step, version):
                    break
                trial.take(self.next_step, version)
        return trial._taken[self.next_step] - self._taken[self.next_step]

    def too_old(self) -> int | None:
        """A version that no step may consume any more, if a group of it waits; never, if the arithmetic holds."""
        oldest = min(self._untaken, default=None)
        return oldest if oldest is not None and oldest + self.max_staleness < self.next_step else None
