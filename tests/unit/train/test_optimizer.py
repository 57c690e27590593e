"""The optimizer against torch's own AdamW, and the schedules at their corners."""

import pytest
import torch
from torch import nn

from relax.config.train import TrainConfig
from relax.train.optimizer import Optimizer, lr_factor


def test_sums_divided_and_clipped_equal_adamw_on_the_mean():
    torch.manual_seed(0)
    ours, theirs = [[nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))] for _ in range(2)]
    config = TrainConfig(num_steps=9, lr=0.1, weight_decay=0.5, grad_clip=0.7)
    optimizer = Optimizer(ours, config)
    reference = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.5}, {"params": theirs[1:], "weight_decay": 0.0}], lr=0.1
    )
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine) * 50
            other.grad = mine.grad / 10
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.7)
        assert optimizer.step(10)["grad_norm"] == pytest.approx(float(norm))
        reference.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        assert all(mine.grad is None for mine in ours)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1]),
    ],
)
def test_schedules(schedule, wanted):
    config = TrainConfig(num_steps=6, schedule=schedule, warmup_steps=2, min_lr_ratio=0.1)
    assert [lr_factor(config, step) for step in range(7)] == pytest.approx(wanted, abs=1e-6)
    assert lr_factor(config, 1000) == pytest.approx(wanted[-1])


def test_only_matrices_decay():
    config = TrainConfig(num_steps=1, lr=0.1, weight_decay=0.5)
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = Optimizer([matrix, vector], config)
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step(1)
    assert torch.equal(vector, torch.ones(2))
    assert (matrix < 1).all()


def test_frozen_parameters_stay():
    frozen, free = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    optimizer = Optimizer([frozen, free], TrainConfig(num_steps=1, lr=0.1))
    free.grad = torch.ones(2)
    optimizer.step(1)
    assert torch.equal(frozen, torch.ones(2))
    assert not torch.equal(free, torch.ones(2))
