"""Asks a judge of the run, from a reward: `reply = await ask([{"role": "user", "content": "Is 2 + 2 = 4?"}])`.

ask --POST {RELAX_GENRM_URL}/generate--> genrm role --> 200: a reply, 503: it is down, others: it cannot be answered
  ^------------------ pause -------------------------------------'
"""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from relax.errors import RewardError
from relax.rewards.media import as_request
from relax.rewards.services import url_of
from relax.rewards.waiting import wait_because

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_DOWN = 503


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """What a judge said. `finish_reason`: "stop", or "length" where it was cut off; `cached`: it was asked that before."""

    response: str
    route: str
    finish_reason: str
    completion_tokens: int
    cached: bool


async def ask(
    messages: Sequence[Mapping[str, Any]], route: str = "default", *, attempt: int = 0, **sampling_params: Any
) -> JudgeReply:
    """What the judge at `route` replies to a conversation, whose media are parts of the prompt's messages.

    `sampling_params`: `temperature`, `max_new_tokens`, `seed`, `stop`, where they are not the judge's own. `attempt`: how often
    its reply was of no use before, which is counted. A judge that is down is asked until it is up: the reward's time limit ends
    that, and its error says what was heard of the judge last. Raises `RewardError` when it cannot be answered, and in processes
    that are not a run's.
    """
    return JudgeReply(**await _answer(messages, route, attempt, sampling_params))


async def ask_each(
    messages: Sequence[Mapping[str, Any]], route: str = "default", *, seeds: Sequence[int], **sampling_params: Any
) -> list[JudgeReply]:
    """One reply for each seed, as `ask`; a local judge reads the conversation once for all of them."""
    said = await _answer(messages, route, 0, {**sampling_params, "seeds": list(seeds)})
    replies = said.pop("replies")
    return [JudgeReply(**said, **reply) for reply in replies]


async def _answer(
    messages: Sequence[Mapping[str, Any]], route: str, attempt: int, sampling_params: Mapping[str, Any]
) -> dict[str, Any]:
    url = f"{url_of('genrm')}/generate"
    content = {
        "messages": as_request(messages),
        "sampling_params": sampling_params,
        "route": route,
        "attempt": attempt,
    }
    pause_s = _FIRST_PAUSE_S
    while True:
        status, body = await _post(url, content)
        if status == 200:
            wait_because("")
            return body
        said = f"judge {route!r}: {body.get('error', f'status {status}')}"
        if status != _DOWN:
            raise RewardError(said)
        wait_because(said)
        await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _post(url: str, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and body; no answer is 503, as from a role that is being started."""
    try:
        timeout = aiohttp.ClientTimeout(total=None)  # the role has time limits, and so has the reward
        async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=content) as answer:
            body = json.loads(await answer.read())
            return answer.status, body if isinstance(body, dict) else {}
    except (aiohttp.ClientError, OSError) as error:
        return _DOWN, {"error": f"{type(error).__name__}: {error}"}
    except ValueError:  # a page of the proxy's, whose role is gone
        return _DOWN, {"error": f"the role is gone: {url} answered {answer.status} {answer.reason}"}
