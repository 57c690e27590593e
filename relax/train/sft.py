"""Supervised fine-tuning on the training back end of a run: packed conversations in, a Hugging Face folder out.

data -> ids and mask -> forward, backward, step -> ... -> now and then an exam -> good enough, or the last step -> folder
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relax.algorithms.likelihood import Likelihood
from relax.config.model import ModelConfig
from relax.config.reward import ExactRewardConfig
from relax.config.rollout import LocalEngineConfig, RolloutConfig
from relax.config.run import RunConfig, RunSection
from relax.config.sft import SFTConfig
from relax.config.train import TrainConfig
from relax.data.render import Renderer
from relax.data.tokenizer import load_tokenizer
from relax.errors import ConfigError
from relax.models.tiny import build_tiny_model
from relax.train.backend import TrainBackend, TrainBatch
from relax.train.conversations import Conversations, Learned
from relax.train.torch_backend import TorchBackend
from relax.types import Ragged

if TYPE_CHECKING:
    from relax.train.exam import Exam


@dataclass(frozen=True, slots=True)
class SFTStep:
    """One optimizer step: `step` from 1, mean negative log-likelihood of what it learned from, the exam's reward if any."""

    step: int
    loss: float
    grad_norm: float
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class SFTResult:
    """Where the model is, after how many steps, and the last exam's mean reward."""

    path: Path
    step: int
    reward: float | None


def run_sft(config: SFTConfig, *, on_step: Callable[[SFTStep], None] | None = None) -> SFTResult:
    """Trains and writes `output.path`, complete or not at all. Raises `RelaxError` for what the user can mend."""
    out = Path(config.output.path)
    if out.exists() and not config.output.overwrite:
        raise ConfigError(f"output.path = {str(out)!r}: is there already; remove it, or set output.overwrite = true")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        start, made = Path(name) / "start", Path(name) / "made"
        if config.model.build == "tiny":
            build_tiny_model(start, seed=config.seed)
        else:
            start = Path(str(config.model.path))
        with asyncio.Runner() as loop:
            backend, step, reward = loop.run(_train(config, as_run(config, start), on_step))
        backend.export(made)
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    return SFTResult(out, step, reward)


def as_run(config: SFTConfig, model: Path) -> RunConfig:
    """What the parts of a run need to know, as a run's configuration."""
    given = config.train.model_dump(include=set(TrainConfig.model_fields) - {"backend"})
    return RunConfig(
        run=RunSection(name="sft", seed=config.seed, runtime="inprocess"),
        model=ModelConfig(path=str(model), dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code),
        data=config.data,
        reward=config.reward or ExactRewardConfig(),
        rollout=RolloutConfig(
            max_staleness=0,
            max_new_tokens=config.eval.max_new_tokens if config.eval else 1,
            engine=LocalEngineConfig(device=config.train.backend.device, num_threads=config.train.backend.num_threads),
        ),
        train=TrainConfig(**given, backend=config.train.backend),
    )


async def _train(
    config: SFTConfig, run: RunConfig, on_step: Callable[[SFTStep], None] | None
) -> tuple[TrainBackend, int, float | None]:
    """The loop. Steps run in this thread: nothing else goes on meanwhile."""
    tokenizer = load_tokenizer(run.model)
    backend = TorchBackend(run, Likelihood())
    renderer = Renderer(tokenizer, config.data)
    conversations = Conversations(config.data, renderer, seed=config.seed, max_tokens=_context(run.model))
    exam = _make_exam(config, run, tokenizer)
    last, reward = config.train.num_steps, None
    try:
        for step in range(1, last + 1):
            sums = backend.forward_backward(to_batch(conversations.batch(step - 1, config.train.batch_size)))
            finished = backend.finish_step()
            is_exam = exam is not None and (step == last or exam.is_due(step))
            if exam is not None and is_exam:
                reward = await exam.reward(backend, step)
            if on_step is not None:
                on_step(SFTStep(step, sums.values()["loss"], finished["grad_norm"], reward if is_exam else None))
            if exam is not None and is_exam and exam.is_passed(reward):
                break
    finally:
        if exam is not None:
            await exam.close()
    return backend, step, reward


def _make_exam(config: SFTConfig, run: RunConfig, tokenizer: Any) -> "Exam | None":
    if config.eval is None or config.reward is None:
        return None
    # here, since it brings a generation engine along, which most files do without
    from relax.train.exam import Exam

    return Exam(config.eval, config.reward, run, tokenizer)


def _context(model: ModelConfig) -> int:
    """Longest sequence that the model was made for, in tokens."""
    config = json.loads((Path(model.path) / "config.json").read_text("utf-8"))
    longest = (config.get("text_config") or config).get("max_position_embeddings")
    return model.max_context or int(longest or 1 << 30)


def to_batch(rows: Sequence[Learned]) -> TrainBatch:
    """Conversations as the back end reads them; every one is a group of its own."""
    tokens, mask = Ragged.pack([ids for ids, _ in rows]), Ragged.pack([mask for _, mask in rows])
    return TrainBatch(tokens, mask, np.arange(len(rows), dtype=np.int64))
