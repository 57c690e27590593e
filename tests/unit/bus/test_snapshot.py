"""A snapshot continues the run: nothing lost, nothing twice, the ledger in step."""

import sqlite3

import numpy as np
import pytest

from relax.bus.core import Core
from relax.bus.ledger import Fate, Ledger
from relax.bus.snapshot import restore
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError, CheckpointError, ConfigError, StaleHandle, WaitTimeout

LIMITS = QueueLimits(prompts_per_step=2, max_staleness=1, num_steps=4)


async def half_way(tmp_path, ready, group) -> tuple[Core, list]:
    """One step trained; step 1: one group claimed, one queued with an advantage; two tickets out; one issue filtered."""
    core = await ready(Core(LIMITS, ledger=Ledger(tmp_path / "ledger.sqlite")))
    tickets = await core.admit(9, 0.0)
    await core.forfeit(tickets[0].issue, "filtered", "no signal")
    tickets = tickets[1:] + await core.admit(9, 0.0)
    for ticket in tickets:
        await core.put_group(ticket.issue, group(0, num_rows=ticket.issue % 2 + 1), 0.0)
    lease = await core.claim("actor", ("tokens",), num_groups=2, wait_s=0.0, step=0)
    await core.ack([lease.lease_id], step=0)
    await core.acknowledge("engine", 1)
    more = await core.admit(9, 0.0)
    lease = await core.claim("actor", ("tokens",), num_groups=1, wait_s=0.0, step=1)
    written = await core.claim("advantages", ("tokens",), num_groups=9, wait_s=0.0)
    await core.write(written.row_ids, {"advantages": np.arange(len(written.row_ids), dtype=np.float32)})
    return core, [lease, *more]


async def test_a_restored_queue_continues(tmp_path, ready, group):
    core, (lease, *out) = await half_way(tmp_path, ready, group)
    await core.snapshot(str(tmp_path / "queue"))
    await core.forfeit(out[0].issue, "failed", "after the snapshot: has not happened for the restored queue")
    before = (await core.stats())["ledger"]
    await core.close()

    ledger = Ledger(tmp_path / "ledger.sqlite")
    again = restore(tmp_path / "queue", LIMITS, ledger=ledger)
    counts = (await again.stats())["ledger"]
    assert counts == {"issued": 7, "in_flight": 4, "trained": 2, "filtered": 1, "failed": 0, "dropped": 0}
    assert ledger.counts() == counts
    assert before["failed"] == 1

    await ready(again, 1)
    tickets = await again.admit(9, 0.0)
    assert [(ticket.issue, ticket.version, ticket.batch) for ticket in tickets] == [(5, 1, 2), (6, 1, 2)]
    with pytest.raises(StaleHandle, match="earlier life"):
        await again.write(lease.row_ids, {"advantages": np.zeros(len(lease.row_ids), np.float32)})
    claimed = await again.claim("actor", ("tokens", "advantages"), num_groups=9, wait_s=0.0, step=1)
    assert sorted(set(claimed.group_ids)) == [3, 4]  # the leased one as well
    assert claimed.columns["advantages"].tolist() == [0.0, 1.0, 2.0]
    recomputed = await again.claim("advantages", ("tokens",), num_groups=9, wait_s=0.0)
    await again.write(recomputed.row_ids, {"advantages": np.full(len(recomputed.row_ids), 9, np.float32)})
    await again.ack([claimed.lease_id], step=1)
    for ticket in tickets:
        await again.put_group(ticket.issue, group(1), 0.0)
    last = await again.claim("actor", ("tokens",), num_groups=2, wait_s=0.0, step=2)
    await again.ack([last.lease_id], step=2)
    assert ledger.counts() == (await again.stats())["ledger"]
    assert ledger.counts()["trained"] == 6
    await again.close()


async def test_prompts_survive(tmp_path, ready, group, manifest):
    """Those of groups, of tickets and those that wait to be issued again keep their numbers, and fresh ones go on."""
    core = await ready(Core(LIMITS, ledger=Ledger(tmp_path / "ledger.sqlite")))
    tickets = await core.admit(4, 0.0)
    for ticket in tickets[:3]:
        await core.put_group(ticket.issue, group(0), 0.0)
    await core.drop([*core.rows.groups[1].row_ids, *core.rows.groups[0].row_ids], "poison", reissue=True)
    (again,) = await core.admit(1, 0.0)
    assert (again.issue, again.prompt) == (4, 0)
    await core.rewind(0)
    await core.announce(manifest(0))
    await core.acknowledge("engine", 0)
    tickets = await core.admit(1, 0.0)
    assert [(ticket.issue, ticket.prompt) for ticket in tickets] == [(5, 0)]
    await core.snapshot(str(tmp_path / "queue"))
    await core.close()
    restored = await ready(restore(tmp_path / "queue", LIMITS, ledger=Ledger(tmp_path / "ledger.sqlite")))
    tickets = await restored.admit(9, 0.0)
    assert [(ticket.issue, ticket.prompt) for ticket in tickets] == [(5, 0), (6, 1), (7, 2), (8, 3)]
    stats = await restored.stats()
    assert (stats["rewinds"], stats["reissued"]) == (1, 5)
    await restored.close()


async def test_the_trainer_goes_back_to_the_restored_step_at_most(tmp_path, ready, group):
    core, _ = await half_way(tmp_path, ready, group)
    await core.snapshot(str(tmp_path / "queue"))
    again = await ready(restore(tmp_path / "queue", LIMITS), 1)
    with pytest.raises(BusError, match="cannot go back to step 0: it knows steps 1 to 1"):
        await again.rewind(0)
    await again.rewind(1)
    assert (await again.stats())["ledger"]["trained"] == 2


@pytest.mark.parametrize("extra", [0, 2])
async def test_in_order_a_smaller_bound_leaves_the_way_free(tmp_path, ready, group, extra):
    """Young groups that came before older tickets must not take up the places that those need to be given again."""
    core = await ready(Core(QueueLimits(2, 3, 9, in_order=True, num_extra=extra)))
    tickets = await core.admit(99, 0.0)
    for ticket in tickets[1:]:
        await core.put_group(ticket.issue, group(0), 0.0)
    with pytest.raises(WaitTimeout):
        await core.claim("actor", ("tokens",), num_groups=1, wait_s=0.0, step=0)
    await core.snapshot(str(tmp_path / "queue"))
    again = await ready(restore(tmp_path / "queue", QueueLimits(2, 0, 9, in_order=True, num_extra=extra)))
    assert sorted(again.rows.groups) == list(range(1, 2 + extra))
    (ticket,) = await again.admit(1, 0.0)
    assert ticket.issue == 0
    await again.put_group(0, group(0), 0.0)
    lease = await again.claim("actor", ("tokens",), num_groups=2, wait_s=0.0, step=0)
    assert set(lease.group_ids) == {0, 1}


async def test_another_way_with_stale_groups_needs_their_newest_versions(tmp_path, ready, group):
    core = await ready(Core(LIMITS))
    await core.put_group((await core.admit(1, 0.0))[0].issue, group(0), 0.0)
    await core.snapshot(str(tmp_path / "queue"))
    with pytest.raises(BusError, match="group 0: column 'newest_versions' is missing"):
        restore(tmp_path / "queue", QueueLimits(2, 1, 4, on_stale="mask"))


async def test_groups_that_a_smaller_bound_cannot_use_are_generated_again(tmp_path, ready, group):
    core = await ready(Core(QueueLimits(2, 2, 4)))
    for ticket in await core.admit(9, 0.0):
        await core.put_group(ticket.issue, group(0), 0.0)
    with pytest.raises(WaitTimeout):
        await core.claim("actor", ("absent",), num_groups=1, wait_s=0.0, step=0)
    await core.snapshot(str(tmp_path / "queue"))
    again = await ready(restore(tmp_path / "queue", QueueLimits(2, 0, 4)))
    assert sorted(again.rows.groups) == [0, 1]
    assert again.tickets.again == [2, 3, 4, 5]
    lease = await again.claim("actor", ("tokens",), num_groups=2, wait_s=0.0, step=0)
    await again.ack([lease.lease_id], step=0)
    await again.acknowledge("engine", 1)
    assert [ticket.issue for ticket in await again.admit(9, 0.0)] == [2, 3]
    assert (await again.stats())["age"]["violations"] == 0


async def test_a_file_that_is_no_whole_snapshot_is_refused(tmp_path, ready, group):
    core, _ = await half_way(tmp_path, ready, group)
    path = tmp_path / "queue"
    await core.snapshot(str(path))
    whole = path.read_bytes()
    with pytest.raises(ConfigError, match="prompts_per_step = 2, which cannot become 3"):
        restore(path, QueueLimits(3, 1, 4))
    old = whole.replace(b"\xa6format\x03", b"\xa6format\x01", 1)
    assert old != whole
    path.write_bytes(old)
    with pytest.raises(CheckpointError, match="a snapshot of format 1, and this version of relax reads 2 and 3"):
        restore(path, LIMITS)
    for content, message in ((whole[:100], "damaged"), (whole[:-8], "damaged"), (b"something else", "not a snapshot")):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            restore(path, LIMITS)
    with pytest.raises(CheckpointError, match="cannot be read"):
        restore(tmp_path / "absent", LIMITS)


async def test_a_snapshot_that_cannot_be_written_leaves_the_old_one(tmp_path, ready, group, monkeypatch):
    core, _ = await half_way(tmp_path, ready, group)
    path = tmp_path / "queue"
    await core.snapshot(str(path))
    whole = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        await core.snapshot(str(path))
    assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


async def test_a_ledger_of_another_run_is_refused(tmp_path, ready, group):
    core, _ = await half_way(tmp_path, ready, group)
    await core.snapshot(str(tmp_path / "queue"))
    with pytest.raises(BusError, match="knows 0 issues, the snapshot 7"):
        restore(tmp_path / "queue", LIMITS, ledger=Ledger(tmp_path / "other.sqlite"))


async def test_the_ledger_tells_each_issues_fate(tmp_path, ready, group):
    core, (lease, *out) = await half_way(tmp_path, ready, group)
    await core.drop(lease.row_ids, "poison")
    await core.forfeit(out[1].issue, "failed", "engine lost")
    await core.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    rows = dict(ledger._execute("SELECT issue, fate || ' ' || reason FROM issues", ()).fetchall())
    assert rows[0] == "filtered no signal"
    assert rows[lease.group_ids[0]] == "dropped poison"
    assert rows[out[1].issue] == "failed engine lost"
    assert list(rows.values()).count("trained ") == 2
    counts = ledger.counts()
    assert counts["issued"] == len(rows) == sum(counts.values()) - counts["issued"]


def test_a_ledger_of_an_earlier_version_is_refused(tmp_path):
    database = sqlite3.connect(tmp_path / "ledger.sqlite")
    database.execute("CREATE TABLE issues (issue INTEGER PRIMARY KEY, fate TEXT NOT NULL)")
    database.close()
    with pytest.raises(BusError, match=r"ledger\.sqlite: a ledger of an earlier version of relax, without the column 'prompt'"):
        Ledger(tmp_path / "ledger.sqlite")


async def test_a_ledger_with_other_fates_than_the_snapshot_is_refused(tmp_path, ready, group):
    core, _ = await half_way(tmp_path, ready, group)
    await core.snapshot(str(tmp_path / "queue"))
    await core.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger._execute("UPDATE issues SET fate = 'failed' WHERE issue = 0", ())
    with pytest.raises(BusError, match=r"the ledger has .*'failed': 1.* the queue .*'failed': 0"):
        restore(tmp_path / "queue", LIMITS, ledger=ledger)


def test_a_prompt_that_was_trained_twice_is_found(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for issue in (0, 1):
        ledger.issued(issue, 7, 0, 0)
        ledger.settled(issue, Fate.TRAINED, step=issue)
    with pytest.raises(BusError, match="prompt 7 was trained more than once"):
        ledger.check(ledger.counts())


def test_a_ledger_that_cannot_be_opened_says_where(tmp_path):
    with pytest.raises(BusError, match=r"absent/ledger\.sqlite: the ledger cannot be opened"):
        Ledger(tmp_path / "absent" / "ledger.sqlite")
