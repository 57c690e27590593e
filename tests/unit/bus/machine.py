"""What sets a queue's life back, and what holds in spite of it."""

import contextlib
import gc
import tempfile
import weakref
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from unit.bus.life import PICK, QueueLife, one_of
from unit.bus.parts import assert_same_arrays, make_group, make_shared

from relax.bus.columns import num_bytes
from relax.bus.snapshot import restore
from relax.bus.state import capture, write
from relax.errors import StaleHandle, WaitTimeout

RARELY = st.sampled_from([True] + [False] * 5)


class QueueMachine(QueueLife):
    """A life with turns, deaths and returns; it is run to its end."""

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.finish()
            self.call(self.core.close())  # compares the ledger's counts with the memory's
            self.loop.close()

    def counters(self) -> dict[str, int]:
        """How often a life met what is rare."""
        departures = self.core.departures
        return {
            "dropped": departures.num_dropped,
            "surplus": departures.num_surplus,
            "rewinds": departures.num_rewinds,
            "masked": self.core.claims.num_masked,
            "reissued": self.core.tickets.numbers.num_reissued,
        }

    @precondition(lambda self: hasattr(self, "core"))
    @rule(pick=PICK)
    def drop_a_row(self, pick: int) -> None:
        """A group lives on with what is left of it, its shared arrays included."""
        groups = [issue for issue in self.put if len(self.rows[issue]) > 1]
        if groups:
            issue = one_of(groups, pick)
            row = one_of(self.rows[issue], pick)
            self.call(self.core.drop([row], "poison"))
            self.rows[issue].remove(row)
            self.forget_gone()

    # -- the trainer's weights ----------------------------------------------------------------------------------------
    @precondition(lambda self: hasattr(self, "core"))
    @rule(held=st.booleans(), goes_anew=st.booleans())
    def trainer_takes_its_turn(self, held: bool, goes_anew: bool) -> None:
        if held:
            self.call(self.core.hold_engines("evaluation", 0.0))
            with pytest.raises(WaitTimeout, match="evaluation to let the engines go"):
                self.call(self.core.recall(0.0))
            with contextlib.suppress(WaitTimeout):
                assert self.call(self.core.next_manifest("engine", 0.0)) is not None
            self.call(self.core.let_go("evaluation"))
        with pytest.raises(WaitTimeout, match="engine to give the weights up"):
            self.call(self.core.recall(0.0))
        if goes_anew:
            self.call(self.core.subscribe("engine", takes_turns=True))
        else:
            assert self.call(self.core.next_manifest("engine", 0.0)) is None
            self.call(self.core.gave_up("engine"))
        self.call(self.core.recall(0.0))
        with pytest.raises(WaitTimeout):
            self.call(self.core.next_manifest("engine", 0.0))
        with pytest.raises(WaitTimeout):
            self.call(self.core.hold_engines("evaluation", 0.0))
        assert self.try_to_admit(3) == 0
        self.publish()

    @precondition(lambda self: hasattr(self, "core"))
    @rule(pick=PICK, is_so=RARELY)
    def trainer_goes_back(self, pick: int, is_so: bool) -> None:
        if not is_so:
            return
        step = one_of(range(self.restored_at, self.step + 1), pick)
        live = {*self.tickets, *self.put, *self.core.tickets.again}
        lost = live | {issue for issues in self.trained[step:] for issue in issues}
        waiting = {*self.core.tickets.numbers.waiting, *(self.prompts[issue] for issue in lost)}
        self.call(self.core.rewind(step))
        assert sorted(self.core.tickets.numbers.waiting) == sorted(waiting)
        for lease_id in self.leases:
            with pytest.raises(StaleHandle, match=f"goes back to step {step}"):
                self.call(self.core.ack([lease_id], step=self.steps[lease_id]))
        for issue in self.tickets:
            with pytest.raises(StaleHandle):
                self.call(self.core.put_group(issue, make_group(self.version, newest=self.version), 0.0))
        with pytest.raises(StaleHandle):
            self.call(self.core.acknowledge("engine", self.version))
        self.leases.clear()
        self.tickets.clear()
        self.put.clear()
        del self.trained[step:]
        assert self.try_to_admit(3) == 0
        self.publish()

    @precondition(lambda self: hasattr(self, "core"))
    @rule(is_so=RARELY)
    def queue_dies(self, is_so: bool) -> None:
        """And is restored from its snapshot: what was leased is un-consumed, and tickets are given again."""
        if not is_so:
            return
        again = sorted([*self.tickets, *self.core.tickets.again])
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            path = str(Path(folder) / "queue")
            core = self.core  # as `snapshot` does, without its thread
            write(path, *capture(core.limits, core.tickets, core.rows, core.claims, core.departures))
            self.core = restore(path, self.limits, clock=self.clock, ledger=self.ledger)
        assert self.core.rows.groups.keys() == self.put.keys()
        assert sorted(self.core.tickets.again) == again
        self.rows = {issue: list(group.row_ids) for issue, group in self.core.rows.groups.items()}
        self.had.clear()
        for group in self.core.rows.groups.values():
            for task in group.done:
                self.had[task].update(group.row_ids)
        groups = self.core.rows.groups.values()
        self.media = {g.issue: [weakref.ref(array) for array in g.shared.values()] for g in groups if g.shared}
        self.tickets.clear()
        self.leases.clear()
        self.restored_at = self.step
        self.call(self.core.subscribe("engine", takes_turns=True))
        self.publish()

    # -- what always holds --------------------------------------------------------------------------------------------
    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "core"):
            return
        stats = self.call(self.core.stats())
        counts = stats["ledger"]
        fates = {name: counts[name] for name in ("trained", "filtered", "failed", "dropped")}
        assert counts["issued"] == sum(fates.values()) + counts["in_flight"]
        assert fates["trained"] == sum(map(len, self.trained))
        assert (fates["filtered"], fates["failed"]) == (self.fates["filtered"], self.fates["failed"])
        self.core.tickets.check(self.core.rows.groups)
        self.ledger.check(counts)
        alive = "SELECT prompt FROM issues WHERE fate IN ('in_flight', 'trained') GROUP BY prompt HAVING COUNT(*) > 1"
        assert self.ledger._execute(alive, ()).fetchall() == []
        assert self.core.claims.num_violations == 0
        assert all(age <= self.limits.max_staleness for age in self.core.claims.ages)
        if self.limits.on_stale == "wait" and not self.limits.num_extra:
            assert stats["stale"] == {"dropped": 0, "masked": 0, "surplus": 0}
            places = self.core.claims.tasks["actor"].places if "actor" in self.core.claims.tasks else None
            if places is not None:
                assert all(places.slack(step) >= 0 for step in range(places.next_step, places.next_step + 5))

    @invariant()
    def shared_arrays_stay_as_long_as_a_row(self) -> None:
        """Each group's own, once, counted once; gone from memory with its last row and the last lease that it was in."""
        if not hasattr(self, "core"):
            return
        groups = self.core.rows.groups
        for issue, group in groups.items():
            assert_same_arrays(group.shared, make_shared(issue) if issue in self.media else {})
        size = sum(num_bytes(column) for group in groups.values() for column in group.columns.values())
        shared = sum(array.nbytes for issue in groups.keys() & self.media.keys() for array in make_shared(issue).values())
        assert self.core.rows.num_bytes == size + shared
        leased = {group.issue for held in self.core.leases.all() for group in held.gone}
        gone = self.media.keys() - groups.keys() - leased
        if any(array() is not None for issue in gone for array in self.media[issue]):
            gc.collect()  # an exception that a test met may hold the frames that it passed
        assert not any(array() is not None for issue in gone for array in self.media[issue])
        self.media = {issue: arrays for issue, arrays in self.media.items() if issue not in gone}

    def finish(self) -> None:
        """To the end of the run, in a bounded number of rounds: nothing starves."""
        for lease_id in list(self.leases):
            self.call(self.core.release(lease_id))
        self.leases.clear()
        self.publish()
        for _ in range(4 * self.limits.num_steps + 8):
            if self.step == self.limits.num_steps:
                break
            while self.try_to_admit(99):
                pass
            for issue in sorted(self.tickets, reverse=True):
                self.put_one(issue, spread=issue % 3)
            for _ in range(self.limits.prompts_per_step):
                self.work_off()
            self.holds()
            self.shared_arrays_stay_as_long_as_a_row()
        assert self.step == self.limits.num_steps
        assert self.call(self.core.admit(1, 0.0)) == []
        prompts = [self.prompts[issue] for issues in self.trained for issue in issues]
        assert len(prompts) == len(set(prompts)) == self.limits.num_steps * self.limits.prompts_per_step
        assert self.call(self.core.stats())["ledger"]["in_flight"] == 0
