"""What the tests of the queue share: a clock that the test moves, groups of rows, manifests, a receiver of weights."""

import numpy as np

from relax.bus.transfer_queue import TransferQueue
from relax.types import Ragged, WeightManifest


class FakeClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.time_s += seconds


def make_group(version: int = 0, num_rows: int = 2, length: int = 3, *, newest: int | None = None, **more):
    """Columns of one group; row `r` has `length + r` tokens. `newest`: of the last row's trained tokens."""
    tokens = Ragged.pack([np.arange(length + row, dtype=np.int32) for row in range(num_rows)])
    versions = np.full(num_rows, version, np.int64)
    if newest is not None:
        more["newest_versions"] = np.array([version] * (num_rows - 1) + [newest])
    return {"tokens": tokens, "versions": versions, **more}


def make_shared(issue: int) -> dict[str, np.ndarray]:
    """Arrays of a group as a whole, of several kinds and shapes; the producer lets go of them."""
    arrays = {
        "pixel_values": np.full((issue % 3, 2, 5), issue, np.float32),
        "image_grid_thw": np.array([[1, 2, issue]], np.int64),
        "seconds": np.array(issue / 2),
        "is_padded": np.array([True, False]),
    }
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def assert_same_arrays(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def make_manifest(version: int) -> WeightManifest:
    tensors = {"w": ("float32", (2, 3), 0)}
    return WeightManifest(version, "shm", "/dev/shm/x", 24, tensors, "digest", (1, 2, 3), (-0.5, -1.5))


async def make_ready(queue: TransferQueue, version: int | None = 0, *, takes_turns: bool = False) -> TransferQueue:
    """A queue whose only receiver of weights, "engine", holds `version`."""
    await queue.subscribe("engine", takes_turns=takes_turns)
    if version is not None:
        await queue.acknowledge("engine", version)
    return queue
