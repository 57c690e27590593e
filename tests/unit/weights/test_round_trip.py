"""What is received is what was published, bit for bit, or an error says what disagrees."""

import asyncio
import dataclasses
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax.errors import WeightSyncError
from relax.weights.digest import CHUNK_BYTES, Digester, manifest_digest
from relax.weights.layout import by_span, cut, lay_out
from relax.weights.manifest import make_manifest
from relax.weights.publisher import WeightPublisher
from relax.weights.receiver import read_buckets, read_weights
from relax.weights.shared_memory import PublishedFile

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
    before = make_manifest(1, memoryview(content), table, CANARY, location="").digest
    content[position % num_bytes] ^= 1 << bit
    assert make_manifest(1, memoryview(content), table, CANARY, location="").digest != before


def test_the_digest_does_not_depend_on_the_number_of_threads():
    content, found = memoryview(os.urandom(2 * CHUNK_BYTES + 5)), set()
    for num_threads in (1, 2, 3, 8):
        with Digester(num_threads) as digester:
            found.add(digester.digest(content))
    assert len(found) == 1


async def test_a_flipped_byte_in_the_file_is_refused_and_its_bucket_is_named(bus, roots):
    publisher, manifest = await publish(bus, 1, example_weights(), WeightPublisher(bus, "run", bucket_bytes=256))
    start, end, _ = manifest.buckets[2]
    names = [name for name, (_, _, offset) in manifest.tensors.items() if start <= offset < end]
    assert names
    flip_a_bit(Path(manifest.location), start)
    with pytest.raises(
        WeightSyncError, match=rf"version 1: bucket 2 of {len(manifest.buckets)} \(bytes {start} to {end}.*{names[0]}"
    ):
        read_weights(manifest)
    handed_out = []
    with pytest.raises(WeightSyncError, match="bucket 2"):
        handed_out += [list(bucket) for bucket in read_buckets(manifest)]
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
        ({"tensors": {"w": ("float32", (2,), -8)}}, "'w'.*does not fit"),
        ({"tensors": {"w": ("float32", (-1,), 0)}}, "'w'.*does not fit"),
        ({"tensors": {"w": ("float128", (1,), 0)}}, "unknown data type 'float128'"),
    ],
)
async def test_a_manifest_that_is_wrong_is_refused_with_what_is_wrong(bus, roots, change, message):
    publisher, manifest = await publish(bus, 1, {"w": torch.ones(4)})
    with pytest.raises(WeightSyncError, match=message):
        read_weights(with_its_digest(manifest, **change))
    await publisher.close()


def with_its_digest(manifest, **change):
    """As a publisher would announce it that did not know better."""
    changed = dataclasses.replace(manifest, **change)
    return dataclasses.replace(changed, digest=manifest_digest(changed.num_bytes, changed.tensors, changed.buckets))


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": {"v": ("float32", (4,), 0)}},
        {"tensors": {"w": ("int32", (4,), 0)}},
        {"digest": "sha256:0"},
        {"buckets": ((0, 64, "sha256:0"),)},
    ],
)
async def test_what_was_changed_on_the_way_is_refused(bus, roots, change):
    publisher, manifest = await publish(bus, 1, {"w": torch.ones(4)})
    with pytest.raises(WeightSyncError, match=r"version 1: the digest of its table and buckets is .* announced was"):
        read_weights(dataclasses.replace(manifest, **change))
    await publisher.close()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([1, 0, 2], "bucket 0 has bytes 64 to 128, wanted is one that begins at byte 0"),
        ([0, 2, 1], "bucket 1 has bytes 128 to 192, wanted is one that begins at byte 64"),
        ([0, 0, 1, 2], "bucket 1 has bytes 0 to 64"),
        ([0, 2], "bucket 1 has bytes 128"),
        ([0, 1], "its 2 buckets end at byte 128 of 192"),
        ([], "its 0 buckets end at byte 0 of 192"),
    ],
)
async def test_buckets_that_are_missing_doubled_or_out_of_order_are_named(bus, roots, order, message):
    weights = {name: torch.full((4,), float(i)) for i, name in enumerate("abc")}
    publisher, manifest = await publish(bus, 1, weights, WeightPublisher(bus, "run", bucket_bytes=64))
    assert len(manifest.buckets) == 3
    wrong = with_its_digest(manifest, buckets=tuple(manifest.buckets[i] for i in order))
    with pytest.raises(WeightSyncError, match=message):
        read_weights(wrong)
    await publisher.close()


async def test_a_tensor_across_buckets_is_refused(bus, roots):
    publisher, manifest = await publish(
        bus, 1, {"a": torch.ones(4), "b": torch.ones(4)}, WeightPublisher(bus, "run", bucket_bytes=64)
    )
    wrong = with_its_digest(manifest, tensors={**manifest.tensors, "a": ("float32", (20,), 0)})
    with pytest.raises(WeightSyncError, match=r"'a'.*does not fit one bucket"):
        read_weights(wrong)
    await publisher.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 300), max_size=12), bucket_bytes=st.integers(1, 2000))
def test_buckets_hold_whole_tensors_in_order_and_are_no_larger_than_need_be(sizes, bucket_bytes):
    table, num_bytes = lay_out({str(i): torch.ones(size) for i, size in enumerate(sizes)})
    spans = cut(table, num_bytes, bucket_bytes)
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == num_bytes
    parts = by_span(table, spans)
    assert {name for part in parts for name in part} == set(table)
    for (start, end), part in zip(spans, parts, strict=True):
        assert end - start <= bucket_bytes or len({offset for _, shape, offset in part.values() if shape[0]}) <= 1


async def test_a_receiver_that_copies_has_one_bucket_mapped_at_a_time(bus, roots, monkeypatch):
    mapped, most = weakref.WeakSet(), []
    plain = PublishedFile.map

    def counted(self, start, end):
        found = plain(self, start, end)
        mapped.add(found[0])
        most.append(len(mapped))
        return found

    monkeypatch.setattr(PublishedFile, "map", counted)
    weights = {str(i): torch.full((100,), float(i)) for i in range(8)}
    publisher, manifest = await publish(bus, 1, weights, WeightPublisher(bus, "run", bucket_bytes=1000))
    room = {name: torch.zeros(100) for name in weights}

    def copy(bucket):
        for name, tensor in bucket.items():
            room[name].copy_(tensor)

    for bucket in read_buckets(manifest):
        copy(bucket)
    assert len(most) == 4
    assert set(most) == {1}
    assert all(torch.equal(room[name], weights[name]) for name in weights)
    await publisher.close()


async def test_a_real_tied_model_and_its_buffers_arrive_and_stay_as_they_were_while_training_goes_on(bus, roots):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=96, num_key_value_heads=1, tie_word_embeddings=True, **sizes))
    model.model.register_buffer("scale", torch.full((3,), 2.5))  # persistent
    model.model.register_buffer("scratch", torch.zeros(3), persistent=False)
    named = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in model.state_dict()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    publisher = WeightPublisher(bus, "run", bucket_bytes=8192)
    snapshot = publisher.snapshot(1, named, CANARY)
    wanted = {name: tensor.detach().clone() for name, tensor in named.items()}
    for _ in range(3):
        model(torch.arange(8)[None]).logits.logsumexp(-1).sum().backward()
        optimizer.step()
    model.model.scale.zero_()
    await publisher.publish(snapshot)
    received = read_weights(bus.versions.newest)
    assert "model.scale" in received
    assert "model.scratch" not in received
    assert "lm_head.weight" not in received
    assert len(bus.versions.newest.buckets) > 3
    assert received.keys() == wanted.keys()
    assert all(torch.equal(received[name], wanted[name]) for name in wanted)
    assert not torch.equal(wanted["model.embed_tokens.weight"], model.lm_head.weight)
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
