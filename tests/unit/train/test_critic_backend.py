"""The critic: values before each token, at no temperature, learned from returns, whatever the split."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from train_batches import make_batch, take
from transformers import AutoModelForCausalLM

from relax.train.critic_backend import CriticBackend
from relax.types import Ragged

PPO = ("algorithm.type=ppo", "train.lr=3e-2")


def make_critic(make_run, *overrides, name="qwen3"):
    critic = CriticBackend(make_run(name, *PPO, *overrides))
    torch.manual_seed(0)  # only now: the first to ask for a model also builds it, from the same generator
    with torch.no_grad():
        critic.model.score.weight.normal_()
    return critic


def with_targets(critic, batch, seed=0):
    old = critic.values(batch)
    returns = np.random.default_rng(seed).normal(size=len(old.values)).astype(np.float32)
    return replace(batch, values=old, returns=Ragged(returns, old.offsets))


def test_a_new_critic_expects_nothing(make_run):
    batch = make_batch()
    values = CriticBackend(make_run("qwen3", *PPO)).values(batch)
    assert np.array_equal(values.offsets, batch.tokens.offsets)
    assert not values.values.any()


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_a_value_is_that_of_the_hidden_state_before_the_token(make_run, name):
    critic, batch = make_critic(make_run, name=name), make_batch()
    model = AutoModelForCausalLM.from_pretrained(make_run(name).model.path)
    found = critic.values(batch)
    for row in range(len(batch)):
        ids = torch.from_numpy(batch.tokens[row].astype(np.int64))[None]
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states[-1][0]
            expected = critic.model.score(hidden).squeeze(-1)
        trained = np.flatnonzero(batch.loss_mask[row])
        assert np.allclose(found[row][trained], expected[trained - 1], rtol=1e-3, atol=1e-4)
        assert not found[row][batch.loss_mask[row] == 0].any()


def test_values_do_not_know_the_temperature(make_run):
    batch = make_batch()
    cool, warm = (make_critic(make_run, f"rollout.temperature={t}") for t in (0.6, 1.0))
    assert np.array_equal(cool.values(batch).values, warm.values(batch).values)


def test_no_split_and_no_masked_slot_changes_what_it_learns(make_run):
    whole, apart, dirty = (make_critic(make_run) for _ in range(3))
    batch = with_targets(whole, make_batch())
    masked = batch.loss_mask.values == 0
    bad = {
        n: Ragged(np.where(masked, np.float32(np.nan), getattr(batch, n).values), batch.tokens.offsets)
        for n in ("values", "returns")
    }
    wanted = whole.forward_backward(batch).values()
    assert dirty.forward_backward(replace(batch, **bad)).values() == wanted
    for row in range(len(batch)):
        columns = {n: Ragged.pack([getattr(batch, n)[row]]) for n in ("values", "returns")}
        apart.forward_backward(replace(take(batch, [row]), **columns))
    expected = dict(whole.gradients())
    assert expected["score.weight"].any()
    for name, gradient in apart.gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].abs().max()))
    assert whole.finish_step()["grad_norm"] == pytest.approx(apart.finish_step()["grad_norm"], rel=1e-4)


def test_a_missing_column_is_named(make_run):
    critic, batch = make_critic(make_run), make_batch()
    with pytest.raises(AssertionError, match="'returns'"):
        critic.forward_backward(batch)
    with pytest.raises(AssertionError, match="'values'"):
        critic.forward_backward(replace(batch, returns=batch.advantages))


def test_it_learns_the_returns_also_of_samples_without_advantage_and_is_saved_with_its_head(make_run, tmp_path):
    critic, batch = make_critic(make_run, "train.num_steps=60", "algorithm.value_clip=none"), make_batch(holes=False)
    batch = with_targets(critic, batch)
    batch = replace(batch, advantages=Ragged(np.zeros_like(batch.returns.values), batch.tokens.offsets))
    losses = []
    for _ in range(40):
        losses.append(critic.forward_backward(batch).values()["value_loss"])
        critic.finish_step()
    assert losses[-1] < losses[0] / 4
    critic.save(tmp_path / "critic")
    again = make_critic(make_run, "train.num_steps=60", "algorithm.value_clip=none")
    again.load(tmp_path / "critic")
    assert np.array_equal(again.values(batch).values, critic.values(batch).values)


def test_forgotten_gradients_leave_no_trace(make_run, tmp_path):
    one, other = make_critic(make_run), make_critic(make_run)
    batch = with_targets(one, make_batch())
    one.forward_backward(with_targets(one, make_batch(seed=3)))
    one.forget_gradients()
    one.save(tmp_path / "critic")  # which refuses to lose gathered gradients
    for critic in (one, other):
        critic.forward_backward(batch)
        critic.finish_step()
    assert np.array_equal(one.values(batch).values, other.values(batch).values)


def test_a_function_of_ones_own_may_have_a_critic(make_run):
    run = make_run("qwen3", "algorithm.type=custom", "algorithm.path=m:f", 'algorithm.needs=["values"]')
    critic, batch = CriticBackend(run), make_batch()
    assert critic.forward_backward(with_targets(critic, batch)).values()["value_loss"] > 0
