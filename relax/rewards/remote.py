"""Rewards that a server of the user's gives, over HTTP.

    POST url {"items": [{"prompt": ..., "response": "...", "answer": ..., "metadata": {...}}, ...]}
    200      {"rewards": [1.0, {"reward": 0.5, "format": 1.0}, null, {"error": "no verdict"}, ...]}

Consumes the calls of a frame, produces one request for each `batch_size` of them, waits for the server; a call is unblocked
by its item of the answer. `null`, `{"error": ...}`, an answer of another form, a refusal, and a server that stays silent are
no zeros: such responses have no reward.
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from relax.config.reward import RemoteRewardConfig
from relax.errors import ConfigError, RewardError
from relax.rewards.http import in_words, open_session, post
from relax.rewards.table import Scorer
from relax.rewards.waiting import wait_because

COLLECT_S = 0.002  # calls that come together become one request


def make_remote(config: RemoteRewardConfig) -> Scorer:
    """What the server says of each response. Raises `ConfigError` when the token's environment variable is not set."""
    if config.token_env is not None and not os.environ.get(config.token_env):
        raise ConfigError(f"reward.token_env = {config.token_env!r}: this environment variable is not set")
    return Scorer(Remote(config).score, is_async=True)


class Remote:
    """Collects calls into batches. One event loop uses it."""

    def __init__(self, config: RemoteRewardConfig) -> None:
        self._config = config
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = []
        self._slots = asyncio.Semaphore(config.max_requests)
        self._tasks: set[asyncio.Task[None]] = set()
        self._why = ""  # the server has not answered of late

    async def score(self, prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> Any:
        """The server's verdict on one response. Raises `RewardError` when there is none."""
        verdict: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(({"prompt": prompt, "response": response, "answer": answer, "metadata": metadata}, verdict))
        if len(self._waiting) == 1:
            self._begin(self._send_soon())
        try:
            return _read(await verdict)
        except asyncio.CancelledError:  # of the call, whose batch may be another's task
            wait_because(self._why)
            raise

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_soon(self) -> None:
        await asyncio.sleep(COLLECT_S)
        waiting, self._waiting = self._waiting, []
        size = self._config.batch_size
        for start in range(0, len(waiting), size):
            self._begin(self._send([item for item in waiting[start : start + size] if not item[1].done()]))

    async def _send(self, batch: Sequence[tuple[dict[str, Any], asyncio.Future[Any]]]) -> None:
        """Settles every future of the batch, whatever happens."""
        try:
            async with self._slots:
                verdicts = await self._ask([item for item, _ in batch]) if batch else []
            for (_, future), verdict in zip(batch, verdicts, strict=True):
                if not future.done():
                    future.set_result(verdict)
        except Exception as error:  # noqa: BLE001 - raised by each of the calls
            for _, future in batch:
                if not future.done():
                    future.set_exception(RewardError(f"{self._config.url}: {_said(error)}"))

    async def _ask(self, items: Sequence[dict[str, Any]]) -> list[Any]:
        config = self._config
        async with open_session(config.headers, config.token_env, config.request_time_limit_s) as session:
            content = {"items": list(items)}
            body = await post(
                session,
                config.url,
                content,
                retries=config.retries,
                backoff_s=config.backoff_s,
                on_failure=self._note,
            )
        self._why = ""
        return _verdicts(body, len(items))

    def _note(self, failure: Exception) -> None:
        self._why = f"{self._config.url}: {_said(failure)}"


def _verdicts(body: bytes, count: int) -> list[Any]:
    try:
        rewards = json.loads(body)["rewards"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise RewardError(f'it did not answer with {{"rewards": [...]}}: {body[:100].decode("utf-8", "replace")}') from error
    if not isinstance(rewards, list) or len(rewards) != count:
        size = f"{len(rewards)} rewards" if isinstance(rewards, list) else f"a {type(rewards).__name__}"
        raise RewardError(f"it answered with {size} for {count} responses")
    return rewards


def _read(verdict: Any) -> Any:
    """A number or a table with `reward`, which the worker checks. Raises `RewardError` when there is none."""
    if verdict is None:
        raise RewardError("the server has no verdict on this response")
    if isinstance(verdict, Mapping) and verdict.get("error"):
        raise RewardError(f"the server has no verdict on this response: {str(verdict['error'])[:200]}")
    if isinstance(verdict, bool):
        return float(verdict)
    return {name: value for name, value in verdict.items() if name != "error"} if isinstance(verdict, Mapping) else verdict


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, RewardError) else in_words(error, "reward.request_time_limit_s")
