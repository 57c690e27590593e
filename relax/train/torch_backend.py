"""A transformers model trained with torch on one device.

    forward_backward:  samples -> groups -> micro-batches -> hidden states -> log-probs -> objective -> gradients of sums
    finish_step:       divide by the whole batch's count, clip, AdamW

The back end is blind to the algorithm: the objective returns a sum, a count and metrics, and that is all it knows of it.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax.algorithms.objective import LossSums, Objective, TrainedTokens
from relax.algorithms.table import make_objective
from relax.config.run import RunConfig
from relax.data.media.cost import media_cost, row_costs
from relax.data.packing import Group, MicroBatch, find_groups, pack, plan
from relax.errors import CheckpointError, ModelError, WeightSyncError
from relax.models.causal_lm import FlatForward, FusedForward
from relax.models.device import pick_device
from relax.models.forward import canary_tokens, make_forward
from relax.models.media_forward import reads_media
from relax.train.attention import PackedAttention
from relax.train.backend import StepSums, TrainBatch
from relax.train.decoder import TrainDecoder
from relax.train.freezing import freeze
from relax.train.loading import load_model, named_weights, start_recomputing, tokenizer_folder
from relax.train.logprobs import token_logprobs, top_logprobs
from relax.train.omni import omni_hidden
from relax.train.optimizer import Optimizer
from relax.types import Ragged, WeightManifest

_WEIGHTS_FILE, _STATE_FILE = "weights.safetensors", "state.pt"
_CPU_TOKENS = 2048  # a larger micro-batch gains nothing on a CPU: its activations only fall out of the cache
_CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


class TorchBackend:
    """`TrainBackend` on one device. `objective` replaces the one that `config.algorithm` names (for supervised training)."""

    def __init__(self, config: RunConfig, objective: Objective | None = None) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model is a local folder: never ask the network about it
        self._config, backend = config, config.train.backend
        self.device = pick_device(backend.device)
        torch.set_num_threads(backend.num_threads)
        self.model = self._load_model()
        self._forward = self._make_forward()
        self._objective = objective or make_objective(config.algorithm, length_budget=config.rollout.max_new_tokens)
        self._optimizer = Optimizer(list(self.model.parameters()), config.train)
        self._count = 0.0
        media = self._forward.media_ids
        self._banned = torch.tensor(media, device=self.device) if media else None
        self._row_costs = row_costs(self.model.config.to_dict())

    def _load_model(self) -> Any:
        return freeze(load_model(self._config.model, self.device), self._config.train.freeze)

    def _make_forward(self) -> FlatForward:
        backend, recompute = self._config.train.backend, self._config.train.backend.gradient_checkpointing
        self.model.eval()  # no dropout: the policy that is trained is the one that sampled
        if recompute:
            start_recomputing(self.model)
        forward = make_forward(self.model, use_fused=backend.use_fused_forward and not recompute)
        wide = next(self.model.parameters()).dtype in (torch.float32, torch.float64)
        return TrainDecoder(self.model) if isinstance(forward, FusedForward) and wide and self.device.type == "cpu" else forward

    def _hidden(self, batch: TrainBatch, micro: MicroBatch) -> Tensor:
        """`[T, d]`, after the final norm."""
        if reads_media(self._forward):
            return omni_hidden(self._forward, batch, micro, PackedAttention(micro, self.device), self.device)
        if batch.features:
            raise ModelError(f"model.path = {self._config.model.path!r} reads text alone, and prompts have media")
        ids, positions = torch.from_numpy(micro.ids).to(self.device), torch.from_numpy(micro.positions).to(self.device)
        attention = PackedAttention(micro, self.device)
        if isinstance(self._forward, TrainDecoder):
            return self._forward.hidden_packed(ids, positions, attention)
        return self._forward.hidden(ids, positions, attention)

    # -- training -----------------------------------------------------------------------------------------------------
    def forward_backward(self, batch: TrainBatch) -> StepSums:
        """Adds the gradients of the objective's sums over `batch`; a step may take any number of calls."""
        sums = StepSums()
        learning, silent = self._groups(batch)
        for micro in self._micro_batches(batch, learning):
            loss = self._loss(batch, micro)
            torch.autograd.backward(loss.total)
            self._optimizer.gather()
            self._count += loss.count
            sums.add(_read(loss))
        with torch.no_grad():
            for micro in self._micro_batches(batch, silent):
                loss = self._loss(batch, micro)
                self._count += loss.count
                sums.add(_read(loss))
        return sums

    def _all_groups(self, batch: TrainBatch) -> list[Group]:
        media = {group: media_cost(features, self._row_costs) for group, features in batch.features.items()}
        return find_groups(batch.tokens, batch.loss_mask, batch.group_ids, media)

    def _groups(self, batch: TrainBatch) -> tuple[list[Group], list[Group]]:
        """Groups with a gradient, and those that the objective has none for: these count, but need no backward pass."""
        groups = self._all_groups(batch)
        if batch.advantages is None or not self._objective.zero_without_advantage:
            return groups, []
        speaks = (batch.loss_mask.values != 0) & (batch.advantages.values != 0)
        before = np.concatenate(([0], np.cumsum(speaks)))[batch.tokens.offsets]
        parts: tuple[list[Group], list[Group]] = ([], [])
        for group in groups:
            is_silent = all(before[segment.row] == before[segment.row + 1] for segment in group.segments)
            parts[is_silent].append(group)
        return parts

    def finish_step(self) -> dict[str, float]:
        """One optimizer step over everything since the last one."""
        count, self._count = self._count, 0.0
        self._flush()
        result = self._optimizer.step(count)
        self._weights_changed()
        return result

    def _weights_changed(self) -> None:
        """The training pass keeps copies of the weights: every writer says when they are out of date."""
        if isinstance(self._forward, TrainDecoder):
            self._forward.weights_changed()

    def gradients(self) -> Mapping[str, Tensor]:
        """The gradients of sums gathered so far in this step, by Hugging Face name: not divided by any count."""
        self._flush()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def _flush(self) -> None:
        """Makes all gradients of the step the parameters' own."""
        if isinstance(self._forward, TrainDecoder):
            self._forward.flush()

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch, weights: Mapping[str, Tensor] | None = None) -> Ragged:
        """Log-probs at the sampling temperature of the tokens that `batch.loss_mask` names; 0 for the others.

        With `run.deterministic` each group is a pass of its own: its bits do not depend on the others in the batch.
        """
        if weights is None:
            return self._score(batch, self._config.rollout.temperature)
        before = {name: tensor.clone() for name, tensor in self.weights().items()}
        self._write(weights)
        try:
            return self._score(batch, self._config.rollout.temperature)
        finally:
            self._write(before)

    def _score(self, batch: TrainBatch, temperature: float) -> Ragged:
        values = np.zeros(len(batch.tokens.values), np.float32)
        groups = self._all_groups(batch)
        for part in [[group] for group in groups] if self._config.run.deterministic else [groups]:
            for micro in self._micro_batches(batch, part):
                values[micro.targets] = self._logprobs(batch, micro, temperature, with_entropy=False)[0].cpu().numpy()
        return Ragged(values, batch.tokens.offsets)

    @torch.no_grad()
    def top_logprobs(self, batch: TrainBatch, top_k: int, num_ids: int) -> tuple[Ragged, Ragged]:
        """The `top_k` most likely tokens with ids below `num_ids` in place of each trained token, likeliest first: ids int32
        and log-probs float32 `[T, top_k]` at the sampling temperature; 0 at the others."""
        shape = (len(batch.tokens.values), top_k)
        ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for micro in self._micro_batches(batch, self._all_groups(batch)):
            places, rows = np.unique(micro.sources, return_inverse=True)
            found = top_logprobs(
                self._hidden(batch, micro)[torch.from_numpy(places).to(self.device)],
                self._forward.head,
                top_k,
                num_ids,
                temperature=self._config.rollout.temperature,
                chunk=self._config.train.logprob_chunk,
                banned=self._banned,
            )
            ids[micro.targets], logprobs[micro.targets] = (tensor.cpu().numpy()[rows.reshape(-1)] for tensor in found)
        return Ragged(ids, batch.tokens.offsets), Ragged(logprobs, batch.tokens.offsets)

    def _micro_batches(self, batch: TrainBatch, groups: list[Group]) -> Iterator[MicroBatch]:
        for part in plan(groups, self._max_tokens):
            yield pack(batch.tokens, batch.loss_mask, part)

    @property
    def _max_tokens(self) -> int:
        """Of a micro-batch."""
        budget = self._config.train.max_tokens_per_micro_batch
        return min(budget, _CPU_TOKENS) if self.device.type == "cpu" else budget

    def _logprobs(
        self,
        batch: TrainBatch,
        micro: MicroBatch,
        temperature: float,
        with_entropy: bool = True,
        others: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and, if wanted, entropies of a micro-batch's trained tokens `[S]`, followed by those of `others [S, K]`,
        other tokens at the same places, flat."""
        device = self.device
        hidden = self._hidden(batch, micro)
        places, rows = np.unique(micro.sources, return_inverse=True)
        targets, of_rows = torch.from_numpy(micro.target_ids).to(device), torch.from_numpy(rows.reshape(-1)).to(device)
        if others is not None:
            targets = torch.cat((targets, others.reshape(-1)))
            of_rows = torch.cat((of_rows, of_rows.repeat_interleave(others.shape[1])))
        return token_logprobs(
            hidden[torch.from_numpy(places).to(device)],
            self._forward.head,
            targets,
            of_rows,
            temperature=temperature,
            chunk=self._config.train.logprob_chunk,
            with_entropy=with_entropy,
            entropy_gradient=self._objective.entropy_gradient,
            banned=self._banned,
        )

    def _loss(self, batch: TrainBatch, micro: MicroBatch) -> LossSums:
        return self._objective(self._trained_tokens(batch, micro))

    def _trained_tokens(self, batch: TrainBatch, micro: MicroBatch) -> TrainedTokens:
        def column(ragged: Ragged | None) -> Tensor | None:
            if ragged is None:
                return None
            return torch.from_numpy(ragged.values[micro.targets].astype(np.float32)).to(self.device)

        top_ids, count = None, len(micro.targets)
        if batch.teacher_top_ids is not None:
            top_ids = torch.from_numpy(batch.teacher_top_ids.values[micro.targets].astype(np.int64)).to(self.device)
        logprobs, entropy = self._logprobs(batch, micro, self._config.rollout.temperature, others=top_ids)
        return TrainedTokens(
            logprobs[:count],
            torch.from_numpy(micro.samples).to(self.device),
            len(micro.rows),
            advantages=column(batch.advantages),
            old=column(batch.old_logprobs),
            rollout=column(batch.rollout_logprobs),
            ref=column(batch.ref_logprobs),
            entropy=None if entropy is None else entropy[:count],
            teacher=column(batch.teacher_logprobs),
            top=None if top_ids is None else logprobs[count:].view_as(top_ids),
            top_teacher=column(batch.teacher_top_logprobs),
        )

    # -- weights ------------------------------------------------------------------------------------------------------
    def weights(self) -> Mapping[str, Tensor]:
        """The live tensors by Hugging Face name, not copies: take what is needed before the next step."""
        return dict(named_weights(self.model))

    @torch.no_grad()
    def canary(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tokens that the vocabulary fixes, none of media, and the log-probs at temperature 1 of each after the first."""
        tokens = canary_tokens(self._forward)
        return tuple(tokens.tolist()), self._canary_logprobs(tokens)

    def _canary_logprobs(self, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> tuple[float, ...]:
        mask = np.ones(len(tokens), np.uint8)
        mask[0] = 0
        batch = TrainBatch(Ragged.pack([tokens]), Ragged.pack([mask]), np.zeros(1, np.int64))
        return tuple(self._score(batch, 1.0).values[1:].tolist())

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        _copy(weights, self.weights())
        self._weights_changed()

    @torch.no_grad()
    def put_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes these tensors' values in place of its own."""
        self._write(weights)
        self._optimizer.reload()

    @torch.no_grad()
    def load_weights(self, manifest: WeightManifest) -> float:
        """Takes a published version, proven by digest and canary; returns the canary's difference.

        Raises `WeightSyncError` and keeps the weights that it has when names, shapes, digest or canary disagree.
        """
        # here, since only roles that follow the policy read publications
        from relax.weights.manifest import canary_difference
        from relax.weights.naming import check_names
        from relax.weights.receiver import read_weights

        given, own = read_weights(manifest), self.weights()
        check_names(own, given, "the trainer")
        for name, tensor in own.items():
            if given[name].shape != tensor.shape:
                raise WeightSyncError(f"{name}: published with shape {tuple(given[name].shape)}, wanted {tuple(tensor.shape)}")
        before = {name: tensor.clone() for name, tensor in own.items()}
        self._write(given)
        found = self._canary_logprobs(np.asarray(manifest.canary_tokens, np.int32))
        difference = canary_difference(manifest, found)
        if not difference <= _CANARY_TOLERANCE[self._config.model.dtype]:
            self._write(before)
            raise WeightSyncError(f"version {manifest.version}: the canary's log-probs differ by {difference:.4g}")
        self._optimizer.reload()
        return difference

    # -- files --------------------------------------------------------------------------------------------------------
    def save(self, folder: Path) -> None:
        """Weights as safetensors; optimizer, schedule and random state beside them. Call it between two steps.

        Raises `CheckpointError` when the disk does not take it.
        """
        # here, since safetensors' torch part is only for this
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        assert self._count == 0, "save between two steps: gathered gradients are not part of a checkpoint"
        state = {"optimizer": self._optimizer.state_dict(), "rng": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in self.weights().items()}, folder / _WEIGHTS_FILE)
            torch.save(state, folder / _STATE_FILE)
        except (OSError, RuntimeError, SafetensorError) as error:  # each writer has its own words for a full disk
            raise CheckpointError(f"{folder}: cannot be written: {error}") from error

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Continues exactly where `save` was called. Raises `CheckpointError` when the folder is not such a checkpoint."""
        # here, since safetensors' torch part is only for this
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            saved = load_file(folder / _WEIGHTS_FILE)
            state = torch.load(folder / _STATE_FILE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: cannot be read: {error}") from error
        own = self.weights()
        if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in own.items()}:
            raise CheckpointError(f"{folder}: its tensors are not those of model.path = {self._config.model.path!r}")
        self._write(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)

    def export(self, folder: Path) -> None:
        """Model, generation config and tokenizer or processor, as `from_pretrained` loads them. Raises `ModelError` when the
        disk does not take them."""
        # here, since importing transformers takes seconds that a check or a help page need not spend
        from safetensors import SafetensorError
        from transformers import AutoProcessor, AutoTokenizer

        is_seeing = reads_media(self._forward)  # then the tokenizer is a part of the processor
        tokenizer = (AutoProcessor if is_seeing else AutoTokenizer).from_pretrained(
            self._config.model.path if is_seeing else tokenizer_folder(self._config.model),
            local_files_only=True,
            trust_remote_code=self._config.model.trust_remote_code,
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            for file in folder.glob("*.safetensors"):
                file.chmod(0o644)  # written readable by its owner alone, unlike the files beside it
        except (OSError, RuntimeError, SafetensorError) as error:  # each writer has its own words for a full disk
            raise ModelError(f"{folder}: the model cannot be exported: {error}") from error


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])


def _read(loss: LossSums) -> StepSums:
    """Every scalar of a micro-batch in one transfer from the device."""
    scalars = [total for total, _ in loss.sums.values()] + list(loss.maxima.values())
    values = torch.stack([s.double() for s in scalars]).tolist() if scalars else []
    sums = {name: (value, count) for (name, (_, count)), value in zip(loss.sums.items(), values, strict=False)}
    return StepSums(sums, dict(zip(loss.maxima, values[len(sums) :], strict=True)))
