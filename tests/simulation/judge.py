"""What really happened, written down apart from the queue, and what must be true of it.

The judge knows each token's weights from the engines, each step's groups from the actor, and each ticket from the producers. It
asks the queue for nothing but the counts and fates that it checks.
"""

import sqlite3
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from simulation.engines import Partial
from simulation.scenario import Scenario

from relax.bus.core import Core
from relax.bus.transfer_queue import Ticket


@dataclass(slots=True)
class Records:
    """The surviving history: what a restored or rewound run has behind it.

    `policy`: the life that computed each version. `steps`: the issues of each trained step.
    """

    tickets: dict[int, Ticket] = field(default_factory=dict)
    forfeits: dict[int, str] = field(default_factory=dict)
    steps: list[list[int]] = field(default_factory=list)
    policy: dict[int, int] = field(default_factory=lambda: {0: 0})


class Judge:
    """Raises `AssertionError` at the first thing that is not as promised."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.bound = scenario.max_staleness
        self.now = Records()
        self._saved = Records()
        self._samples: dict[int, list[Partial]] = {}
        self._leased: dict[str, list[int]] = {}
        self.ages: Counter[int] = Counter()
        self.num_tokens_masked = self.num_trained = self.num_mixed = self.num_dropped = self.num_evaluations = 0

    @property
    def num_samples(self) -> int:
        """Samples that were trained, those of lost futures included."""
        return self.num_trained * self.scenario.group_size

    # -- what happens -------------------------------------------------------------------------------------------------
    def admitted(self, tickets: Sequence[Ticket]) -> None:
        trained = self._prompts_trained()
        for ticket in tickets:
            known = self.now.tickets.get(ticket.issue)
            assert known is None or known.prompt == ticket.prompt, f"issue {ticket.issue} changed its prompt"
            assert ticket.issue not in self.now.forfeits, f"issue {ticket.issue} is given again after its end"
            assert ticket.prompt not in trained, f"prompt {ticket.prompt} is trained and given again"
            self.now.tickets[ticket.issue] = ticket

    def generated(self, issue: int, samples: list[Partial]) -> None:
        self._samples[issue] = samples

    def forfeited(self, issue: int, outcome: str) -> None:
        assert issue not in self.now.forfeits
        self.now.forfeits[issue] = outcome

    def consumed(self, step: int, lease_id: str, issues: Sequence[int], row_lengths: Sequence[int]) -> None:
        """The actor took these groups for `step`: no trained token of theirs is too old, none is of another history."""
        self._leased[lease_id] = list(issues)
        last_update = (step + 1) * self.scenario.updates_per_step - 1
        lengths = [sample.length for issue in issues for sample in self._samples[issue]]
        assert lengths == list(row_lengths), "rows are not the samples that were put"
        for issue in issues:
            young = [self._check_age(step, issue, sample, last_update) for sample in self._samples[issue]]
            assert any(young), f"step {step}: issue {issue} has no token that is young enough"

    def _check_age(self, step: int, issue: int, sample: Partial, last_update: int) -> bool:
        """Whether the sample has a token that is trained; the actor masks the old ones where the queue lets them through."""
        bound, trained = self.bound, sample.runs
        if self.scenario.on_stale == "mask":
            trained = [run for run in sample.runs if last_update - run[0].version <= bound]
            self.num_tokens_masked += sample.num_tokens - sum(count for _, count in trained)
        self.num_mixed += len(sample.runs) > 1
        for weights, _ in trained:
            age = last_update - weights.version
            assert age <= bound, f"step {step}: issue {issue} has tokens of age {age}: {sample.runs}"
            assert weights.version <= step * self.scenario.updates_per_step, f"step {step}: {weights} is of the future"
            assert self.now.policy.get(weights.version) == weights.life, f"step {step}: {weights} is of a lost future"
        if trained:
            self.ages[last_update - min(weights.version for weights, _ in trained)] += 1
        return bool(trained)

    def trained(self, step: int, lease_ids: Sequence[str]) -> None:
        assert step == len(self.now.steps), f"step {step} is trained after {len(self.now.steps)} steps"
        issues = [issue for lease_id in lease_ids for issue in self._leased.pop(lease_id)]
        assert len(issues) == self.scenario.prompts_per_step, f"step {step} has {len(issues)} groups"
        before = self._prompts_trained()
        prompts = [self.now.tickets[issue].prompt for issue in issues]
        assert len(set(prompts)) == len(prompts), f"step {step} trains a prompt twice: {prompts}"
        assert not before & set(prompts), f"step {step} trains prompts again: {before & set(prompts)}"
        if self.scenario.limits.in_order:
            assert issues == sorted(issues), f"step {step} is out of order: {issues}"
        self.now.steps.append(issues)
        self.num_trained += len(issues)

    def evaluated(self, samples: Sequence[Partial]) -> None:
        """The engines were held while these were generated."""
        weights = {weights for sample in samples for weights, _ in sample.runs}
        assert len(weights) == 1, f"an evaluation was answered by {weights}"
        self.num_evaluations += 1

    def published(self, version: int, life: int) -> int:
        """A policy version exists; returns the life that computed it first."""
        return self.now.policy.setdefault(version, life)

    def mark(self) -> None:
        """A checkpoint is taken now."""
        self._saved = deepcopy(self.now)

    @property
    def checkpoint_step(self) -> int:
        return len(self._saved.steps)

    def rewound(self) -> None:
        """The actor goes back to the checkpoint; tickets and forfeits stay as they are."""
        step = self.checkpoint_step
        del self.now.steps[step:]
        last = step * self.scenario.updates_per_step
        self.now.policy = {version: life for version, life in self.now.policy.items() if version <= last}
        self._leased.clear()

    def restored(self) -> None:
        """Everything goes back to the checkpoint."""
        self.now = deepcopy(self._saved)
        self._leased.clear()

    def _prompts_trained(self) -> set[int]:
        return {self.now.tickets[issue].prompt for step in self.now.steps for issue in step}

    # -- what must be true --------------------------------------------------------------------------------------------
    def check_books(self, core: Core, ledger: str) -> None:
        """Right after a step: issued = trained + filtered + failed + dropped + in flight, in memory and on disk alike."""
        counts = core.tickets.counts()
        fates = ("trained", "filtered", "failed", "dropped", "in_flight")
        assert counts["issued"] == sum(counts[fate] for fate in fates), counts
        with sqlite3.connect(f"file:{ledger}?mode=ro", uri=True) as database:
            rows = database.execute("SELECT issue, prompt, fate, step FROM issues ORDER BY issue").fetchall()
        database.close()
        on_disk = Counter(row[2] for row in rows)
        assert {fate: on_disk[fate] for fate in fates} == {fate: counts[fate] for fate in fates}
        assert [row[0] for row in rows] == list(range(counts["issued"])), "an issue is missing on disk"
        trained = {issue: step for step, issues in enumerate(self.now.steps) for issue in issues}
        assert {row[0]: row[3] for row in rows if row[2] == "trained"} == trained
        assert {row[0]: row[2] for row in rows if row[2] in ("filtered", "failed")} == self.now.forfeits
        live = Counter(row[1] for row in rows if row[2] != "dropped")
        assert not live or max(live.values()) == 1, f"prompts with two lives: {[p for p, n in live.items() if n > 1]}"
        for issue, prompt, *_ in rows:
            assert issue not in self.now.tickets or self.now.tickets[issue].prompt == prompt
        self.num_dropped = counts["dropped"]

    def check_end(self, core: Core, ledger: str) -> None:
        """After the last step: every prompt has its fate, and the queue is empty but for what was begun too many."""
        self.check_books(core, ledger)
        assert len(self.now.steps) == self.scenario.num_steps
        with sqlite3.connect(f"file:{ledger}?mode=ro", uri=True) as database:
            rows = database.execute("SELECT prompt, fate FROM issues").fetchall()
        database.close()
        prompts = {prompt for prompt, _ in rows}
        assert prompts == set(range(len(prompts))), "a prompt was left out"
        settled = {prompt for prompt, fate in rows if fate in ("trained", "filtered", "failed")}
        open_ones = prompts - settled
        if self.scenario.on_stale == "wait" and not self.scenario.num_extra:
            assert not open_ones, f"prompts without a fate: {sorted(open_ones)}"
            assert core.rows.num_bytes == 0
            assert not core.rows.groups
        assert not core.rows.reserved, f"room is kept for {core.rows.reserved}"
        assert core.claims.num_violations == 0
        assert len(core.leases) == 0 or open_ones

    def lengths(self) -> tuple[list[int], list[int]]:
        """Sorted lengths of the samples that were trained, and of all that were asked for: but for filtered and failed ones."""
        issues = [issue for step in self.now.steps for issue in step]
        trained = [sample.length for issue in issues for sample in self._samples[issue]]
        asked = [ticket for issue, ticket in self.now.tickets.items() if issue not in self.now.forfeits]
        return sorted(trained), sorted(length for ticket in asked for length in self.scenario.lengths(ticket))


def versions_of(samples: Sequence[Partial]) -> tuple[list[int], list[int]]:
    """Oldest and newest version of each sample's tokens."""
    found = [[weights.version for weights, _ in sample.runs] for sample in samples]
    return [min(versions) for versions in found], [max(versions) for versions in found]
