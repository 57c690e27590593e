"""The metrics of one optimizer step, gathered while its groups stream in."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from relax.roles.rows import Rows, token_versions, untaught
from relax.train.backend import StepSums
from relax.types import Outcome


class StepMetrics:
    """Rewards, lengths, ages and outcomes over the step's rows, and the seconds spent by kind of work.

    `version`: of the policy in the step's last update, which the ages are counted to.
    """

    def __init__(self, step: int, version: int, started: float) -> None:
        self.step, self.version = step, version
        self.sums = StepSums()
        self._started = started
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._rewards: list[np.ndarray] = []
        self._shaped: list[np.ndarray] = []
        self._groups: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._ages: list[np.ndarray] = []
        self._num_segments: list[np.ndarray] = []
        self._outcomes: Counter[str] = Counter()
        self._num_untaught: int | None = None

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Adds the block's wall seconds to `kind`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[kind] += time.perf_counter() - started

    def add_rows(self, rows: Rows) -> None:
        """Takes in rows as they are trained."""
        mask = rows.ragged("loss_mask")
        trained = mask.values != 0
        self._lengths.append(np.add.reduceat(trained.astype(np.int64), mask.offsets[:-1]))
        versions = np.where(trained, token_versions(rows.values("segments"), mask.offsets), self.version)
        self._ages.append(self.version - np.minimum.reduceat(versions, mask.offsets[:-1]))
        self._num_segments.append(np.array([len(segments) for segments in rows.values("segments")]))
        self._rewards.append(np.asarray(rows.columns["reward"], np.float64))
        if "shaped_reward" in rows.columns:
            self._shaped.append(np.asarray(rows.columns["shaped_reward"], np.float64))
        self._groups.append(rows.group_ids)
        self._outcomes.update(str(outcome) for outcome in rows.values("outcome"))
        if (missing := untaught(rows.columns)) is not None:
            self._num_untaught = (self._num_untaught or 0) + int(missing.sum())

    def finish(self, finished: Mapping[str, float], now: float) -> dict[str, float | int]:
        """Every metric of the step by name; times in seconds. `step` counts finished steps, from 1."""
        rewards, groups = np.concatenate(self._rewards), np.concatenate(self._groups)
        lengths, ages = np.concatenate(self._lengths), np.concatenate(self._ages)
        stds = np.array([rewards[groups == group].std() for group in np.unique(groups)])
        step_s = now - self._started
        metrics: dict[str, float | int] = {
            "step": self.step + 1,
            "step_s": step_s,
            "train_s": self._seconds["train"],
            "wait/actor_s": self._seconds["wait"],
            "snapshot_s": self._seconds["snapshot"],
            "reward/mean": float(rewards.mean()),
            "reward/std_within_group": float(stds.mean()),
            "reward/zero_signal_groups": int((stds == 0).sum()),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": int(lengths.max()),
            "response/truncated_fraction": self._outcomes[Outcome.TRUNCATED] / len(rewards),
            "age/mean": float(ages.mean()),
            "age/max": int(ages.max()),
            "age/mixed_fraction": float((np.concatenate(self._num_segments) > 1).mean()),
            "samples": len(rewards),
            "tokens/trained": int(lengths.sum()),
            "samples_per_s": len(rewards) / step_s,
            "tokens_per_s": int(lengths.sum()) / step_s,
        }
        if self._shaped:
            metrics["reward/shaped_mean"] = float(np.concatenate(self._shaped).mean())
        if self._num_untaught is not None:
            metrics["teacher/failed_rows"] = self._num_untaught
        metrics |= {f"age/count_{age}": int((ages == age).sum()) for age in np.unique(ages).tolist()}
        return metrics | self.sums.values() | dict(finished)
