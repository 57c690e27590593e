"""Engines of tiny models, with weights."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # test modules are imported by file

from engine_models import Publisher, build

from relax.config.model import ModelConfig
from relax.config.rollout import LocalEngineConfig
from relax.engines.local import LocalEngine


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def publish(tmp_path) -> Publisher:
    return Publisher(tmp_path)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """`models(kind)`: a namespace of `model`, `folder`; built once a session. Never change its weights."""
    made: dict[tuple[str, torch.dtype], SimpleNamespace] = {}

    def get(kind: str, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
        if (kind, dtype) not in made:
            folder = tmp_path_factory.mktemp("engine-models") / kind
            model = build(kind, dtype=dtype)
            model.save_pretrained(folder)
            made[kind, dtype] = SimpleNamespace(model=model, folder=folder)
        return made[kind, dtype]

    return get


@pytest.fixture
async def start(models, publish):
    """`await start(kind, ...)`: an engine with the model's weights as version 0. All are closed at the end."""
    engines: list[LocalEngine] = []

    async def make(
        kind: str = "qwen3",
        *,
        dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
        load: bool = True,
        tokenizer: Path | None = None,
        max_context: int | None = None,
        **config: Any,
    ) -> LocalEngine:
        found = models(kind, dtype)
        model = ModelConfig(
            path=str(found.folder),
            tokenizer_path=str(tokenizer) if tokenizer else None,
            dtype=str(dtype).removeprefix("torch."),
            max_context=max_context,
        )
        engine = LocalEngine(model, LocalEngineConfig(device="cpu", **config), deterministic=deterministic)
        engines.append(engine)
        if load:
            await engine.load_weights(publish(found.model, 0))
        return engine

    yield make
    await asyncio.gather(*(engine.close() for engine in engines))
