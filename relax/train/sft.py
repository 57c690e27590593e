"""Supervised training on the back end of a run: packed rows in, a Hugging Face folder out.

data -> ids, mask, targets -> forward, backward, step -> ... -> now and then an exam -> good enough, or the last step -> folder

| task | model | learns |
|---|---|---|
| `policy` | causal language model | what the assistant says |
| `reward_model` | sequence classifier with one label | which response is better, or a number |
| `critic` | token classifier with one label | before each token, the reward of the response |
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax.algorithms.likelihood import Likelihood
from relax.algorithms.scalar_losses import SCALAR_LOSSES, SquaredError
from relax.config.data import DataConfig
from relax.config.model import ModelConfig
from relax.config.reward import ExactRewardConfig
from relax.config.rollout import LocalEngineConfig, RolloutConfig
from relax.config.run import RunConfig, RunSection
from relax.config.sft import CriticTaskConfig, RewardModelTaskConfig, SFTConfig
from relax.config.train import TrainConfig
from relax.data.media.source import Spool
from relax.data.prompts import media_rows
from relax.data.render import Renderer
from relax.data.tokenizer import load_tokenizer
from relax.errors import ConfigError, DataError
from relax.models.folder import longest_sequence, read_model_folder
from relax.models.preparer import Preparer
from relax.models.tiny import SIZES, build_tiny_model
from relax.models.tiny_omni import FAMILIES, build_tiny_omni
from relax.train.backend import TrainBackend
from relax.train.conversations import Conversations
from relax.train.held_out import HeldOut
from relax.train.lessons import Lessons, ReadLesson, decode, to_batch
from relax.train.preferences import Preferences, padding_id
from relax.train.scalar_backend import ScalarBackend
from relax.train.torch_backend import TorchBackend


@dataclass(frozen=True, slots=True)
class Score:
    """What an exam gave: mean `reward`, `accuracy` on pairs, or `correlation`."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3f}"


@dataclass(frozen=True, slots=True)
class SFTStep:
    """One optimizer step: `step` from 1, the mean loss of what it learned from, and what the exam gave if there was one."""

    step: int
    loss: float
    grad_norm: float
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class SFTResult:
    """Where the model is, after how many steps, what the last exam gave, and how many bad rows were left out."""

    path: Path
    step: int
    score: Score | None
    num_skipped: int = 0


class Exam(Protocol):
    """A held-out evaluation; `name` says what its scores are."""

    name: str

    async def score(self, backend: TrainBackend, version: int) -> float:
        """What the back end's weights, as they are now, are worth."""
        ...

    async def close(self) -> None: ...


def run_sft(config: SFTConfig, *, on_step: Callable[[SFTStep], None] | None = None) -> SFTResult:
    """Trains and writes `output.path`, complete or not at all. Raises `RelaxError` for what the user can mend."""
    out = Path(config.output.path)
    if out.exists() and not config.output.overwrite:
        raise ConfigError(f"output.path = {str(out)!r}: is there already; remove it, or set output.overwrite = true")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        start, made = Path(name) / "start", Path(name) / "made"
        if config.model.build is not None:
            _build(config.model.build, start, config.seed)
        else:
            start = Path(str(config.model.path))
        with asyncio.Runner() as loop:
            backend, step, score, num_skipped = loop.run(_train(config, as_run(config, start), on_step))
        backend.export(made)
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    return SFTResult(out, step, score, num_skipped)


def _build(name: str, folder: Path, seed: int) -> None:
    if name in FAMILIES:
        build_tiny_omni(folder, FAMILIES[name], seed=seed)
    else:
        build_tiny_model(folder, seed=seed, **SIZES[name])


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
            max_new_tokens=(config.eval and config.eval.max_new_tokens) or 1,
            engine=LocalEngineConfig(device=config.train.backend.device, num_threads=config.train.backend.num_threads),
        ),
        train=TrainConfig(**given, backend=config.train.backend),
    )


def make_reader(
    config: SFTConfig,
    data: DataConfig,
    tokenizer: Any,
    max_tokens: int,
    spool: Spool | None = None,
    sees: Collection[str] = (),
) -> ReadLesson:
    """What the task makes of a row of `data`. `spool`: for media whose bytes are in the rows; `sees`: what the model reads."""
    task, renderer = config.task, Renderer(tokenizer, data)
    media = media_rows(data, spool)
    if isinstance(task, RewardModelTaskConfig):
        return Preferences(data, task, renderer, max_tokens=max_tokens, media=media, sees=sees).read
    how = {"reward_key": task.reward_key} if isinstance(task, CriticTaskConfig) else {"loss_on": task.loss_on}
    return Conversations(data, renderer, max_tokens=max_tokens, media=media, sees=sees, **how).read


def _make_backend(config: SFTConfig, run: RunConfig, tokenizer: Any) -> TorchBackend:
    task = config.task
    if isinstance(task, RewardModelTaskConfig):
        backend = ScalarBackend(run, SCALAR_LOSSES[task.loss](), "sequence")
        backend.model.config.get_text_config().pad_token_id = padding_id(tokenizer)
        return backend
    return ScalarBackend(run, SquaredError()) if isinstance(task, CriticTaskConfig) else TorchBackend(run, Likelihood())


def _make_exam(config: SFTConfig, run: RunConfig, tokenizer: Any, max_tokens: int) -> Exam | None:
    if config.eval is None:
        return None
    if config.reward is None:
        rows, preparer = _open(config, config.eval.data, run, tokenizer, max_tokens)
        return HeldOut(rows, config.eval.num_prompts, preparer)
    # here, since it brings a generation engine along, which most files do without
    from relax.train.exam import Exam

    return Exam(config.eval, config.reward, run, tokenizer)


def _open(config: SFTConfig, data: DataConfig, run: RunConfig, tokenizer: Any, max_tokens: int) -> tuple[Lessons, Preparer]:
    """The rows of `data`, and what decodes their media."""
    sees = read_model_folder(run.model).media
    if data.media is not None and not sees:
        model = f"model.{'build' if config.model.build else 'path'} = {(config.model.build or config.model.path)!r}"
        raise ConfigError(
            f"data.media: {model} reads text alone; leave it out, or take a model that sees or hears, as 'tiny-vl'"
        )
    spool = Spool() if data.media is not None else None
    read = make_reader(config, data, tokenizer, max_tokens, spool, sees)
    preparer = Preparer(run.model, data, Renderer(tokenizer, data), spool=spool, max_tokens=max_tokens)
    return Lessons(data, read, seed=config.seed), preparer


async def _train(
    config: SFTConfig, run: RunConfig, on_step: Callable[[SFTStep], None] | None
) -> tuple[TrainBackend, int, Score | None, int]:
    """The loop. Steps run in this thread: nothing else goes on meanwhile."""
    tokenizer, max_tokens = load_tokenizer(run.model), longest_sequence(run.model)
    lessons, preparer = _open(config, config.data, run, tokenizer, max_tokens)
    backend = _make_backend(config, run, tokenizer)
    exam = _make_exam(config, run, tokenizer, max_tokens)
    last, size, score = config.train.num_steps, config.train.batch_size, None
    try:
        await preparer.start()
        following = lessons.batch(0, size)
        for step in range(1, last + 1):
            batch, following = following, lessons.batch(step, size) if step < last else []
            learned = await decode(batch, preparer, lessons, following)
            if not learned:
                raise DataError(f"none of the {len(batch)} rows of step {step} can be read: {lessons.last_refusal}")
            sums = backend.forward_backward(to_batch(learned))
            finished = backend.finish_step()
            is_exam = exam is not None and config.eval is not None and (step == last or step % config.eval.every == 0)
            if exam is not None and is_exam:
                score = Score(exam.name, await exam.score(backend, step))
            if on_step is not None:
                on_step(SFTStep(step, sums.values()["loss"], finished["grad_norm"], score if is_exam else None))
            if is_exam and _is_passed(config, score):
                break
    finally:
        await preparer.close()
        if exam is not None:
            await exam.close()
    return backend, step, score, lessons.num_skipped


def _is_passed(config: SFTConfig, score: Score | None) -> bool:
    stop_at = config.eval.stop_at if config.eval else None
    return score is not None and stop_at is not None and score.value >= stop_at
