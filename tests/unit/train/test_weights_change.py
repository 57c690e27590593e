"""What the back end computes is always what its present weights say: no copy of them is ever out of date."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from relax.config import make_config
from relax.train.backend import TrainBatch
from relax.train.torch_backend import TorchBackend
from relax.types import Ragged


def _backend(model: Path) -> TorchBackend:
    raw = {
        "model": {"path": str(model)},
        "data": {"type": "reasoning_gym", "task": "chain_sum"},
        "reward": {"type": "exact"},
        "train": {"num_steps": 9, "lr": 0.01},
    }
    return TorchBackend(make_config(raw))


def _batch() -> TrainBatch:
    rng = np.random.default_rng(3)
    rows = [np.r_[[5, 6, 7], rng.integers(0, 300, 6)].astype(np.int32) for _ in range(8)]
    masks = [np.r_[[0, 0, 0], np.ones(6)].astype(np.uint8) for _ in rows]
    advantages = [np.float32(rng.normal()) * mask.astype(np.float32) for mask in masks]
    behaviour = [-5.0 * mask.astype(np.float32) for mask in masks]
    return TrainBatch(
        Ragged.pack(rows),
        Ragged.pack(masks),
        np.zeros(8, np.int64),
        advantages=Ragged.pack(advantages),
        rollout_logprobs=Ragged.pack(behaviour),
    )


def _independent(model: Path, backend: TorchBackend, folder: Path) -> np.ndarray:
    """The canary's log-probs by transformers' own forward, from an exported folder."""
    shutil.rmtree(folder, ignore_errors=True)
    backend.export(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor(backend.canary()[0])
    with torch.no_grad():
        logprobs = plain(tokens[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0].numpy()


def test_forward_follows_every_step_and_every_load(tiny_model: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    backend = _backend(tiny_model)
    before = np.array(backend.canary()[1])
    for _ in range(3):
        backend.forward_backward(_batch())
        backend.finish_step()
        np.testing.assert_allclose(backend.canary()[1], _independent(tiny_model, backend, tmp_path / "hf"), atol=1e-5)
    after = np.array(backend.canary()[1])
    assert np.abs(after - before).max() > 1e-2, "the steps moved the policy"
    backend.save(tmp_path / "saved")
    other = _backend(tiny_model)
    assert other.canary()[1] == pytest.approx(before, abs=1e-6)
    other.load(tmp_path / "saved")
    np.testing.assert_array_equal(other.canary()[1], after)
