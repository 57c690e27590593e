"""Engines that take time for every token and compute nothing, and the pool that routes to them."""

import asyncio
import random
from bisect import bisect_right
from dataclasses import dataclass, field
from math import ceil

from relax.errors import EngineError, WeightSyncError
from relax.types import WeightManifest


@dataclass(frozen=True, slots=True)
class Weights:
    """A policy: its version, and which life of the actor computed it. Two lives may make one version differently."""

    version: int
    life: int


@dataclass(slots=True)
class Partial:
    """A sample under way: how many tokens it will have, and the weights of those it has, in runs."""

    length: int
    runs: list[tuple[Weights, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.runs)

    def add(self, weights: Weights, count: int) -> None:
        if self.runs and self.runs[-1][0] == weights:
            count += self.runs.pop()[1]
        self.runs.append((weights, count))


class SimEngine:
    """Answers a group when its longest sample is done. New weights take effect between two tokens."""

    def __init__(self, name: str, token_s: float, rng: random.Random, rejects: float) -> None:
        self.name, self.token_s, self._rng, self._rejects = name, token_s, rng, rejects
        self.is_dead = False
        self._times: list[float] = []  # when it took new weights, and which
        self._weights: list[Weights] = []
        self._running: set[asyncio.Future[None]] = set()
        self.is_asleep = True
        self.changed = asyncio.Event()

    @property
    def load(self) -> int:
        return len(self._running)

    async def generate(self, samples: list[Partial]) -> None:
        """Goes on with the samples to their ends. Raises `EngineError` when the engine dies; they keep what they have."""
        assert not self.is_asleep, "the pool does not route to an engine without weights"
        loop = asyncio.get_running_loop()
        started = loop.time()
        done: asyncio.Future[None] = loop.create_future()
        most = max(sample.length - sample.num_tokens for sample in samples)
        timer = loop.call_later(most * self.token_s, _finish, done)
        self._running.add(done)
        try:
            await done
        finally:
            timer.cancel()
            self._running.discard(done)
            self.changed.set()
            passed = loop.time() - started
            for sample in samples:
                self._extend(sample, started, passed)

    def _extend(self, sample: Partial, started: float, passed: float) -> None:
        """Adds the tokens of `passed` seconds to the sample, each with the weights of its moment."""
        left = min(sample.length - sample.num_tokens, int(passed / self.token_s + 1e-6))
        first = bisect_right(self._times, started) - 1
        done = 0
        for index in range(first, len(self._times)):
            is_last = index + 1 == len(self._times)
            until = left if is_last else min(left, ceil((self._times[index + 1] - started) / self.token_s))
            if until > done:
                sample.add(self._weights[index], until - done)
                done = until

    async def load_weights(self, manifest: WeightManifest) -> float:
        await asyncio.sleep(self._rng.random() * 0.3)
        if self._rng.random() < self._rejects:
            raise WeightSyncError("the digest does not agree")
        weights = Weights(manifest.version, int(manifest.location))
        self._times.append(asyncio.get_running_loop().time())
        self._weights.append(weights)
        self.is_asleep = False
        self.changed.set()
        return 0.0

    async def sleep(self) -> None:
        """Ends what it has in hand, then gives its weights up."""
        while self._running:
            self.changed.clear()
            await self.changed.wait()
        self.is_asleep = True

    def die(self) -> None:
        self.is_dead = True
        for future in self._running:
            if not future.done():
                future.set_exception(EngineError(f"{self.name} died"))


class SimPool:
    """Routes a group to the engine with the fewest, and on to another when that one dies."""

    def __init__(self, rng: random.Random) -> None:
        self.engines: dict[str, SimEngine] = {}
        self._rng = rng
        self._changed = asyncio.Event()

    async def generate(self, lengths: tuple[int, ...]) -> list[Partial]:
        samples = [Partial(length) for length in lengths]
        while True:
            able = [engine for engine in self.engines.values() if not engine.is_asleep and not engine.is_dead]
            if not able:
                await asyncio.sleep(0.05)
                continue
            try:
                await min(able, key=lambda engine: engine.load).generate(samples)
            except EngineError:
                if self._rng.random() < 0.5:  # nobody had asked it how far it was: the group starts over
                    samples = [Partial(length) for length in lengths]
                continue
            return samples


def _finish(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
