"""An engine and a back end that compute nothing, behind the real protocols: for tests of what holds the roles together."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax.engines.engine import EngineStats, RequestError
from relax.errors import EngineError, WeightSyncError
from relax.train.backend import StepSums, TrainBatch
from relax.types import Completion, FinishReason, GenerateRequest, Ragged, VersionSegment, WeightManifest
from relax.weights.receiver import read_weights


class FakeEngine:
    """Answers after `delay_s` with tokens drawn from the seed; every token carries the version held when it was sampled."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.version = -1
        self.delay_s = delay_s
        self.requests: list[str] = []
        self.fail_next = 0
        self.reject_next = 0
        self.weights: dict[int, float] = {}

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if self.version < 0:
            raise EngineError("no weights loaded")
        if self.fail_next:
            self.fail_next -= 1
            raise RequestError("the fake engine was told to fail")
        self.requests.append(request.request_id)
        return await asyncio.gather(*(self._complete(seed, request.sampling.max_new_tokens) for seed in request.seeds))

    async def _complete(self, seed: int, longest: int) -> Completion:
        rng = np.random.default_rng(seed)
        length = int(rng.integers(1, longest + 1))
        versions: list[VersionSegment] = []
        for token in range(length):
            if not versions or versions[-1].version != self.version:
                versions.append(VersionSegment(token, self.version))
            await asyncio.sleep(self.delay_s * float(rng.random()))
        tokens = rng.integers(10, 200, length).astype(np.int32)
        return Completion(tokens, np.full(length, -1.0, np.float32), tuple(versions), FinishReason.STOP)

    async def abort(self, request_ids: Sequence[str]) -> None:
        assert not request_ids

    async def load_weights(self, manifest: WeightManifest) -> float:
        if self.reject_next:
            self.reject_next -= 1
            raise WeightSyncError("the fake engine was told to reject")
        self.weights[manifest.version] = float(read_weights(manifest)["w"][0])
        self.version = manifest.version
        return 0.0

    async def stats(self) -> EngineStats:
        return EngineStats(self.version, 0, 0, 0, 0, 0.0)

    async def close(self) -> None:
        self.version = -1


class FakeBackend:
    """One weight, which counts optimizer steps; remembers the groups of every step."""

    def __init__(self) -> None:
        self.weight = torch.zeros(8)
        self.steps: list[list[int]] = []
        self._groups: list[int] = []
        self.saved: list[Path] = []

    def forward_backward(self, batch: TrainBatch) -> StepSums:
        assert batch.advantages is not None
        assert batch.rollout_logprobs is not None
        self._groups += sorted(set(batch.group_ids.tolist()))
        return StepSums({"loss": (float(np.abs(batch.advantages.values).sum()), float(batch.loss_mask.values.sum()))})

    def finish_step(self) -> dict[str, float]:
        self.steps.append(self._groups)
        self._groups = []
        self.weight += 1
        return {"grad_norm": 1.0, "lr": 0.1, "skipped": 0.0}

    def logprobs(self, batch: TrainBatch) -> Ragged:
        return Ragged(np.full(len(batch.tokens.values), -1.0, np.float32), batch.tokens.offsets)

    def weights(self) -> Mapping[str, Any]:
        return {"w": self.weight}

    def load_weights(self, manifest: WeightManifest) -> float:
        self.weight.copy_(read_weights(manifest)["w"])
        return 0.0

    def canary(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return (1, 2), (-1.0,)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weight.json").write_text(json.dumps(self.weight.tolist()))
        self.saved.append(folder)

    def load(self, folder: Path) -> None:
        self.weight = torch.tensor(json.loads((folder / "weight.json").read_text()))

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "exported").write_text("yes")
