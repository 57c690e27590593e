"""The other side of `bus.py`: the same workloads on TransferQueue 0.1.11 with its default storage, in its own environment.

Its best setting for each workload: a client for each role, and claims that poll every millisecond; its own waiting sleeps five
seconds at a time in the controller.

Called as `python bus_peer.py WORKLOAD`; prints one line `RESULT {...}`.
"""

import json
import multiprocessing as mp
import os
import statistics
import sys
import threading
import time

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

torch.set_num_threads(1)


def batch(rows, **fields):
    return TensorDict(fields, batch_size=rows)


def ragged_rows(count, seed=0):
    """Four ragged fields, 4 KB a row on average."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(128, 385, (count,), generator=generator).tolist()

    def jagged(dtype):
        return torch.nested.as_nested_tensor([torch.ones(n, dtype=dtype) for n in lengths], layout=torch.jagged)

    floats = {name: jagged(torch.float32) for name in ("rollout_logprobs", "ref_logprobs", "advantages")}
    return batch(count, tokens=jagged(torch.int32), **floats)


def fetch(client, fields, count, partition, task):
    """Metadata of up to `count` ready samples, waiting for them; `None` when there were none."""
    meta = client.get_meta(data_fields=fields, batch_size=count, partition_id=partition, task_name=task)
    return meta if meta.size else None


def small(client):
    batches = [ragged_rows(32, seed) for seed in range(32)]
    fields = list(batches[0].keys())
    start = time.perf_counter()
    for one in batches:
        client.put(one, partition_id="small")
    for _ in range(32):
        client.get_data(fetch(client, fields, 32, "small", "actor"))
    return {"small_rows_per_s": 1024 / (time.perf_counter() - start)}


def large(client):
    found, samples = {}, [torch.full((1, 8 << 20), index, dtype=torch.uint8) for index in range(16)]
    for round_ in range(2):
        put = got = 0.0
        for part in range(4):
            partition = f"large{round_}{part}"
            start = time.perf_counter()
            for sample in samples:
                client.put(batch(1, media=sample), partition_id=partition)
            put += time.perf_counter() - start
            for _ in range(16):
                start = time.perf_counter()
                client.get_data(fetch(client, ["media"], 1, partition, "large"))["media"].clone()
                got += time.perf_counter() - start
            client.clear_partition(partition)
        size = 64 * (8 << 20) / 1e9
        found = {"large_put_gb_per_s": size / put, "large_get_gb_per_s": size / got}
    return found


CONFIG = {"controller": {"polling_mode": True}}


def new_client(name):
    """Another client of the queue that `init` made, with connections and a loop of its own."""
    config = tq.interface._TQ_CONTROLLER
    config = ray.get(config.get_config.remote())
    client = tq.TransferQueueClient(name, config.controller.zmq_info)
    backend = config.backend.storage_backend
    client.initialize_storage_manager(manager_type=backend, config=config.backend[backend])
    return client


TINY = {"tokens": torch.arange(8).reshape(1, 8)}


def single(client):
    start = time.perf_counter()
    for _ in range(500):
        client.put(batch(1, **TINY), partition_id="single")
        client.get_data(fetch(client, ["tokens"], 1, "single", "single"))
    return {"single_rows_per_s": 500 / (time.perf_counter() - start)}


def _call_repeatedly(address, namespace, work, count, barrier, times):
    ray.init(address=address, namespace=namespace, log_to_driver=False)
    tq.init()
    client = tq.get_client()
    partition = f"{work}{os.getpid()}"
    client.put(batch(1, **TINY), partition_id=partition)
    barrier.wait()
    start = time.monotonic()
    for _ in range(count):
        if work == "puts":
            client.put(batch(1, **TINY), partition_id=partition)
        else:
            client.get_partition_list()
    times.put((start, time.monotonic()))
    ray.shutdown()


def clients(client):
    found, context = {}, mp.get_context("spawn")
    address = ray.get_runtime_context().gcs_address
    for name, work, count, number in (
        ("puts_of_4_per_s", "puts", 100, 4),
        ("requests_of_1_per_s", "requests", 1000, 1),
        ("requests_of_4_per_s", "requests", 1000, 4),
    ):
        barrier, times = context.Barrier(number), context.Queue()
        arguments = (address, "benchmark", work, count, barrier, times)
        processes = [context.Process(target=_call_repeatedly, args=arguments) for _ in range(number)]
        for process in processes:
            process.start()
        spans = [times.get(timeout=200) for _ in processes]
        for process in processes:
            process.join()
        found[name] = count * number / (max(end for _, end in spans) - min(start for start, _ in spans))
    return found


def chain(client):
    num_groups, per_claim = 128, 4
    rows = ragged_rows(8)
    base = batch(8, tokens=rows["tokens"], rollout_logprobs=rows["rollout_logprobs"])
    stages = {
        "reference": (["tokens"], "ref_logprobs"),
        "actor_fwd": (["tokens"], "old_logprobs"),
        "critic": (["tokens"], "values"),
        "advantages": (["rollout_logprobs", "ref_logprobs", "old_logprobs", "values"], "advantages"),
        "actor": (["tokens", "rollout_logprobs", "ref_logprobs", "old_logprobs", "values", "advantages"], None),
    }

    def rollout():
        for _ in range(num_groups - 1):
            client.put(base, partition_id="chain")

    def role(task, needs, gives):
        client, done = new_client(task), 0
        while done < num_groups * 8:
            meta = fetch(client, needs, min(per_claim * 8, num_groups * 8 - done), "chain", task)
            if meta is None:
                time.sleep(0.001)
                continue
            data = client.get_data(meta)
            if gives is not None:
                values = [torch.zeros(len(row)) for row in data[needs[0]].unbind()]
                column = torch.nested.as_nested_tensor(values, layout=torch.jagged)
                client.put(batch(meta.size, **{gives: column}), metadata=meta)
            done += meta.size

    client.put(base, partition_id="chain")  # the partition must be there before anybody asks for its rows
    num_groups += 1
    threads = [threading.Thread(target=rollout)]
    threads += [threading.Thread(target=role, args=(task, *stage)) for task, stage in stages.items()]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"chain_s": time.perf_counter() - start}


def paced(client):
    taken, begun = [], []

    consumer = new_client("paced")
    client.put(batch(1, **TINY), partition_id="paced")
    consumer.get_data(fetch(consumer, ["tokens"], 1, "paced", "paced"))

    def consume():
        while len(taken) < 100:
            meta = fetch(consumer, ["tokens"], 1, "paced", "paced")
            if meta is None:
                time.sleep(0.001)
                continue
            consumer.get_data(meta)
            taken.append(time.perf_counter() - begun[len(taken)])

    thread = threading.Thread(target=consume)
    thread.start()
    for _ in range(100):
        time.sleep(0.01)
        begun.append(time.perf_counter())
        client.put(batch(1, **TINY), partition_id="paced")
    thread.join()
    return {"paced_put_to_got_ms": statistics.median(taken) * 1e3}


if __name__ == "__main__":
    ray.init(num_cpus=16, namespace="benchmark", log_to_driver=False, include_dashboard=False)
    tq.init(OmegaConf.create(CONFIG))
    result = globals()[sys.argv[1]](tq.get_client())
    print("RESULT " + json.dumps(result), flush=True)
    tq.close()
    ray.shutdown()
