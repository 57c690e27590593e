"""Scoring with other weights than one's own: as a back end that has them would, and without a trace."""

import numpy as np
import pytest
import torch
from train_batches import make_batch, take

from relax.train.torch_backend import TorchBackend


def copies(backend):
    return {name: tensor.clone() for name, tensor in backend.weights().items()}


def moved(make_run, name, *overrides):
    backend = TorchBackend(make_run(name, *overrides))
    backend.forward_backward(make_batch(seed=5))
    backend.finish_step()
    return backend


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_scoring_in_the_middle_of_a_step_leaves_no_trace(make_run, name):
    batch, first = make_batch(seed=1), make_batch(seed=2)
    plain, swapped = moved(make_run, name), moved(make_run, name)
    reference = TorchBackend(make_run(name))
    weights = copies(reference)
    for backend in (plain, swapped):
        backend.forward_backward(first)
    found = swapped.logprobs(batch, weights)
    np.testing.assert_array_equal(found.values, reference.logprobs(batch).values)
    assert not np.array_equal(found.values, plain.logprobs(batch).values), "the weights differ"
    for backend in (plain, swapped):
        backend.forward_backward(batch)
        backend.finish_step()
    assert all(torch.equal(tensor, swapped.weights()[name]) for name, tensor in plain.weights().items())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in reference.weights().items())


def test_weights_that_are_put_in_are_computed_with(make_run):
    batch, source, target = make_batch(seed=1), moved(make_run, "qwen3"), TorchBackend(make_run("qwen3"))
    target.put_weights(copies(source))
    np.testing.assert_array_equal(target.logprobs(batch).values, source.logprobs(batch).values)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_deterministic_scores_do_not_depend_on_the_rest_of_the_batch(make_run, name):
    backend = moved(make_run, name, "run.deterministic=true", "rollout.max_staleness=0")
    batch = make_batch(sizes=(4, 4, 4, 4, 4), seed=3)
    whole = backend.logprobs(batch)
    rows = [row for row in range(len(batch)) if batch.group_ids[row] in (7, 21)]
    some = backend.logprobs(take(batch, rows))
    for index, row in enumerate(rows):
        np.testing.assert_array_equal(some[index], whole[row])


def test_a_step_of_several_updates_moves_the_schedule_once(make_run):
    backend = TorchBackend(make_run("qwen3", "train.updates_per_step=2", "train.warmup_steps=4", "rollout.max_staleness=1"))
    rates = []
    for _ in range(4):
        backend.forward_backward(make_batch())
        rates.append(backend.finish_step()["lr"])
    assert rates == pytest.approx([2.5e-3, 2.5e-3, 5e-3, 5e-3])
