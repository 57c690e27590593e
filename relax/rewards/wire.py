"""Messages between a reward pool and its workers: JSON behind a length of four bytes, little-endian.

JSON, not a binary form, since answers may be whole numbers of any size.
"""

import struct
from typing import Any, TypeVar

import msgspec

PROGRESS = struct.Struct("<dq")  # monotonic seconds when the running call began, its number in the frame + 1 (0: none yet)
MAX_MESSAGE_BYTES = 1 << 30
T = TypeVar("T")


class Setup(msgspec.Struct):
    """First message to a worker: the rewards that it computes, and where modules are looked for."""

    rewards: list[dict[str, Any]]
    sys_path: list[str]


class Kind(msgspec.Struct):
    """How one reward is called; `note`: what the person who runs the job should know of it, or nothing."""

    is_async: bool
    per_group: bool
    note: str = ""


class Ready(msgspec.Struct, tag=True):
    """The rewards are imported; one kind for each."""

    kinds: list[Kind]


class Refused(msgspec.Struct, tag=True):
    """The reward cannot be used; the worker ends."""

    error: str


class Context(msgspec.Struct):
    """What the calls of one prompt share. `prompt` is a text or a list of chat messages."""

    prompt: Any
    answer: Any
    metadata: dict[str, Any]


class Call(msgspec.Struct):
    """One call of a reward function: one response, or a group's. `context` is an index into the frame's, `reward` into the
    worker's."""

    context: int
    reward: int
    responses: list[str]


class Frame(msgspec.Struct):
    """Calls for one worker, all of async rewards or none."""

    contexts: list[Context]
    calls: list[Call]


class Scored(msgspec.Struct, omit_defaults=True):
    """One response: `value`, or `error`."""

    value: float | None = None
    parts: dict[str, float] = {}
    error: str | None = None


class CallResult(msgspec.Struct):
    """All responses of call `number` of the frame."""

    number: int
    scored: list[Scored]


class Results(msgspec.Struct, tag=True):
    """Calls that have ended since the last such message."""

    results: list[CallResult]


def pack(message: msgspec.Struct) -> bytes:
    """The bytes of one message. Raises `TypeError` when it holds what JSON cannot."""
    body = msgspec.json.encode(message, enc_hook=_plain)
    if len(body) > MAX_MESSAGE_BYTES:
        raise TypeError(f"{len(body)} bytes are too many for one message")
    return len(body).to_bytes(4, "little") + body


def unpack(body: bytes, kind: type[T]) -> T:
    """The message; raises `msgspec.MsgspecError` when it is not of this kind."""
    return msgspec.json.decode(body, type=kind)


def past_limit(time_limit_s: float, why: str = "") -> str:
    """What is said of a response whose scoring took too long; `why`: what it waited for, where that is known."""
    return f"the reward ran past reward.time_limit_s = {time_limit_s:g}{'; ' if why else ''}{why}"


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()  # numpy arrays and scalars
    raise TypeError(f"a {type(value).__name__} cannot be sent to a reward worker")
