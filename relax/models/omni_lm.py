"""The flat forward pass of models that see and hear: the text model runs on token embeddings with encoders' results among them.

    features --encoders, once a prompt--> Encoded --+
    ids [T] --embed--> tokens, media where their ids stand --> text model: positions [3, T], attend --> hidden [T, d]

Any transformers model fits that has `get_image_features` and its like: encoders, position indices and layers are its own. Not
its own is attention, which the caller hands in, so that any number of prompts may lie end to end.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.dlpack import from_dlpack

from relax.errors import ModelError
from relax.models.causal_lm import Attend, use_flat_attention

Features = Mapping[str, Any]  # numpy arrays or tensors by name, as `models/processor.py` describes them

WITHOUT_SPEECH = {"enable_audio_output": False}  # a model whose configuration is loaded with this does not speak

_KINDS = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_PLACES = (*_GRIDS.values(), "video_second_per_grid", "audio_lengths", "video_is_heard")  # what positions depend on
_MOST_KNOWN = 1024
_TYPES = {"image": 1, "video": 2, "audio": 3}


def is_omni(config: Any) -> bool:
    """Whether `config` is of a model that reads more than text."""
    return is_whisper(config) or any(
        getattr(config, f"{part}_config", None) is not None for part in ("thinker", "vision", "audio")
    )


def is_whisper(config: Any) -> bool:
    """Whether `config` is of an encoder of sounds with a decoder that attends to it."""
    return bool(config.model_type == "whisper")


def auto_class(config: Any) -> str:
    """The transformers class that builds and loads a model with a vocabulary head."""
    if is_whisper(config):
        return "AutoModelForSpeechSeq2Seq"
    return "AutoModelForMultimodalLM" if is_omni(config) else "AutoModelForCausalLM"


@dataclass(frozen=True, slots=True)
class Encoded:
    """What encoders made of the media of one or more prompts, by kind and in order: `embeds [N, d]`, and `deep`, further
    `[N, d]` that the first layers of the text model add to their results (DeepStack)."""

    embeds: Mapping[str, Tensor] = field(default_factory=dict)
    deep: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    @staticmethod
    def join(parts: Sequence["Encoded"]) -> "Encoded":
        """Those of several prompts that will lie end to end in this order."""
        kinds = {kind for part in parts for kind in part.embeds}
        having = {kind: [part for part in parts if kind in part.embeds] for kind in kinds}
        deep = {
            kind: [torch.cat(layer) for layer in zip(*(part.deep.get(kind, ()) for part in having[kind]), strict=True)]
            for kind in kinds
        }
        return Encoded({kind: torch.cat([part.embeds[kind] for part in having[kind]]) for kind in kinds}, deep)


class OmniForward:
    """A `MediaForward` on the transformers model's own parameters. `media_ids` are the tokens that stand for media."""

    hears_throughout = False

    def __init__(self, model: Any) -> None:
        self.model = model
        self._core = getattr(model, "thinker", model)
        self._text = self._core.get_decoder()
        use_flat_attention(self._text)
        config = self._text.config
        self.num_layers = int(config.num_hidden_layers)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.token_ids = {kind: token for kind in _KINDS if (token := media_token_id(self._core.config, kind)) is not None}
        self.media_ids = tuple(sorted(self.token_ids.values()))
        parts = (self._core, getattr(self._core, "model", None))
        owner: Any = next((part for part in parts if hasattr(part, "get_rope_index")), None)
        if owner is None or not self.media_ids:
            raise ModelError(
                f"{type(model).__name__} does not say where its media stand (get_rope_index): relax cannot pack it"
            )
        self._find_positions = owner.get_rope_index
        self._known: dict[bytes, tuple[Tensor, float]] = {}  # a prompt is asked about by several passes, each time at length

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        head = self._core.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(self.model).__name__} has no vocabulary head: relax trains models that write text")
        return head.weight, getattr(head, "bias", None)

    # -- media --------------------------------------------------------------------------------------------------------
    def encode(self, *prompts: Features) -> Encoded:
        """Runs the encoders on all media of the prompts, in order, with a graph where gradients are enabled: what is seen in
        one pass, what is heard prompt by prompt. Some encoders pad sounds to the longest one beside them, and what they hear
        then depends on it: an engine, too, has only one prompt's at a time."""
        embeds: dict[str, Tensor] = {}
        deep: dict[str, Sequence[Tensor]] = {}
        for kind, name in _KINDS.items():
            if given := [features for features in prompts if name in features]:
                embeds[kind], deep[kind] = self._encode(kind, given)
        return Encoded(embeds, deep)

    def _encode(self, kind: str, prompts: Sequence[Features]) -> tuple[Tensor, Sequence[Tensor]]:
        if kind not in _GRIDS:
            return torch.cat([self._heard(features) for features in prompts]), ()
        pixels = self._pixels([features[_KINDS[kind]] for features in prompts])
        grid = torch.cat([as_tensor(features[_GRIDS[kind]]) for features in prompts]).to(pixels.device)
        found = getattr(self._core, f"get_{kind}_features")(pixels, grid)
        deep = getattr(found, "deepstack_features", None) or ()
        return _flat(found.pooler_output), [_flat(layer) for layer in deep]

    def _pixels(self, parts: Sequence[Any]) -> Tensor:
        """`[patches, d]` on the model's device, in one copy, which encoders may write to. Of a patch of a still image there may
        be one frame alone (`without_repeats`); it is seen in all of them, as processors have it."""
        config, weight = self._core.config.vision_config, self._text.embed_tokens.weight
        shape = (sum(map(len, parts)), config.in_channels, config.temporal_patch_size, config.patch_size**2)
        views = [_view(part) for part in parts]
        pixels, end = torch.empty(shape, dtype=views[0].dtype, device=weight.device), 0
        for view in views:
            start, end = end, end + len(view)
            pixels[start:end] = view.to(weight.device).view(len(view), shape[1], -1, shape[3])
        return pixels.flatten(1)

    def _heard(self, features: Features) -> Tensor:
        given = _view(features[_KINDS["audio"]]).to(self._text.embed_tokens.weight.device)
        sounds = torch.split(given, as_tensor(features["audio_lengths"]).tolist())
        # A sound that is padded to a longer one beside it is heard otherwise: a turn's are not padded to those of a later one.
        turns = torch.split(torch.arange(len(sounds)), as_tensor(features.get("audio_passes", [len(sounds)])).tolist())
        return torch.cat([self._hear([sounds[number] for number in turn.tolist()]) for turn in turns])

    def _hear(self, sounds: Sequence[Tensor]) -> Tensor:
        mask = pad_sequence([torch.ones(len(sound), device=sound.device) for sound in sounds], batch_first=True).long()
        padded = pad_sequence(list(sounds), batch_first=True).transpose(1, 2)
        return _flat(self._core.get_audio_features(padded, feature_attention_mask=mask).last_hidden_state)

    def encode_prompt(self, ids: Sequence[int] | np.ndarray[Any, Any], features: Features) -> Encoded:
        """Of one prompt. Raises `ModelError` where what encoders give does not fill its places."""
        encoded = self.encode(features)
        self.check(torch.from_numpy(np.asarray(ids, np.int64)), encoded)
        return encoded

    def join(self, parts: Sequence[tuple[Encoded | None, int]]) -> Encoded:
        """Of several prompts that will lie end to end in this order, however many tokens they have."""
        return Encoded.join([encoded for encoded, _ in parts if encoded is not None])

    def encode_packed(self, prompts: Sequence[tuple[Features | None, int]]) -> Encoded:
        """Of several prompts that will lie end to end, however many tokens they have."""
        return self.encode(*(features for features, _ in prompts if features))

    def touch(self, seen: Encoded | None = None) -> Tensor:
        """Zero, through every encoder that `seen` did not come from: so each micro-batch reaches the same parameters, with
        gradients that are exactly zero where there was nothing to see or hear."""
        total: Tensor = self._text.embed_tokens.weight.new_zeros(())
        kinds = set(seen.embeds) if seen is not None else set()
        if "image" in self.token_ids and not kinds & {"image", "video"}:
            total = total + _nothing(*self._encode("image", [self._blank_image]))
        if "audio" in self.token_ids and "audio" not in kinds:
            total = total + _nothing(*self._encode("audio", [self._blank_sound]))
        return total

    @cached_property
    def _blank_image(self) -> Features:
        config = self._core.config.vision_config
        side, patch = config.spatial_merge_size, config.patch_size
        width = config.in_channels * config.temporal_patch_size * patch**2
        return {"pixel_values": torch.zeros(side**2, width), "image_grid_thw": torch.tensor([[1, side, side]])}

    @cached_property
    def _blank_sound(self) -> Features:
        frames = 2 * self._core.config.audio_config.n_window
        return {"input_features": torch.zeros(frames, self._core.config.audio_config.num_mel_bins), "audio_lengths": [frames]}

    def positions(self, ids: Sequence[int] | np.ndarray[Any, Any], features: Features | None) -> tuple[Tensor, float]:
        """`[3, P]` float32 on the host, and what a later token's place has to be raised by: token `t >= P` stands at `t +` it.

        Raises `ModelError` where the ids have not as many places as `features` have media.
        """
        if not features:
            return torch.arange(len(ids), dtype=torch.float32).expand(3, -1), 0.0
        places = [np.asarray(ids, np.int64), *(np.asarray(features[name]) for name in _PLACES if name in features)]
        key = b"".join(array.tobytes() for array in places)
        if key not in self._known:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._index(torch.from_numpy(np.array(ids, np.int64))[None], features)
        return self._known[key]

    def _index(self, tokens: Tensor, features: Features) -> tuple[Tensor, float]:
        self._check_places(tokens[0], features)
        types = torch.zeros_like(tokens)
        for kind, token in self.token_ids.items():
            types[tokens == token] = _TYPES[kind]
        # A mark that begins nothing is text: a policy may write one, and the models' own indexing would look for its medium.
        sees, hears = (getattr(self._core.config, f"{sense}_start_token_id", -1) for sense in ("vision", "audio"))
        begins_nothing = (types == 0) & (types.roll(-1, 1) == 0)
        if "video_is_heard" in features:  # such a video begins with both
            begins_nothing &= (tokens != sees) | (tokens.roll(-1, 1) != hears) | (types.roll(-2, 1) == 0)
        tokens[begins_nothing & ((tokens == sees) | (tokens == hears))] = 0
        given = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "mm_token_type_ids": types,
            "second_per_grids": _host(features.get("video_second_per_grid")),
            "second_per_grid_ts": _host(features.get("video_second_per_grid")),
            "audio_seqlens": _host(features.get("audio_lengths")),
            "use_audio_in_video": "video_is_heard" in features,
            **{name: _host(features.get(name)) for name in _GRIDS.values()},
        }
        asked = inspect.signature(self._find_positions).parameters
        try:
            found, delta = self._find_positions(**{name: value for name, value in given.items() if name in asked})
        except (ValueError, IndexError, RuntimeError, StopIteration, TypeError) as error:
            raise ModelError(f"a prompt's media do not fit its token ids: {type(error).__name__}: {error}") from error
        return found[:, 0].float(), float(delta.reshape(-1)[0])

    def _check_places(self, tokens: Tensor, features: Features) -> None:
        merge = self._core.config.vision_config.spatial_merge_size**2 if hasattr(self._core.config, "vision_config") else 1
        for kind, name in _GRIDS.items():
            if kind in self.token_ids:
                places = int((tokens == self.token_ids[kind]).sum())
                wanted = int(_host(features[name]).prod(-1).sum()) // merge if name in features else 0  # type: ignore[union-attr]
                if places != wanted:
                    raise ModelError(f"a prompt has {places} tokens for {kind}s, its {kind}s take {wanted}")

    # -- text ---------------------------------------------------------------------------------------------------------
    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, encoded: Encoded | None = None) -> Tensor:
        """`ids [T]`, `positions [3, T]` (or `[T]` for text) -> `[T, d]`, after the final norm.

        `encoded` holds the media of all prompts in `ids`, in order. Raises `ModelError` where they do not fill their places.
        """
        x: Tensor = self._text.embed_tokens(ids)
        options: dict[str, Any] = {}
        if encoded is not None:
            self.check(ids, encoded)
        if encoded is not None and encoded.embeds:
            x, layers = self._place(x, ids, encoded)
            if layers:
                options = {"visual_pos_masks": torch.ones_like(ids, dtype=torch.bool)[None], "deepstack_visual_embeds": layers}
        if positions.ndim == 1:
            positions = positions.expand(3, -1)
        out = self._text(
            inputs_embeds=x[None], position_ids=positions[:, None], use_cache=False, relax_attend=attend, **options
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def check(self, ids: Tensor, encoded: Encoded) -> None:
        """Raises `ModelError` where the media in `encoded` do not fill their places in `ids`."""
        for kind, token in self.token_ids.items():
            places, embeds = int((ids == token).sum()), len(encoded.embeds.get(kind, ()))
            if places != embeds:
                raise ModelError(f"{places} tokens stand for {kind}s, whose encoder gives {embeds} embeddings")

    def _place(self, x: Tensor, ids: Tensor, encoded: Encoded) -> tuple[Tensor, list[Tensor]]:
        """Token embeddings with media among them, and what the first layers are to add, zero at places of text."""
        layers = [torch.zeros_like(x) for _ in range(max(len(deep) for deep in encoded.deep.values()))]
        for kind, embeds in encoded.embeds.items():
            mask = (ids == self.token_ids[kind])[:, None]
            x = x.masked_scatter(mask, embeds.to(x.dtype))
            layers[: len(encoded.deep[kind])] = [
                layer.masked_scatter(mask, deep.to(x.dtype)) for layer, deep in zip(layers, encoded.deep[kind], strict=False)
            ]
        return x, layers


def media_token_id(config: Any, kind: str) -> int | None:
    """The token that stands for media of this kind, or none: `config` is that of the model, or of its thinker."""
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    return None


def _flat(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """`[N, d]` of what may come one medium at a time."""
    joined: Tensor = parts.flatten(0, -2) if isinstance(parts, Tensor) else torch.cat(list(parts))
    return joined


def _nothing(embeds: Tensor, deep: Sequence[Tensor]) -> Tensor:
    total = embeds.sum()
    for layer in deep:
        total = total + layer.sum()
    return total * 0.0


def _host(values: Any) -> Tensor | None:
    return None if values is None else as_tensor(values).cpu()


def _view(values: Any) -> Tensor:
    """What nobody writes to, also of arrays that are read-only."""
    return from_dlpack(values) if isinstance(values, np.ndarray) else torch.as_tensor(values)


def as_tensor(values: Any) -> Tensor:
    """Arrays of media workers and of the transfer queue are read-only, and torch knows no such tensors."""
    return torch.tensor(values) if isinstance(values, np.ndarray) and not values.flags.writeable else torch.as_tensor(values)
