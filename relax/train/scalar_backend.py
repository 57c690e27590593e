"""A transformers model whose last hidden state is read out as one number: a critic at each token, a reward model at the last.

    hidden before each trained token [S, d] --score--> values [S] --> loss --> gradients of sums

It shares everything with the policy's back end but the read-out. No temperature comes near it: that is a matter of sampling.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax.algorithms.objective import LossSums, ValuedTokens
from relax.algorithms.scalar_losses import ScalarLoss
from relax.config.run import RunConfig
from relax.data.packing import Group, MicroBatch, pack, plan
from relax.train.backend import TrainBatch
from relax.train.freezing import freeze
from relax.train.loading import Head, load_scalar_model
from relax.train.torch_backend import TorchBackend
from relax.types import Ragged


class ScalarBackend(TorchBackend):
    """`TrainBackend` of a model with one label (`head`: of the sequence or of each token), which learns the column `returns`.

    A head that `model.path` lacks says 0 everywhere at first. Folders that `export` writes are whole: transformers' own class
    of that kind loads them and says the same, where it has one (`models/scalar_omni.py`).
    """

    def __init__(self, config: RunConfig, loss: ScalarLoss, head: Head = "token") -> None:
        self._head, self._scalar_loss = head, loss
        super().__init__(config)

    def _load_model(self) -> Any:
        model = load_scalar_model(self._config.model, self.device, self._head)
        return freeze(model, self._config.train.freeze, is_policy=False)

    def forget_gradients(self) -> None:
        """Drops what was gathered since the last step, so that the rest can be saved."""
        self._count = 0.0
        self._flush()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def values(self, batch: TrainBatch) -> Ragged:
        """The value of what stands before each trained token, float32; 0 for the others."""
        found = np.zeros(len(batch.tokens.values), np.float32)
        groups = self._all_groups(batch)
        for part in [[group] for group in groups] if self._config.run.deterministic else [groups]:
            for micro in self._micro_batches(batch, part):
                found[micro.targets] = self._values(batch, micro).cpu().numpy()
        return Ragged(found, batch.tokens.offsets)

    def _values(self, batch: TrainBatch, micro: MicroBatch) -> Tensor:
        hidden = self._hidden(batch, micro)[torch.from_numpy(micro.sources).to(self.device)]
        head = self.model.score
        values: Tensor = head(hidden.to(head.weight.dtype)).squeeze(-1)
        return values

    def _loss(self, batch: TrainBatch, micro: MicroBatch) -> LossSums:
        def column(ragged: Ragged) -> Tensor:
            return torch.from_numpy(ragged.values[micro.targets].astype(np.float32)).to(self.device)

        assert batch.returns is not None, "values are learned from the column 'returns'"
        return self._scalar_loss(
            ValuedTokens(
                self._values(batch, micro),
                torch.from_numpy(micro.samples).to(self.device),
                len(micro.rows),
                returns=column(batch.returns),
                old_values=None if batch.values is None else column(batch.values),
            )
        )

    def _groups(self, batch: TrainBatch) -> tuple[list[Group], list[Group]]:
        """All of them: a sample without advantage still teaches."""
        return self._all_groups(batch), []

    def _micro_batches(self, batch: TrainBatch, groups: list[Group]) -> Iterator[MicroBatch]:
        for part in plan(groups, self._max_tokens, divides=not self._scalar_loss.compares_pairs):
            yield pack(batch.tokens, batch.loss_mask, part)
