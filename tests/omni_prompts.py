"""Prompts with media for tests, and what transformers itself makes of them, one by one and without packing."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from relax.data.media.decoded import Audio, Decoded, Image, Video
from relax.models.processor import OmniProcessor, PreparedPrompt

_PARTS = {Image: "image", Video: "video", Audio: "audio"}


def image(height: int = 64, width: int = 96, seed: int = 0) -> Image:
    return Image(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def video(frames: int = 3, fps: float = 4.0, seed: int = 0) -> Video:
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, 64, 64, 3), dtype=np.uint8)
    return Video(pixels, np.arange(frames) / fps, fps)


def heard(frames: int = 4, fps: float = 2.0, seed: int = 0, seconds: float = 1.5) -> Video:
    """A video with its sound."""
    silent = video(frames, fps, seed)
    return Video(silent.frames, silent.times, fps, sound(seconds, seed))


def sound(seconds: float = 0.5, seed: int = 0) -> Audio:
    samples = np.random.default_rng(seed).standard_normal(int(16000 * seconds)) * 0.1
    return Audio(samples.astype(np.float32), 16000)


def messages(*content: Decoded | str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": c} if isinstance(c, str) else {"type": _PARTS[type(c)]} for c in content]
    return [{"role": "user", "content": parts}]


def prepare(processor: OmniProcessor, *content: Decoded | str) -> PreparedPrompt:
    return processor.prepare(processor.render(messages(*content)), [c for c in content if not isinstance(c, str)])


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Larger weights, so that what a model sees and hears makes a difference to what it says."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    return model.eval()


def plain_inputs(core: Any, ids: np.ndarray, prompt: PreparedPrompt) -> dict[str, Any]:
    """The arguments of transformers' own forward pass and `generate`, for one prompt and perhaps tokens after it."""
    tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
    given = {name: torch.from_numpy(values) for name, values in prompt.features.items()}
    if (lengths := given.pop("audio_lengths", None)) is not None:
        sounds = torch.split(given["input_features"], lengths.tolist())
        given["input_features"] = pad_sequence(list(sounds), batch_first=True).transpose(1, 2)
        given["feature_attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    given.pop("audio_passes", None)  # transformers hears all sounds in one pass
    if given.pop("video_is_heard", None) is not None:
        given["use_audio_in_video"] = True
    if "VL" in type(core).__name__:
        given["mm_token_type_ids"] = (tokens == core.config.image_token_id) + 2 * (tokens == core.config.video_token_id)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **given}


def plain_logprobs(model: Any, prompt: PreparedPrompt, after: tuple[int, ...] = ()) -> Tensor:
    """transformers' log-probs of each token after the first, of a prompt and tokens `after` it."""
    core = getattr(model, "thinker", model)
    ids = np.concatenate([prompt.ids, after]).astype(np.int64)
    logits = core(**plain_inputs(core, ids, prompt)).logits[0].float()
    return torch.log_softmax(logits[:-1], -1).gather(-1, torch.from_numpy(ids[1:, None]))[:, 0]
