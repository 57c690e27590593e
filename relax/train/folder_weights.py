"""Weights of a model folder for an engine that follows no publications, proven as those of a publication are.

folder -> a file, beside it the log-probs of a canary -> manifest -> the engine: names, shapes, digest, canary -> file removed
"""

import asyncio
import mmap
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from relax.config.model import ModelConfig
from relax.engines.attention import attend_within
from relax.engines.engine import Engine
from relax.models.forward import canary_tokens, make_forward
from relax.train.loading import load_model, named_weights
from relax.types import WeightManifest
from relax.weights.layout import lay_out, views
from relax.weights.manifest import Canary, make_manifest


async def load_folder(engine: Engine, model: ModelConfig) -> None:
    """Gives `engine` the weights in `model.path` as version 0. Raises `ModelError` for a folder without them, and
    `WeightSyncError` when the engine does not compute with them what transformers' modules do."""
    with tempfile.NamedTemporaryFile(prefix="relax-weights-") as file:
        manifest = await asyncio.to_thread(_write, Path(file.name), model)
        await engine.load_weights(manifest)


@torch.no_grad()
def _write(path: Path, model: ModelConfig) -> WeightManifest:
    loaded = load_model(model, torch.device("cpu")).eval()
    weights: Mapping[str, torch.Tensor] = dict(named_weights(loaded))
    table, num_bytes = lay_out(weights)
    with path.open("r+b") as file:
        file.truncate(num_bytes)
        content = mmap.mmap(file.fileno(), num_bytes)
    for name, target in views(torch.frombuffer(content, dtype=torch.uint8), table).items():
        target.copy_(weights[name])
    with memoryview(content) as whole:
        return make_manifest(0, whole, table, _canary(loaded), location=str(path))


def _canary(model: torch.nn.Module) -> Canary:
    """Tokens that the vocabulary's size fixes, and the log-prob of each after the first."""
    forward = make_forward(model, use_fused=False)
    weight, bias = forward.head
    ids = torch.from_numpy(canary_tokens(forward).astype(np.int64))
    hidden = forward.hidden(ids, torch.arange(len(ids)), attend_within([len(ids)]))
    logits = F.linear(hidden[:-1], weight, bias).float()
    if forward.media_ids:
        logits[:, forward.media_ids] = -torch.inf
    logprobs = torch.log_softmax(logits, -1)
    return ids.tolist(), logprobs.gather(-1, ids[1:, None])[:, 0].tolist()
