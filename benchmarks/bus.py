"""The transfer queue against TransferQueue 0.1.11, in one run on one machine: only the ratios count.

    python benchmarks/bus.py                                   # ours alone
    python benchmarks/bus.py --peer-python PEER/bin/python     # both, with ratios; docs/transfer-queue.md says how to make PEER

Every workload runs on our side and then on the other (`bus_peer.py`, in its own environment). On both, the queue lives in
processes of its own and the data crosses a process boundary.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing as mp
import statistics
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from relax.bus.address import new_address
from relax.bus.client import BusClient, connect
from relax.bus.core import Core
from relax.bus.server import BusServer
from relax.bus.transfer_queue import QueueLimits
from relax.errors import WaitTimeout
from relax.types import Ragged

LARGER_IS_BETTER = {"paced_put_to_got_ms": False, "chain_s": False}
SMALL = {"versions": np.zeros(1, np.int64), "tokens": Ragged(np.arange(8, dtype=np.int32), np.array([0, 8]))}


def _serve(address: str, started, stopped) -> None:
    async def main() -> None:
        core = Core(QueueLimits(1 << 20, 0, 1, max_bytes=4 << 30))
        await core.subscribe("engine")
        await core.acknowledge("engine", 0)
        async with BusServer(core, address):
            started.set()
            await asyncio.to_thread(stopped.wait)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def queue() -> AsyncIterator[tuple[str, BusClient]]:
    """A core in a process of its own, and a client."""
    address, context = new_address(), mp.get_context("spawn")
    started, stopped = context.Event(), context.Event()
    process = context.Process(target=_serve, args=(address, started, stopped))
    process.start()
    try:
        await asyncio.to_thread(started.wait)
        client = await connect(address, name="benchmark")
        yield address, client
        await client.close()
    finally:
        stopped.set()
        process.join()


async def tickets(client: BusClient, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found += [ticket.issue for ticket in await client.admit(count - len(found), 10.0)]
    return found


def ragged_rows(count: int, seed: int = 0):
    """Rows of four ragged fields, 4 KB in all on average."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(128, 385, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    tokens = Ragged(rng.integers(0, 1000, total).astype(np.int32), offsets)
    floats = {
        name: Ragged(rng.random(total, np.float32), offsets) for name in ("rollout_logprobs", "ref_logprobs", "advantages")
    }
    return {"versions": np.zeros(count, np.int64), "tokens": tokens, **floats}


async def small_rows(client: BusClient) -> dict[str, float]:
    """1,024 samples of 4 KB in micro-batches of 32: put all, get all."""
    batches = [ragged_rows(32, seed) for seed in range(32)]
    issues = await tickets(client, 32)
    start = time.perf_counter()
    for issue, batch in zip(issues, batches, strict=True):
        await client.put_group(issue, batch, 10.0)
    for _ in range(32):
        lease = await client.claim("actor", list(batches[0]), num_groups=1, wait_s=10.0)
        await client.ack([lease.lease_id])
    return {"small_rows_per_s": 1024 / (time.perf_counter() - start)}


def payloads() -> list[np.ndarray]:
    """16 samples of 8 MB, more than the caches hold."""
    return [np.full((1, 8 << 20), index, np.uint8) for index in range(16)]


def memcpy_gb_per_s() -> float:
    """Copying 8 MB between pages that were used before, from and to main memory."""
    sources, targets = payloads(), payloads()
    times = []
    for index in range(64):
        start = time.perf_counter()
        np.copyto(targets[index % 16], sources[index % 16])
        times.append(time.perf_counter() - start)
    return (8 << 20) / statistics.median(times) / 1e9


async def large_rows(client: BusClient) -> dict[str, float]:
    """64 samples of 8 MB, 16 in the queue at a time; the second round, when the pages have been used."""
    found, samples = {}, payloads()
    for _ in range(2):
        put = got = 0.0
        for _ in range(4):
            issues = await tickets(client, 16)
            start = time.perf_counter()
            for issue, sample in zip(issues, samples, strict=True):
                await client.put_group(issue, SMALL | {"media": sample}, 10.0)
            put += time.perf_counter() - start
            for _ in range(16):
                start = time.perf_counter()
                lease = await client.claim("large", ["media"], num_groups=1, wait_s=10.0)
                got += time.perf_counter() - start
                await client.ack([lease.lease_id])
                await client.drop(lease.row_ids, "benchmark")
        size = 64 * (8 << 20) / 1e9
        found = {"large_put_gb_per_s": size / put, "large_get_gb_per_s": size / got}
    return found


async def single_rows(client: BusClient) -> dict[str, float]:
    """500 tiny rows, each put, claimed and acknowledged by itself."""
    issues = await tickets(client, 500)
    start = time.perf_counter()
    for issue in issues:
        await client.put_group(issue, SMALL, 10.0)
        lease = await client.claim("single", ["tokens"], num_groups=1, wait_s=10.0)
        await client.ack([lease.lease_id])
    return {"single_rows_per_s": 500 / (time.perf_counter() - start)}


def _in_processes(address: str, work: str, count: int, num_processes: int) -> float:
    """Calls per second of `num_processes` clients, each making `count` calls, from the moment when all are connected."""
    context = mp.get_context("spawn")
    barrier, times = context.Barrier(num_processes), context.Queue()
    processes = [
        context.Process(target=_call_repeatedly, args=(address, work, count, barrier, times)) for _ in range(num_processes)
    ]
    for process in processes:
        process.start()
    spans = [times.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    return count * num_processes / (max(end for _, end in spans) - min(start for start, _ in spans))


def _call_repeatedly(address: str, work: str, count: int, barrier, times) -> None:
    async def main() -> None:
        client = await connect(address)
        issues = await tickets(client, count) if work == "puts" else []
        barrier.wait()
        start = time.monotonic()
        for index in range(count):
            if work == "puts":
                await client.put_group(issues[index], SMALL, 10.0)
            else:
                await client.unsubscribe("nobody")
        times.put((start, time.monotonic()))
        await client.close()

    asyncio.run(main())


async def clients(address: str) -> dict[str, float]:
    """Single puts of four processes; requests per second of one and of four."""
    found = {}
    for name, work, count, number in (
        ("puts_of_4_per_s", "puts", 500, 4),
        ("requests_of_1_per_s", "requests", 3000, 1),
        ("requests_of_4_per_s", "requests", 3000, 4),
    ):
        found[name] = await asyncio.to_thread(_in_processes, address, work, count, number)
    return found


async def chain(address: str) -> dict[str, float]:
    """1,024 samples in groups of 8 through rollout, reference, actor_fwd, critic, advantages and actor, all at once."""
    rows, num_groups, per_claim = ragged_rows(8), 128, 4
    base = {name: rows[name] for name in ("versions", "tokens", "rollout_logprobs")}
    stages = {
        "reference": (("tokens",), "ref_logprobs"),
        "actor_fwd": (("tokens",), "old_logprobs"),
        "critic": (("tokens",), "values"),
        "advantages": (("rollout_logprobs", "ref_logprobs", "old_logprobs", "values"), "advantages"),
        "actor_": (("tokens", "rollout_logprobs", "ref_logprobs", "old_logprobs", "values", "advantages"), None),
    }

    async def rollout() -> None:
        client = await connect(address)
        for issue in await tickets(client, num_groups):
            await client.put_group(issue, base, 10.0)
        await client.close()

    async def role(task: str, needs: tuple[str, ...], gives: str | None) -> None:
        client = await connect(address)
        done = 0
        while done < num_groups:
            lease = await client.claim(task, needs, num_groups=per_claim, wait_s=10.0)
            first = lease.columns[needs[0]]
            if gives is not None:
                await client.write(lease.row_ids, {gives: Ragged(np.zeros(len(first.values), np.float32), first.offsets)})
            await client.ack([lease.lease_id])
            done += len(set(lease.group_ids))
        await client.close()

    start = time.perf_counter()
    await asyncio.gather(rollout(), *(role(task, *stage) for task, stage in stages.items()))
    return {"chain_s": time.perf_counter() - start}


async def paced(address: str) -> dict[str, float]:
    """From the beginning of a put to the end of a claim that waits for it in another client; 100 puts, one each 10 ms."""
    producer, consumer = await connect(address), await connect(address)
    begun: dict[int, float] = {}
    taken: list[float] = []

    async def consume() -> None:
        while len(taken) < 100:
            with contextlib.suppress(WaitTimeout):
                lease = await consumer.claim("paced", ["tokens"], num_groups=1, wait_s=5.0)
                taken.append(time.perf_counter() - begun[lease.group_ids[0]])
                await consumer.ack([lease.lease_id])

    issues = await tickets(producer, 100)
    consuming = asyncio.create_task(consume())
    for issue in issues:
        await asyncio.sleep(0.01)
        begun[issue] = time.perf_counter()
        await producer.put_group(issue, SMALL, 10.0)
    await consuming
    await producer.close()
    await consumer.close()
    return {"paced_put_to_got_ms": statistics.median(taken) * 1e3}


WORKLOADS = {
    "small": lambda address, client: small_rows(client),
    "large": lambda address, client: large_rows(client),
    "single": lambda address, client: single_rows(client),
    "clients": lambda address, client: clients(address),
    "chain": lambda address, client: chain(address),
    "paced": lambda address, client: paced(address),
}


async def run_ours(name: str) -> dict[str, float]:
    async with queue() as (address, client):
        return await WORKLOADS[name](address, client)


def run_peer(python: str, name: str) -> dict[str, float]:
    script = Path(__file__).with_name("bus_peer.py")
    done = subprocess.run([python, str(script), name], capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{name}: the peer failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="python of an environment with TransferQueue 0.1.11")
    parser.add_argument("--only", nargs="*", choices=sorted(WORKLOADS), default=sorted(WORKLOADS))
    arguments = parser.parse_args()
    copying = memcpy_gb_per_s()
    print(f"{'workload':24} {'ours':>12} {'peer':>12} {'ratio':>8}")
    for name in arguments.only:
        ours = asyncio.run(run_ours(name))
        peer = run_peer(arguments.peer_python, name) if arguments.peer_python else {}
        for key, value in ours.items():
            other = peer.get(key)
            ratio = "" if other is None else f"{value / other if LARGER_IS_BETTER.get(key, True) else other / value:7.1f}x"
            print(f"{key:24} {value:12.4g} {'' if other is None else f'{other:12.4g}':>12} {ratio:>8}", flush=True)
            if key.endswith("gb_per_s"):
                print(f"{'':24} {value / copying:12.2f} of a hot memcpy", flush=True)


if __name__ == "__main__":
    main()
