"""`relax eval`: a model's accuracy on a run file's held-out data, through the engine and the reward that training uses."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from relax.bus.core import Core
from relax.config import RunConfig, load_config
from relax.control.services import Services
from relax.data.media.source import Spool
from relax.engines.pool import EnginePool
from relax.errors import ConfigError
from relax.models.folder import read_model_folder
from relax.observe.jsonl import Row
from relax.observe.samples import sample_row
from relax.rewards.pool import RewardPool
from relax.roles.build import make_backend, make_engine, queue_limits
from relax.roles.engine_host import EngineHost
from relax.roles.evaluation import Evaluation, summarise
from relax.roles.role import RoleTask
from relax.types import Prompt, Sample
from relax.weights.publisher import WeightPublisher


def evaluate(run_file: Path, overrides: list[str], *, model: Path | None = None, out: Path | None = None) -> int:
    """Prints the metrics as JSON; writes every response to `out` (jsonl) if given."""
    if model is not None:
        overrides = [*overrides, f"model.path={json.dumps(str(model))}"]
    config = load_config(run_file, overrides)
    if config.eval is None:
        raise ConfigError(f"{run_file} has no [eval] section: relax eval needs eval.data to know the held-out prompts")
    config = config.model_copy(update={"reward": config.eval.reward or config.reward})  # and no role for another one
    read_model_folder(config.model)  # whose errors name what is missing, before anything is started
    metrics, rows = asyncio.run(_evaluate(config))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    sys.stdout.write(json.dumps(metrics, indent=2) + "\n")
    return 0


async def _evaluate(config: RunConfig) -> tuple[dict[str, Any], list[Row]]:
    # here, since transformers takes seconds to import
    from relax.data.tokenizer import load_tokenizer

    core = Core(queue_limits(config))
    publisher = WeightPublisher(core, run_id=f"{config.run.name}-eval")
    host = RoleTask(EngineHost("engine-0", config, core, make_engine))
    services = Services(config, core)
    rewards: RewardPool | None = None
    evaluation: Evaluation | None = None
    try:
        await host.start()
        assert isinstance(host.role, EngineHost)
        spool = Spool()
        rewards = RewardPool(config.reward, services=await services.start(), spool=spool)
        await rewards.start()
        pool = EnginePool({"engine-0": host.role.engine})
        evaluation = Evaluation(config, load_tokenizer(config.model), rewards, pool, core, spool)
        await evaluation.start()
        host.run()
        backend = await asyncio.to_thread(make_backend, config)
        await publisher.publish(publisher.snapshot(0, backend.weights(), backend.canary()))
        while (await host.role.engine.stats()).version < 0:
            if error := host.status()["error"]:
                raise ConfigError(f"the engine could not take the model's weights: {error}")
            await asyncio.sleep(0.05)
        groups = await evaluation.answers(0)
        rows = [_row(sample, evaluation.prompt(place)) for place, group in enumerate(groups) for sample in group or ()]
        return summarise(0, groups, evaluation.kinds), rows
    finally:
        if evaluation is not None:
            await evaluation.close()
        if rewards is not None:
            await rewards.close()
        await services.stop()
        await host.stop()
        await publisher.close()
        await core.close()


def _row(sample: Sample, prompt: Prompt) -> Row:
    """What a sample of a run says, the other columns of the row, and why there is no reward where there is none."""
    error = sample.metadata.get("error")
    return {**prompt.metadata, **sample_row(sample, prompt), **({"error": error} if error else {})}
