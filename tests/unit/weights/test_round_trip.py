"""What is received is what was published, bit for bit, or an error says what disagrees."""

import asyncio
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax.errors import WeightSyncError
from relax.weights.digest import CHUNK_BYTES, content_digest
from relax.weights.layout import lay_out
from relax.weights.publisher import WeightPublisher
from relax.weights.receiver import read_weights

CANARY = ((1, 2, 3), (-0.5, -1.5))


def example_weights():
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    tied = torch.randn(5, 3)
    return {
        "matrix": torch.randn(7, 5),
        "bf16": torch.randn(3, 3).bfloat16(),
        "transposed": base.t(),
        "strided": base[::2, 1:3],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "counter": torch.tensor([1, -(2**40)]),
        "flag": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "embed": tied,
        "head": tied,
    }


async def publish(bus, version, weights, publisher=None):
    publisher = publisher or WeightPublisher(bus, "run")
    await publisher.publish(publisher.snapshot(version, weights, CANARY))
    return publisher, bus.versions.newest


def flip_a_bit(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


async def test_every_dtype_shape_and_memory_layout_arrives_bit_equal(bus, roots):
    weights = example_weights()
    publisher, manifest = await publish(bus, 1, weights)
    received = read_weights(manifest)
    assert list(received) == list(weights)
    for name, tensor in weights.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        assert torch.equal(received[name], tensor), name
    assert (manifest.canary_tokens, manifest.canary_logprobs) == CANARY
    await publisher.close()


async def test_tied_names_share_their_bytes(bus, roots):
    publisher, manifest = await publish(bus, 1, example_weights())
    assert manifest.tensors["embed"] == manifest.tensors["head"]
    assert manifest.num_bytes < sum(t.numel() * t.element_size() + 64 for t in example_weights().values())
    await publisher.close()


async def test_views_of_one_storage_that_differ_are_not_taken_for_tied(bus, roots):
    base = torch.arange(12.0).view(3, 4)
    weights = {"a": base, "b": base.view(4, 3), "c": base[:2], "d": base[1:]}
    publisher, manifest = await publish(bus, 1, weights)
    received = read_weights(manifest)
    assert all(torch.equal(received[name], tensor) for name, tensor in weights.items())
    await publisher.close()


async def test_the_same_weights_have_the_same_digest_whatever_the_version(bus, roots):
    publisher, first = await publish(bus, 1, example_weights())
    _, second = await publish(bus, 2, example_weights(), publisher)
    changed = example_weights()
    changed["scalar"] += 1e-6
    _, third = await publish(bus, 3, changed, publisher)
    assert first.digest == second.digest != third.digest
    await publisher.close()


async def test_training_on_after_the_snapshot_does_not_change_it(bus, roots):
    weights = {"w": torch.ones(1000)}
    publisher = WeightPublisher(bus, "run")
    snapshot = publisher.snapshot(1, weights, CANARY)
    weights["w"].add_(1)
    await publisher.publish(snapshot)
    assert torch.equal(read_weights(bus.versions.newest)["w"], torch.ones(1000))
    await publisher.close()


async def test_a_receiver_that_writes_into_its_tensors_changes_nobody_elses(bus, roots):
    publisher, manifest = await publish(bus, 1, {"w": torch.ones(8)})
    mine = read_weights(manifest)["w"]
    mine.zero_()
    assert torch.equal(read_weights(manifest)["w"], torch.ones(8))
    await publisher.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 2**31), bit=st.integers(0, 7))
def test_any_flipped_bit_changes_the_digest(position, bit):
    weights = {"a": torch.zeros(CHUNK_BYTES // 2 + 13, dtype=torch.uint8), "b": torch.zeros(CHUNK_BYTES, dtype=torch.uint8)}
    table, num_bytes = lay_out(weights)
    content = bytearray(num_bytes)
    before = content_digest(memoryview(content), table)
    content[position % num_bytes] ^= 1 << bit
    assert content_digest(memoryview(content), table) != before


def test_the_digest_does_not_depend_on_the_number_of_threads():
    content, table = memoryview(os.urandom(2 * CHUNK_BYTES + 5)), {"a": ("uint8", (5,), 0)}
    assert len({content_digest(content, table, num_threads=n) for n in (1, 2, 3, 8)}) == 1


async def test_a_flipped_byte_in_the_file_is_refused(bus, roots):
    publisher, manifest = await publish(bus, 1, example_weights())
    flip_a_bit(Path(manifest.location), manifest.num_bytes // 2)
    with pytest.raises(WeightSyncError, match=r"version 1: the content's digest is sha256:.* announced was sha256:"):
        read_weights(manifest)
    await publisher.close()


async def test_a_truncated_file_is_refused_by_its_size(bus, roots):
    publisher, manifest = await publish(bus, 1, example_weights())
    os.truncate(manifest.location, manifest.num_bytes - 1)
    with pytest.raises(WeightSyncError, match=f"have {manifest.num_bytes - 1} bytes, the manifest says {manifest.num_bytes}"):
        read_weights(manifest)
    await publisher.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transport": "carrier-pigeon"}, "carrier-pigeon.*known are shm, file"),
        ({"location": "/nowhere/weights"}, "cannot be opened"),
        ({"tensors": {"w": ("float32", (10**6,), 0)}}, "'w'.*does not fit"),
        ({"tensors": {"w": ("float32", (2,), 2)}}, "'w'.*does not fit"),
        ({"tensors": {"w": ("float32", (-1,), 0)}}, "'w'.*does not fit"),
        ({"tensors": {"w": ("float128", (1,), 0)}}, "unknown data type 'float128'"),
        ({"tensors": {"v": ("float32", (4,), 0)}}, "digest"),
        ({"tensors": {"w": ("int32", (4,), 0)}}, "digest"),
    ],
)
async def test_a_manifest_that_disagrees_is_refused_with_what_disagrees(bus, roots, change, message):
    publisher, manifest = await publish(bus, 1, {"w": torch.ones(4)})
    with pytest.raises(WeightSyncError, match=message):
        read_weights(dataclasses.replace(manifest, **change))
    await publisher.close()


def test_weights_with_a_canary_that_is_not_finite_are_not_published(roots):
    with pytest.raises(WeightSyncError, match=r"version 7 is not published.*diverged"):
        WeightPublisher(None, "run").snapshot(7, {"w": torch.ones(1)}, ((1, 2), (float("nan"),)))


async def test_tensors_outlive_the_publisher(bus, roots):
    publisher, manifest = await publish(bus, 1, {"w": torch.arange(5.0)})
    received = read_weights(manifest)
    await publisher.close()
    assert torch.equal(received["w"], torch.arange(5.0))
    with pytest.raises(WeightSyncError, match="the publisher ended"):
        read_weights(manifest)


async def test_another_process_receives_the_same(bus, roots, tmp_path):
    publisher, manifest = await publish(bus, 1, {"w": torch.arange(6.0).bfloat16()})
    code = (
        "import sys, ast; from relax.types import WeightManifest; from relax.weights.receiver import read_weights\n"
        "w = read_weights(WeightManifest(**ast.literal_eval(sys.argv[1])))['w']; sys.stdout.write(str(w.float().tolist()))"
    )
    arguments = [sys.executable, "-c", code, repr(dataclasses.asdict(manifest))]
    done = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True, check=True)
    assert done.stdout == str(list(map(float, range(6))))
    await publisher.close()


async def test_a_snapshot_is_safe_beside_a_publication(bus, roots):
    """The trainer snapshots version n + 1 in its thread while version n is hashed and read: neither is mixed up."""
    publisher = WeightPublisher(bus, "run")
    await bus.subscribe("engine")

    def snapshot(version):
        return asyncio.to_thread(publisher.snapshot, version, {"w": torch.full((50_000,), float(version))}, CANARY)

    ready = await snapshot(1)
    for version in range(1, 12):
        _, ready = await asyncio.gather(publisher.publish(ready), snapshot(version + 1))
        received = read_weights(bus.versions.newest)["w"]
        assert received.unique().tolist() == [float(version)]
        await bus.acknowledge("engine", version)
    assert len(publisher._pool) <= 3
    await publisher.close()
