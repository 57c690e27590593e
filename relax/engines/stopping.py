"""What ends a completion: a token, a length, or a text, wherever the token boundaries fall."""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from relax.config.model import ModelConfig
from relax.errors import ModelError
from relax.types import Completion, FinishReason, Sampling

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_MARGIN = 4  # tokens before the longest match, so that a character's first bytes are not cut off


class StopStrings:
    """Looks for stop strings in what tokens say. The tokenizer is loaded when the first request has some."""

    def __init__(self, model: ModelConfig) -> None:
        self._folder, self._trust = model.tokenizer_path or model.path, model.trust_remote_code
        self._tokenizer: Any = None
        self._lock = Lock()

    def prepare(self) -> None:
        """Loads the tokenizer. Raises `ModelError` when there is none."""
        with self._lock:
            if self._tokenizer is not None:
                return
            # here, since importing transformers takes seconds, and most runs stop at tokens alone
            from transformers import AutoTokenizer

            folder = Path(self._folder)
            if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # transformers would make an empty one
                raise ModelError(f"stop strings need a tokenizer, and {self._folder!r} has none ({_TOKENIZER_FILES[0]})")
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._folder, trust_remote_code=self._trust)
            except (OSError, ValueError, ImportError) as error:
                raise ModelError(
                    f"stop strings need a tokenizer, and {self._folder!r} holds one that does not load: {error}"
                ) from error

    @staticmethod
    def window(stops: Sequence[str]) -> int:
        """How many of the last tokens must be looked at: a token is at least one byte of text."""
        return max(len(stop.encode()) for stop in stops) + _MARGIN

    def found(self, tails: Sequence[Sequence[int]], stops: Sequence[Sequence[str]]) -> list[bool]:
        """Whether the text of each tail, the last tokens of a completion, has one of its stop strings in it."""
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return [any(stop in text for stop in wanted) for text, wanted in zip(texts, stops, strict=True)]


def reason_to_end(
    partial: Completion, sampling: Sampling, limit: int, eos_ids: Sequence[int], stop_strings: StopStrings
) -> FinishReason | None:
    """Why a completion that has come as far as `partial`, and may have `limit` tokens, is not continued; None if it is."""
    if partial.finish is not FinishReason.ABORT:
        return partial.finish
    tokens = partial.token_ids.tolist()
    if not tokens:
        return None
    if tokens[-1] in (*sampling.stop_token_ids, *eos_ids):
        return FinishReason.STOP
    if sampling.stop and stop_strings.found([tokens[-stop_strings.window(sampling.stop) :]], [sampling.stop])[0]:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= limit else None
