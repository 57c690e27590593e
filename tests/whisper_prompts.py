"""Prompts for a tiny Whisper, and what transformers itself makes of them, one by one."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax.config.data import DataSection
from relax.data.render import Renderer
from relax.models.processor import PreparedPrompt
from relax.models.whisper_processor import WhisperReader
from tests.omni_prompts import messages, sound


def ask(reader: WhisperReader, seconds: float = 0.5, seed: int = 0, before: str = "") -> PreparedPrompt:
    """A sound, and perhaps a text from before it."""
    heard = sound(seconds, seed)
    shown = messages(heard, *([before] if before else []))
    return reader.prepare(Renderer(reader.tokenizer, DataSection()).rendered(shown), [heard])


@torch.no_grad()
def uneven(model: Any) -> Any:
    """Larger weights, and biases and norms that are not all equal: what the model hears makes a difference to what it says."""
    chance = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn(parameter.shape, generator=chance) * 0.1)
        elif "embed" not in name:
            parameter.mul_(3)
    return model.eval()


def own_logprobs(model: Any, prompt: PreparedPrompt, after: np.ndarray) -> Tensor:
    """transformers' log-probs of the tokens `after` a prompt, with no probability on tokens above the end of the text."""
    ids = torch.from_numpy(np.concatenate([prompt.ids, after]).astype(np.int64))
    heard = torch.from_numpy(prompt.features["input_features"])
    logits = model(input_features=heard, decoder_input_ids=ids[None]).logits[0].float()
    logits = logits.index_fill(-1, torch.arange(model.config.eos_token_id + 1, model.config.vocab_size), -torch.inf)
    return torch.log_softmax(logits[len(prompt.ids) - 1 : -1], -1).gather(-1, ids[len(prompt.ids) :, None])[:, 0]
