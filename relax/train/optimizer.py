"""AdamW on float32 weights, with clipping, a schedule, and steps that are skipped rather than taken on broken gradients."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from relax.config.train import TrainConfig


class Optimizer:
    """Gradients of sums gather in `parameters`; `step(count)` divides, clips and steps.

    A parameter in a narrower type has a float32 master copy, which is what is stepped; its gradient gathers in float32 as well.
    """

    def __init__(self, parameters: list[nn.Parameter], config: TrainConfig) -> None:
        self._config = config
        self.step_index = 0
        self._parameters = [p for p in parameters if p.requires_grad]
        self._masters = [
            p if p.dtype in (torch.float32, torch.float64) else nn.Parameter(p.detach().float()) for p in self._parameters
        ]
        decays = [(m, m.ndim >= 2) for m in self._masters]
        groups = [
            {"params": [m for m, decay in decays if decay], "weight_decay": config.weight_decay},
            {"params": [m for m, decay in decays if not decay], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [g for g in groups if g["params"]],  # torch refuses an empty group
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def gather(self) -> None:
        """After each backward pass: moves narrow gradients into the float32 sums."""
        for parameter, master in self._pairs():
            if parameter.grad is not None:
                wide = parameter.grad.float()
                master.grad = wide if master.grad is None else master.grad.add_(wide)
                parameter.grad = None

    @torch.no_grad()
    def step(self, count: float) -> dict[str, float]:
        """Ends an optimizer step whose loss sums to `count`: `grad_norm`, `lr`, `skipped`.

        A count of 0 leaves weights and moments as they are, as does a gradient that is not finite; the schedule moves on.
        """
        lr = self._config.lr * lr_factor(self._config, self.step_index // self._config.updates_per_step)
        self.step_index += 1
        grads = [m.grad for m in self._masters if m.grad is not None]
        norm, skipped = 0.0, 0.0
        if count > 0 and grads:
            norm = float(torch.nn.utils.get_total_norm(grads)) / count
            if math.isfinite(norm):
                torch._foreach_mul_(grads, min(1.0, self._config.grad_clip / (norm + 1e-6)) / count)
                for group in self._adam.param_groups:
                    group["lr"] = lr
                self._adam.step()
                for parameter, master in self._pairs():
                    parameter.copy_(master)
            else:
                skipped = 1.0
        self.zero_grad()
        return {"grad_norm": norm, "lr": lr, "skipped": skipped}

    def zero_grad(self) -> None:
        """Forgets gradients that were gathered."""
        for tensor in (*self._parameters, *self._masters):
            tensor.grad = None

    def reload(self) -> None:
        """Takes the parameters' values as they are now, after someone else wrote them."""
        with torch.no_grad():
            for parameter, master in self._pairs():
                master.copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Moments, masters and the place in the schedule."""
        return {
            "adam": self._adam.state_dict(),
            "step_index": self.step_index,
            "masters": [m.detach() for _, m in self._pairs()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave, for the same parameters."""
        self._adam.load_state_dict(state["adam"])
        self.step_index = int(state["step_index"])
        with torch.no_grad():
            for (_, master), saved in zip(self._pairs(), state["masters"], strict=True):
                master.copy_(saved)

    def _pairs(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Parameters that have a master copy, with it."""
        return ((p, m) for p, m in zip(self._parameters, self._masters, strict=True) if m is not p)


def lr_factor(config: TrainConfig, step: int) -> float:
    """Learning rate of step `step` (from 0) over the peak one: a linear rise over the warm-up, then the schedule's fall."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    rest = max(1, config.num_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / rest)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left
