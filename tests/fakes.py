"""An engine, a back end and rewards that compute nothing, behind the real protocols: for tests of what holds roles together."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax.engines.engine import EngineAsleep, EngineStats, RequestError
from relax.errors import EngineError, WeightSyncError
from relax.rewards.result import RewardResult
from relax.train.backend import StepSums, TrainBatch
from relax.types import Completion, FinishReason, GenerateRequest, Prompt, Ragged, VersionSegment, WeightManifest
from relax.weights.receiver import read_weights


class FakeEngine:
    """Answers after `delay_s` a token with tokens drawn from the seed; each carries the version held when it was sampled.

    A request that comes with partials goes on after them, and draws what it would have drawn.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.version = -1
        self.delay_s = delay_s
        self.requests: list[str] = []
        self.fail_next = 0
        self.reject_next = 0
        self.weights: dict[int, float] = {}
        self.num_continued = 0
        self.is_asleep = self.is_closed = False
        self._running: dict[str, list[_Answer]] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if self.is_asleep:
            raise EngineAsleep("the fake engine sleeps")
        if self.version < 0:
            raise EngineError("no weights loaded")
        if self.fail_next:
            self.fail_next -= 1
            raise RequestError("the fake engine was told to fail")
        self.requests.append(request.request_id)
        longest = request.sampling.max_new_tokens
        answers = [_Answer(seed, longest) for seed in request.seeds]
        for answer, partial in zip(answers, request.partials, strict=False):
            answer.go_on(partial)
            self.num_continued += len(partial.token_ids) > 0
        self._running[request.request_id] = answers
        try:
            await asyncio.gather(*(self._complete(answer) for answer in answers))
        finally:
            del self._running[request.request_id]
        return [answer.completion() for answer in answers]

    async def _complete(self, answer: "_Answer") -> None:
        while answer.finish is FinishReason.ABORT and not answer.is_aborted:
            answer.take(self.version)
            await asyncio.sleep(self.delay_s * answer.slowness)
            if self.is_closed:
                raise EngineError("the fake engine was closed")

    async def abort(self, request_ids: Sequence[str]) -> None:
        for answer in (answer for name in request_ids for answer in self._running.get(name, ())):
            answer.is_aborted = True

    async def load_weights(self, manifest: WeightManifest) -> float:
        if self.reject_next:
            self.reject_next -= 1
            raise WeightSyncError("the fake engine was told to reject")
        self.weights[manifest.version] = float(read_weights(manifest)["w"][0])
        self.version = manifest.version
        self.is_asleep = False
        return 0.0

    async def progress(self, request_ids: Sequence[str]) -> dict[str, list[Completion]]:
        there = [name for name in request_ids if name in self._running]
        return {name: [answer.completion() for answer in self._running[name]] for name in there}

    async def sleep(self) -> None:
        if self.num_running:
            raise EngineError("the fake engine has requests in hand")
        self.version, self.is_asleep = -1, True

    async def stats(self) -> EngineStats:
        if self.is_closed:
            raise EngineError("the fake engine was closed")
        return EngineStats(self.version, self.num_running, 0, 0, 0, 0.0)

    async def close(self) -> None:
        self.version, self.is_closed = -1, True


class _Answer:
    """What one seed draws, and how much of it there is."""

    def __init__(self, seed: int, longest: int) -> None:
        rng = np.random.default_rng(seed)
        self._tokens = rng.integers(10, 200, int(rng.integers(1, longest + 1))).astype(np.int32)
        self._versions: list[VersionSegment] = []
        self._num = 0
        self.slowness = float(rng.random())
        self.finish, self.is_aborted = FinishReason.ABORT, False

    def go_on(self, partial: Completion) -> None:
        self._num, self._versions, self.finish = len(partial.token_ids), list(partial.versions), partial.finish
        assert partial.token_ids.tolist() == self._tokens[: self._num].tolist(), "a partial of another seed"

    def take(self, version: int) -> None:
        if not self._versions or self._versions[-1].version != version:
            self._versions.append(VersionSegment(self._num, version))
        self._num += 1
        if self._num == len(self._tokens):
            self.finish = FinishReason.STOP

    def completion(self) -> Completion:
        logprobs = np.full(self._num, -1.0, np.float32)
        return Completion(self._tokens[: self._num], logprobs, tuple(self._versions), self.finish)


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

    def logprobs(self, batch: TrainBatch, weights: Mapping[str, Any] | None = None) -> Ragged:
        """Minus one, less the number of steps that made the weights."""
        weight = float((weights or self.weights())["w"][0])
        return Ragged(np.full(len(batch.tokens.values), -1.0 - weight, np.float32), batch.tokens.offsets)

    def weights(self) -> Mapping[str, Any]:
        return {"w": self.weight}

    def put_weights(self, weights: Mapping[str, Any]) -> None:
        self.weight.copy_(weights["w"])

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


class FakeRewards:
    """In place of a `RewardPool`: 0 or 1 by the first letter of a response, without the processes that a real one starts."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.notes: list[str] = []

    async def start(self) -> None:
        pass

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        return [RewardResult(float("a" <= response[:1] <= "m")) for response in responses]

    async def close(self) -> None:
        pass
