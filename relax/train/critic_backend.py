"""A critic: a transformers model whose last hidden state says how much reward is still to come.

    hidden before each trained token [S, d] --value head--> values [S] --> value loss --> gradients of sums

It shares everything with the policy's back end but the read-out. No temperature comes near it: that is a matter of sampling.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relax.algorithms.objective import LossSums, ValuedTokens
from relax.algorithms.table import make_value_loss
from relax.config.algorithm import CustomConfig, PPOConfig
from relax.config.run import RunConfig
from relax.data.packing import Group, MicroBatch, find_groups
from relax.train.backend import TrainBatch
from relax.train.torch_backend import TorchBackend
from relax.types import Ragged


class CriticBackend(TorchBackend):
    """`TrainBackend` of the critic; `config.model` and `config.train` are the critic's, `config.algorithm` that of the run.

    A batch needs `values` (those that its advantages were computed with) and `returns`. The head starts at 0 everywhere, so
    that the first advantages are those without a critic; it is a float32 weight like any other, and saved with them.
    """

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.algorithm, PPOConfig | CustomConfig), f"{config.algorithm.type} has no critic"
        super().__init__(config)
        self._value_loss = make_value_loss(config.algorithm, length_budget=config.rollout.max_new_tokens)

    def _load_model(self) -> Any:
        model = super()._load_model()
        model.value_head = nn.Linear(model.get_output_embeddings().in_features, 1).to(self.device)
        nn.init.zeros_(model.value_head.weight)
        nn.init.zeros_(model.value_head.bias)
        return model

    def forget_gradients(self) -> None:
        """Drops what was gathered since the last step, so that the rest can be saved."""
        self._count = 0.0
        self._flush()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def values(self, batch: TrainBatch) -> Ragged:
        """The value of what stands before each trained token, float32; 0 for the others."""
        found = np.zeros(len(batch.tokens.values), np.float32)
        groups = find_groups(batch.tokens, batch.loss_mask, batch.group_ids)
        for part in [[group] for group in groups] if self._config.run.deterministic else [groups]:
            for micro in self._micro_batches(batch, part):
                found[micro.targets] = self._values(micro).cpu().numpy()
        return Ragged(found, batch.tokens.offsets)

    def _values(self, micro: MicroBatch) -> Tensor:
        hidden = self._hidden(micro)[torch.from_numpy(micro.sources).to(self.device)]
        head = self.model.value_head
        values: Tensor = head(hidden.to(head.weight.dtype)).squeeze(-1)
        return values

    def _loss(self, batch: TrainBatch, micro: MicroBatch) -> LossSums:
        def column(ragged: Ragged | None, name: str) -> Tensor:
            assert ragged is not None, f"a critic needs the column {name!r}"
            return torch.from_numpy(ragged.values[micro.targets].astype(np.float32)).to(self.device)

        return self._value_loss(
            ValuedTokens(
                self._values(micro),
                torch.from_numpy(micro.samples).to(self.device),
                len(micro.rows),
                old_values=column(batch.values, "values"),
                returns=column(batch.returns, "returns"),
            )
        )

    def _groups(self, batch: TrainBatch) -> tuple[list[Group], list[Group]]:
        """All of them: a sample without advantage still teaches the critic."""
        return find_groups(batch.tokens, batch.loss_mask, batch.group_ids), []
