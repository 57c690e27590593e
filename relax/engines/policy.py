"""The model that an engine generates with: its architecture from the model folder, its weights from publications only.

manifest -> names, shapes, types -> bucket by bucket: read (digest), copy -> swap in -> canary -> in use
                                                                                  \\-> swap back, WeightSyncError
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relax.config.model import ModelConfig
from relax.engines.attention import attend_within
from relax.errors import EngineError, ModelError, WeightSyncError
from relax.models.causal_lm import FlatForward, check_attention, is_fusable
from relax.models.decoder import Decoder, RotaryTable
from relax.models.forward import make_forward
from relax.models.media_forward import reads_media
from relax.models.omni_lm import WITHOUT_SPEECH, auto_class, is_omni
from relax.types import WeightManifest
from relax.weights.manifest import canary_difference
from relax.weights.naming import check_names
from relax.weights.receiver import read_buckets

log = logging.getLogger("relax.engines")

# Largest canary difference, by data type of the weights.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class _Staged:
    """Copies of a version's weights, checked but not yet in use."""

    manifest: WeightManifest
    decoder: Decoder | None  # of the fused path
    tensors: Mapping[str, Tensor]  # of the other


@dataclass(frozen=True, slots=True)
class _Held:
    """What the current weights were proven by."""

    digest: str
    canary_tokens: tuple[int, ...]
    canary_logprobs: Tensor  # as they are computed here, float32 on the CPU


class Policy:
    """Architecture, current weights and their version, -1 before the first. `stage` may run beside `take` and the forward."""

    def __init__(self, model: ModelConfig, device: torch.device, *, use_fused: bool) -> None:
        # here, since importing transformers takes seconds that a check or a help page need not spend
        import transformers
        from huggingface_hub.errors import StrictDataclassError
        from transformers.initialization import no_init_weights

        self.device, self.dtype = device, getattr(torch, model.dtype)
        options = {"trust_remote_code": model.trust_remote_code}
        try:
            config = transformers.AutoConfig.from_pretrained(model.path, **options, **WITHOUT_SPEECH)
            text = config.get_text_config()
            check_attention(text)
            is_fused = use_fused and not is_omni(config) and is_fusable(text) and RotaryTable.fits(text)
            # No weights yet: shapes without storage for the fused path, storage without values for the other.
            with torch.device("meta") if is_fused else nullcontext(), no_init_weights():
                skeleton = getattr(transformers, auto_class(config)).from_config(config, dtype=self.dtype, **options)
        except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
            raise ModelError(
                f"model.path = {model.path!r} is not a causal language model that can be built: {error}"
            ) from error
        skeleton.tie_weights()  # which goes by the board with the initialisation
        skeleton.eval()
        self._config = text
        self._expected = _expected_tensors(skeleton)
        self._rotary: RotaryTable | None = None
        self._module: nn.Module | None = None
        self._forward: FlatForward | None = None
        if is_fused:
            rotary = skeleton.model.rotary_emb
            self._rotary = RotaryTable(type(rotary)(config=text), self.dtype, device)
        else:
            self._module = skeleton.to(device)
            self._forward = make_forward(skeleton, use_fused=False)
        self.omni = self._forward if reads_media(self._forward) else None
        self.media_ids = self.omni.media_ids if self.omni else ()
        self._banned = torch.tensor(self.media_ids, device=device) if self.media_ids else None
        self._held: _Held | None = None
        self.version = -1
        self.is_asleep = False
        self.eos_ids = _eos_ids(model.path, text)
        self.max_context = _max_context(model, text)
        self.vocab_size = int(text.vocab_size)

    @property
    def forward(self) -> FlatForward:
        """The forward pass with the current weights; `EngineError` before there are any."""
        if self._forward is None or self.version < 0:
            raise EngineError("no weights loaded: the engine generates once it has taken its first published version")
        return self._forward

    def reserve(self, num_positions: int) -> None:
        """To be called before positions up to `num_positions - 1` are computed."""
        if self._rotary is not None:
            self._rotary.reserve(num_positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [n, d]` -> `[n, V]`, -inf for tokens that stand for media, which nobody may write."""
        logits = F.linear(hidden, *self.forward.head)
        if self._banned is not None:
            logits.index_fill_(-1, self._banned, -torch.inf)
        return logits

    def stage(self, manifest: WeightManifest) -> _Staged:
        """Checks, reads and copies a version, one bucket after the other.

        Raises `WeightSyncError` that says what disagrees; nothing has changed then.
        """
        self._check(manifest)
        if self._rotary is not None:
            decoder = Decoder(self._config, self._rotary, self._room("meta"), self.device)
            for bucket in read_buckets(manifest):
                decoder.copy(bucket)
            return _Staged(manifest, decoder, {})
        room = self._room(self.device)
        for bucket in read_buckets(manifest):
            _copy(bucket, room)
        return _Staged(manifest, None, room)

    def _room(self, device: torch.device | str) -> dict[str, Tensor]:
        return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in self._expected.items()}

    def _check(self, manifest: WeightManifest) -> None:
        check_names(self._expected, manifest.tensors, "the engine")
        for name, (shape, dtype) in self._expected.items():
            kind, found, _ = manifest.tensors[name]
            wanted = str(dtype).removeprefix("torch.")
            if tuple(found) != shape or kind != wanted:
                raise WeightSyncError(
                    f"version {manifest.version}: {name} is {kind} {list(found)}, the engine expects {wanted} {list(shape)}"
                )
        if len(manifest.canary_tokens) < 2 or len(manifest.canary_logprobs) != len(manifest.canary_tokens) - 1:
            raise WeightSyncError(
                f"version {manifest.version}: {len(manifest.canary_tokens)} canary tokens with "
                f"{len(manifest.canary_logprobs)} log-probs; a canary has a log-prob of each token but the first"
            )

    def take(self, staged: _Staged) -> float:
        """Swaps staged weights in and proves them; returns the canary's difference.

        Raises `WeightSyncError`, with the old weights back in place, when the canary disagrees.
        """
        manifest = staged.manifest
        version, undo = self.version, self._swap(staged)
        self.version = manifest.version
        try:
            logprobs = self._canary(manifest)
            difference = self._difference(manifest, logprobs, version)
        except BaseException:
            undo()
            self.version = version
            raise
        self._held = _Held(manifest.digest, tuple(manifest.canary_tokens), logprobs)
        self.is_asleep = False
        return difference

    def holds(self, manifest: WeightManifest) -> bool:
        """Whether the current weights are those of `manifest`, whatever their version."""
        held = self._held
        return held is not None and (held.digest, held.canary_tokens) == (manifest.digest, tuple(manifest.canary_tokens))

    def renumber(self, manifest: WeightManifest) -> float:
        """Takes the version of weights that are held; returns the canary's difference, as `take` does."""
        assert self._held is not None
        difference = self._difference(manifest, self._held.canary_logprobs, self.version)
        self.version = manifest.version
        return difference

    def sleep(self) -> None:
        """Lets the weights go. `take` ends the sleep."""
        if self._module is not None:
            slots = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
            for name, (_, dtype) in self._expected.items():
                slots[name].data = torch.empty(0, dtype=dtype, device=self.device)
        else:
            self._forward = None
        self._held, self.version, self.is_asleep = None, -1, True
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the trainer may be another process

    def _swap(self, staged: _Staged) -> Callable[[], None]:
        """Puts the staged weights in place; calling the result puts the old ones back."""
        if staged.decoder is not None:
            before, self._forward = self._forward, staged.decoder

            def undo() -> None:
                self._forward = before

            return undo
        assert self._module is not None
        slots = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        old = {name: slots[name].data for name in staged.tensors}
        for name, tensor in staged.tensors.items():
            slots[name].data = tensor

        def put_back() -> None:
            for name, tensor in old.items():
                slots[name].data = tensor

        return put_back

    def _canary(self, manifest: WeightManifest) -> Tensor:
        """The canary's log-probs under the current weights, float32 on the CPU."""
        tokens = torch.tensor(manifest.canary_tokens, device=self.device)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise WeightSyncError(
                f"version {manifest.version}: a canary token is outside of the vocabulary of {self.vocab_size}"
            )
        self.reserve(len(tokens))
        hidden = self.forward.hidden(tokens, torch.arange(len(tokens), device=self.device), attend_within([len(tokens)]))
        logits = self.logits(hidden[:-1]).float()
        return torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0].cpu()

    def _difference(self, manifest: WeightManifest, logprobs: Tensor, version: int) -> float:
        """The difference to the trainer's log-probs; `WeightSyncError` when it is too large."""
        difference = canary_difference(manifest, logprobs.tolist())
        tolerance = TOLERANCE[self.dtype]
        if not difference <= tolerance:  # NaN as well
            raise WeightSyncError(
                f"version {manifest.version}: the canary's log-prob differs by {difference:.3g}, "
                f"at most {tolerance:g} is allowed; the engine goes on with version {version}"
            )
        return difference


def _copy(bucket: Mapping[str, Tensor], room: Mapping[str, Tensor]) -> None:
    for name, tensor in bucket.items():
        room[name].copy_(tensor)


def _expected_tensors(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each tensor that a publication holds: a tied one under its first name, persistent buffers included."""
    saved, found = model.state_dict().keys(), {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in saved:
            found[name] = (tuple(tensor.shape), tensor.dtype)
    return found


def _eos_ids(path: str, config: Any) -> tuple[int, ...]:
    """Every token that the model's folder calls the end, in generation_config.json or config.json."""
    from transformers import GenerationConfig

    sources = [getattr(config, "eos_token_id", None)]
    try:
        sources.append(GenerationConfig.from_pretrained(path).eos_token_id)
    except OSError:
        log.debug("%s has no generation_config.json: config.json alone says what ends a response", path)
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, list | tuple) else [] if source is None else [source])
    return tuple(sorted(ids))


def _max_context(model: ModelConfig, config: Any) -> int:
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    limit = model.max_context or next(filter(None, named), None)
    if limit is None:
        raise ModelError(f"model.path = {model.path!r}: config.json has no max_position_embeddings; set model.max_context")
    return int(limit)
