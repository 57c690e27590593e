"""Names of published tensors, taking another's weights, and models that cannot be loaded."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from train_batches import make_batch

from relax.config.model import ModelConfig
from relax.config.rollout import LocalEngineConfig
from relax.engines.local import LocalEngine
from relax.errors import ModelError, WeightSyncError
from relax.train.loading import load_model, named_weights
from relax.train.torch_backend import TorchBackend
from relax.types import WeightManifest
from relax.weights.layout import lay_out, views
from relax.weights.manifest import make_manifest


class Toy(nn.Module):
    """A tied head, a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias_of_experts", torch.ones(2))
        self.register_buffer("angles", torch.ones(5), persistent=False)


def test_tied_tensors_travel_once_and_persistent_buffers_with_them():
    toy = Toy()
    found = dict(named_weights(toy))
    assert list(found) == ["embed.weight", "bias_of_experts"]
    assert found["embed.weight"].data_ptr() == toy.embed.weight.data_ptr()
    assert not found["embed.weight"].requires_grad


@pytest.fixture
def publish(tmp_path):
    """`publish(backend)`: its weights in a file, with the manifest that says so."""
    numbers = itertools.count()

    def write(backend) -> WeightManifest:
        table, size = lay_out(backend.weights())
        content = bytearray(size)
        for name, view in views(torch.frombuffer(content, dtype=torch.uint8), table).items():
            view.copy_(backend.weights()[name])
        path = Path(tmp_path) / str(next(numbers))
        path.write_bytes(content)
        return make_manifest(3, memoryview(content), table, backend.canary(), location=str(path))

    return write


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_published_weights_are_taken_and_proven(make_run, publish, name):
    trainer, follower, batch = TorchBackend(make_run(name)), TorchBackend(make_run(name)), make_batch()
    trainer.forward_backward(batch)
    trainer.finish_step()
    assert follower.canary() != trainer.canary()
    assert follower.load_weights(publish(trainer)) < 1e-5
    assert follower.canary() == trainer.canary()
    assert follower.logprobs(batch).values.tolist() == trainer.logprobs(batch).values.tolist()


def test_weights_that_do_not_compute_what_was_announced_are_refused(make_run, publish):
    trainer, follower = TorchBackend(make_run("qwen3")), TorchBackend(make_run("qwen3"))
    trainer.forward_backward(make_batch())
    trainer.finish_step()
    before, manifest = follower.canary(), publish(trainer)
    with pytest.raises(WeightSyncError, match="canary"):
        follower.load_weights(replace(manifest, canary_logprobs=before[1]))
    assert follower.canary() == before
    with pytest.raises(WeightSyncError, match=r"left over.*lm_head"):
        follower.load_weights(publish(TorchBackend(make_run("llama"))))
    assert follower.canary() == before
    assert follower.load_weights(manifest) < 1e-5


def test_a_config_that_contradicts_itself_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "contradiction"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["full_attention"] * (config["num_hidden_layers"] + 1)
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelConfig(path=str(folder))
    with pytest.raises(ModelError, match="contradiction"):
        load_model(model, torch.device("cpu"))
    with pytest.raises(ModelError, match="contradiction"):
        LocalEngine(model, LocalEngineConfig())
