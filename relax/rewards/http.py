"""A request to a server of somebody else's, sent again with growing pauses while what is wrong may pass.

Rewards and teachers ask over HTTP. No answer is an error of that request, never a number.
"""

import asyncio
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from relax.errors import ServerError

MAX_ANSWER_BYTES = 64 << 20
REPEATED = frozenset({408, 425, 429, 500, 502, 503, 504})
LONGEST_BACKOFF_S = 30.0
NO_ANSWER = (ServerError, aiohttp.ClientError, TimeoutError, OSError)  # all that `post` raises

_jitter = random.Random(os.getpid())  # so that those who were refused together do not come back together


def open_session(headers: Mapping[str, str], token_env: str | None, time_limit_s: float) -> aiohttp.ClientSession:
    """A session for a batch of requests: connections that a server closed meanwhile are no errors then. `time_limit_s`: of each
    request; `token_env`: the environment variable of a token to send, which is set."""
    token = {} if token_env is None else {"Authorization": f"Bearer {os.environ[token_env]}"}
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=time_limit_s),
        headers={**headers, **token},
        connector=aiohttp.TCPConnector(limit=0),  # whoever asks bounds the requests, and none waits for a connection
    )


async def post(
    session: aiohttp.ClientSession,
    url: str,
    content: Any,
    *,
    retries: int,
    backoff_s: float,
    on_failure: Callable[[Exception], None] = lambda error: None,
) -> bytes:
    """The body of the answer to `content` as JSON. `on_failure`: is told why it is asked again. Raises one of `NO_ANSWER`;
    `ServerError` for a refusal."""
    for attempt in range(retries + 1):
        is_last = attempt == retries
        wait_s = min(backoff_s * 2**attempt, LONGEST_BACKOFF_S) * _jitter.uniform(0.75, 1.25)
        try:
            async with session.post(url, json=content, allow_redirects=False) as answer:
                body = await _body(answer)
                if answer.status == 200:
                    return body
                text, may_pass = body[:200].decode("utf-8", "replace").strip(), answer.status in REPEATED
                refusal = ServerError(f"it answered {answer.status} {answer.reason}: {text}", may_pass=may_pass)
                if is_last or not may_pass:
                    raise refusal
                on_failure(refusal)
                wait_s = _retry_after(answer.headers.get("Retry-After"), wait_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if is_last:
                raise
            on_failure(error)
        await asyncio.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def in_words(error: Exception, time_limit: str) -> str:
    """What `post` raised. `time_limit`: the setting that says how long an answer may take."""
    if isinstance(error, ServerError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"no answer in {time_limit}"
    return f"{type(error).__name__}: {error}"


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise ServerError(f"it answered with more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _retry_after(text: str | None, otherwise_s: float) -> float:
    try:
        return min(max(float(text or ""), 0.0), LONGEST_BACKOFF_S)
    except ValueError:
        return otherwise_s  # a date, or nothing
