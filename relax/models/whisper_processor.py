"""From a prompt with one sound to what Whisper reads: the decoder's first tokens, and a spectrogram of its fixed window."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from relax.data.control_tokens import Rendered
from relax.data.media.decoded import Audio, Decoded
from relax.data.transcripts import transcript_template
from relax.errors import DataError, ModelError
from relax.models.processor import Kind, OmniProcessor, PreparedPrompt

_START, _NO_TIMES = "<|startoftranscript|>", "<|notimestamps|>"


class WhisperReader:
    """What `OmniProcessor` is for other models. No token stands for the sound, which all tokens hear.

    Raises `ModelError` for a folder without a processor.
    """

    token_ids: Mapping[Kind, int] = MappingProxyType({})
    hears_videos = False
    frames_per_patch = 1

    def __init__(self, folder: str | Path) -> None:
        # here, since importing transformers takes seconds that a check or a help page need not spend
        from transformers import WhisperProcessor

        try:
            processor: Any = WhisperProcessor.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, ImportError, TypeError) as error:
            raise ModelError(f"{folder}: its processor cannot be loaded: {error}") from error
        self.tokenizer, self._extractor = processor.tokenizer, processor.feature_extractor
        self.tokenizer.chat_template = self.tokenizer.chat_template or transcript_template(Path(folder))
        self._start, self._no_times, self._end = self.tokenizer.convert_tokens_to_ids([_START, _NO_TIMES, "<|endoftext|>"])

    def prepare(self, text: Rendered, media: Sequence[Decoded]) -> PreparedPrompt:
        """`text` as the chat template makes it, and its one sound, padded with silence to the window.

        Raises `DataError` for other media, a sound that is longer or of another rate, and a language that the model lacks.
        """
        ids = text.ids()
        if self._start not in ids or min(ids[ids.index(self._start) : ids.index(self._no_times)], default=0) < self._end:
            raise DataError(f"the model has no tokens for the language or task in {text.text!r}")
        if [type(medium) for medium in media] != [Audio]:
            raise DataError(f"the model hears one sound, and the prompt has {len(media)} media")
        features = {"input_features": self._spectrogram(media[0])}
        return PreparedPrompt(np.asarray(ids, np.int32), np.asarray(ids, np.int32), (), features)

    def _spectrogram(self, sound: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """`[1, bins, frames]`."""
        rate, window = self._extractor.sampling_rate, self._extractor.n_samples
        if sound.sampling_rate != rate:
            raise DataError(f"a sound has {sound.sampling_rate} samples a second, the model hears {rate}")
        if len(sound.samples) > window:
            lasts, heard = len(sound.samples) / rate, window / rate
            raise DataError(f"a sound lasts {lasts:.1f} s, and the model hears {heard:g} s: give shorter ones")
        found: np.ndarray[Any, np.dtype[np.float32]] = self._extractor(
            sound.samples, sampling_rate=rate, return_tensors="np"
        ).input_features
        return found.astype(np.float32)


def load_processor(folder: str | Path, *, trust_remote_code: bool = False) -> OmniProcessor | WhisperReader:
    """What reads prompts with media for the model in `folder`. Raises `ModelError` for a folder without a processor."""
    try:
        kind = json.loads((Path(folder) / "config.json").read_text("utf-8")).get("model_type")
    except (OSError, ValueError):
        kind = None  # a folder with the tokenizer alone, which the processor's own words are about
    return WhisperReader(folder) if kind == "whisper" else OmniProcessor(folder, trust_remote_code=trust_remote_code)
