"""Tokens that only a chat template writes: where a row spells one out, it stays text.

    messages --hide: a private character for each--> chat template --> text --ids: spelled out again, as text--> token ids

A text without them takes the tokenizer's own way, untouched.
"""

import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax.errors import DataError

_PRIVATE = range(0xE000, 0xF8F0)  # code points that mean nothing to anybody
_TOKEN = "\uf8fe"  # which stands for the token before a text
_MARK = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)  # some tokenizers add line breaks and words as well
_HALF = re.compile("[\ud800-\udfff]")  # JSON can write one, UTF-8 cannot


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a chat template made of messages: `text`, with a private character for each control token that they spelled out."""

    control: "ControlTokens"
    text: str
    hidden: Mapping[str, str] = field(default_factory=dict)

    def part(self, start: int, end: int | None = None) -> "Rendered":
        """`text[start:end]`."""
        return Rendered(self.control, self.text[start:end], self.hidden)

    def ids(self, *, add_special_tokens: bool = False) -> list[int]:
        """The token ids. Raises `DataError` where the tokenizer cannot tell a control token from its spelling."""
        return self.control.ids(self, add_special_tokens=add_special_tokens)


class ControlTokens:
    """Those of `tokenizer`: its special tokens, media's among them, and the marks of a turn in its chat template.

    `render(messages, key, add_generation_prompt=...)` applies that. Other added tokens, such as `<think>`, are words that rows
    may use. The token of unknown characters is none, where there are any: every text may hold it.
    """

    def __init__(self, tokenizer: Any, render: Callable[..., str]) -> None:
        self._tokenizer, self._render = tokenizer, render

    def hide(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The messages with a private character in the place of each control token, and which stands for which."""
        texts = "\0".join(_texts(messages))
        found = sorted(set(self._pattern.findall(texts))) if self._tokens else []
        hidden = dict(zip((chr(code) for code in _PRIVATE if chr(code) not in texts), found, strict=False))
        if len(hidden) < len(found):
            raise DataError(f"its messages spell out {found[-1]!r}, and every private character is taken")
        private = {token: character for character, token in hidden.items()}
        return [self._without(message, private) if private else dict(message) for message in messages], hidden

    def ids(self, rendered: Rendered, *, add_special_tokens: bool = False) -> list[int]:
        """See `Rendered.ids`."""
        text = rendered.text
        if not text:
            return []
        if half := _HALF.search(text):
            raise DataError(f"half of a surrogate pair at character {half.start()}, {half[0]!a}, is not text")
        is_spelled = any(character in text for character in rendered.hidden)
        if is_spelled and not getattr(self._tokenizer, "is_fast", False):
            raise self._refusal(rendered)
        options = {"return_offsets_mapping": True} if is_spelled else {}
        found = self._tokenizer(text, add_special_tokens=add_special_tokens, **options)
        ids = [int(token) for token in found["input_ids"]]
        return list(self._spelled_out(rendered, ids, found["offset_mapping"])) if is_spelled else ids

    def _spelled_out(self, rendered: Rendered, ids: list[int], offsets: Sequence[tuple[int, int]]) -> Iterator[int]:
        """`ids`, with those of texts between control tokens that have a private character made again."""
        text, first, begin = rendered.text, 0, 0
        for place, token in enumerate(ids):
            if token in self.numbers:
                left, right = offsets[place] if any(offsets[place]) or not begin else (len(text),) * 2  # put at the end
                yield from self._part(rendered.part(begin, left), ids[first:place])
                yield token
                first, begin = place + 1, right
        yield from self._part(rendered.part(begin), ids[first:])

    def _part(self, part: Rendered, ids: list[int]) -> list[int]:
        if not any(character in part.text for character in part.hidden):
            return ids
        spelled = part.text.translate({ord(character): token for character, token in part.hidden.items()})
        for before in ("", _TOKEN):  # some tokenizers mark the beginning of a text, which a part may not be
            found = self._as_text_ids(before, spelled)
            if self._as_text_ids(before, part.text) == ids and not self.numbers & {*found}:
                return found
        raise self._refusal(part)

    def _as_text_ids(self, before: str, text: str) -> list[int]:
        ids: list[int] = self._as_text.encode(before + text, add_special_tokens=False).ids
        return ids[len(before) :]

    def _refusal(self, part: Rendered) -> DataError:
        spelled = next(token for character, token in part.hidden.items() if character in part.text)
        return DataError(f"its messages spell out {spelled!r}, which this tokenizer cannot read as text: leave it out")

    @functools.cached_property
    def numbers(self) -> frozenset[int]:
        """Their ids."""
        return frozenset(self._tokens.values())

    @functools.cached_property
    def _tokens(self) -> dict[str, int]:
        added: Mapping[int, Any] = getattr(self._tokenizer, "added_tokens_decoder", {})
        by_text = {token.content: number for number, token in added.items()}
        special = {text for text, number in by_text.items() if added[number].special}
        special |= {str(text) for text in getattr(self._tokenizer, "all_special_tokens", ())}
        wanted = (special | self._turn_marks(by_text)) & by_text.keys()
        unknown = self._tokenizer(chr(_PRIVATE[0]), add_special_tokens=False)["input_ids"] if wanted else ()
        return {text: by_text[text] for text in wanted if by_text[text] not in unknown}

    def _turn_marks(self, added: Mapping[str, int]) -> set[str]:
        """Of added tokens, what the template writes around a user's turn and first of all in an answer."""
        ask = [{"role": "user", "content": "x"}]
        try:
            turn, asked = self._render(ask, "a turn"), self._render(ask, "a turn", add_generation_prompt=True)
        except DataError:  # this template wants other messages: its marks cannot be told
            return set()
        answer = asked.removeprefix(turn)
        return {text for text in added if _MARK.fullmatch(text) and (text in turn or answer.startswith(text))}

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self._tokens, key=len, reverse=True))))

    @functools.cached_property
    def _as_text(self) -> Any:
        """A copy of the tokenizer, which is in use by others, that takes control tokens for text, and `_TOKEN` for a token."""
        from tokenizers import AddedToken  # here: what loads no tokenizer need not have it

        plain = copy.deepcopy(self._tokenizer.backend_tokenizer)
        plain.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in self._tokens])
        plain.add_tokens([AddedToken(_TOKEN, normalized=False)])
        plain.encode_special_tokens = True
        plain.no_truncation()
        plain.no_padding()
        return plain

    def _without(self, value: Any, private: Mapping[str, str]) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: private[found[0]], value)
        if isinstance(value, Mapping):
            return {self._without(name, private): self._without(inner, private) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._without(inner, private) for inner in _joined(value)]
        return value


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON-like value, texts of parts that follow one another side by side."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from (str(name), *_texts(inner))
    elif isinstance(value, list | tuple):
        for inner in _joined(value):
            yield from _texts(inner)


def _joined(parts: Sequence[Any]) -> Iterator[Any]:
    """Parts of a content, texts side by side as one."""
    for is_text, same in itertools.groupby(parts, lambda part: isinstance(part, Mapping) and part.get("type") == "text"):
        if is_text:
            yield {"type": "text", "text": "".join(str(part.get("text") or "") for part in same)}
        else:
            yield from same
