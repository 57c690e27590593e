"""What servers are asked about a sample's tokens, and how their answers are read. Pure: no connection is made here.

| protocol | request | log-prob of token t | likeliest tokens in its place |
|---|---|---|---|
| `vllm` | `/v1/completions`, `prompt_logprobs` | `choices[0].prompt_logprobs[t][id]` | the same table |
| `sglang` | `/generate`, `return_logprob` | `meta_info.input_token_logprobs[t][0]` | `meta_info.input_top_logprobs[t]` |
| `openai` | `/v1/completions`, `echo` | `choices[0].logprobs.token_logprobs[t]` | |

In all of them entry `t` speaks of token `t`, the alignment of relax, and the first is null, since nothing stands before it. And
in all of them the log-probs of a prompt are those at temperature 1, whatever temperature is asked for.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax.errors import ServerError

Pair = tuple[float, int]  # log-prob, id

_LEAST = -9999.0  # stands for log 0, which JSON has not
_MOST = 1e-3  # rounding may leave a log-prob a little above 0; a logit is well above


@dataclass(frozen=True, slots=True)
class Told:
    """`logprobs [T]` of the tokens, 0.0 for the first; `top [T]`: the K likeliest in place of each, likeliest first."""

    logprobs: Sequence[float]
    top: Sequence[Sequence[Pair]] = ()


@dataclass(frozen=True, slots=True)
class Protocol:
    """`path` of the request; `ask(tokens, top_k)` is its body, without the model's name; `read` takes the answer apart and may
    raise any of `LookupError`, `TypeError`, `ValueError` and `AttributeError` on one of another form."""

    path: str
    ask: Callable[[list[int], int], dict[str, Any]]
    read: Callable[[Any, list[int], int], Told]


def read_answer(protocol: Protocol, body: bytes, tokens: list[int], top_k: int) -> Told:
    """What the server says about `tokens`. Raises `ServerError` for an answer of another form, or about other tokens."""
    try:
        return protocol.read(json.loads(body), tokens, top_k)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        said = body[:200].decode("utf-8", "replace")
        raise ServerError(f"its answer is not one about {len(tokens)} tokens ({_reason(error)}): {said}") from error


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)[:200]


def _ask_vllm(tokens: list[int], top_k: int) -> dict[str, Any]:
    # it generates one token at least
    return {"prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}


def _read_vllm(answer: Any, tokens: list[int], top_k: int) -> Told:
    """Each place is a table from ids, as texts, to `{"logprob": ...}`: of its own token, and of the K likeliest."""
    places = _all_places(answer["choices"][0]["prompt_logprobs"], len(tokens))
    found = [{_id(int(number)): _logprob(entry["logprob"]) for number, entry in place.items()} for place in places]
    logprobs = [table[token] for table, token in zip(found, tokens[1:], strict=True)]
    return _told(logprobs, [[(logprob, number) for number, logprob in table.items()] for table in found], top_k)


def _ask_sglang(tokens: list[int], top_k: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": 0, "temperature": 1.0}
    asked = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    return asked | {"top_logprobs_num": top_k}


def _read_sglang(answer: Any, tokens: list[int], top_k: int) -> Told:
    """Each place is `[log-prob, id, text or null]`, and a list of such."""
    told = answer["meta_info"]
    entries = told["input_token_logprobs"]
    # the last id of a vocabulary is reported as 0, and scored as itself
    if len(entries) != len(tokens) or any(entry[1] not in (token, 0) for entry, token in zip(entries, tokens, strict=True)):
        raise ValueError("it speaks of other tokens")
    _all_places([entry if entry[0] is not None else None for entry in entries], len(tokens))
    top = _all_places(told["input_top_logprobs"], len(tokens)) if top_k else []
    pairs = [[(_logprob(entry[0]), _id(entry[1])) for entry in place] for place in top]
    return _told([_logprob(entry[0]) for entry in entries[1:]], pairs, top_k)


def _ask_openai(tokens: list[int], top_k: int) -> dict[str, Any]:
    assert top_k == 0, "the protocol names the likeliest tokens by their text"
    # not every server lets one ask for no token at all
    return {"prompt": tokens, "max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 1}


def _read_openai(answer: Any, tokens: list[int], top_k: int) -> Told:
    """The prompt's log-probs, and those of what was generated after it."""
    found = answer["choices"][0]["logprobs"]["token_logprobs"]
    if len(found) - len(tokens) not in (0, 1):
        raise ValueError(f"{len(found)} log-probs")
    return _told([_logprob(value) for value in _all_places(found[: len(tokens)], len(tokens))], [], top_k)


PROTOCOLS: Mapping[str, Protocol] = {
    "vllm": Protocol("/v1/completions", _ask_vllm, _read_vllm),
    "sglang": Protocol("/generate", _ask_sglang, _read_sglang),
    "openai": Protocol("/v1/completions", _ask_openai, _read_openai),
}


def _all_places(places: Any, count: int) -> list[Any]:
    """Those after the first token, which alone has nothing before it to be predicted from."""
    if not isinstance(places, list) or len(places) != count:
        raise ValueError(f"{len(places)} places")
    if places[0] is not None or None in places[1:]:
        raise ValueError("a first token with a log-prob, or another without")
    return places[1:]


def _told(logprobs: list[float], top: list[list[Pair]], top_k: int) -> Told:
    if not top_k:
        return Told([0.0, *logprobs])
    likeliest = [sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:top_k] for pairs in top]
    if any(len({number for _, number in pairs}) < top_k for pairs in likeliest):
        raise ValueError(f"fewer than {top_k} of the likeliest tokens at a place")
    return Told([0.0, *logprobs], [[], *likeliest])


def _logprob(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value > _MOST:
        raise ValueError(f"{value!r} is no log-prob")
    return float(max(value, _LEAST))


def _id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no token id")
    return value
