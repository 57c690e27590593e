"""The reward that a server gives: batches, repetitions, limits; and no answer is never a zero."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from relax.config.reward import RemoteRewardConfig
from relax.errors import ConfigError, RewardError
from relax.rewards.pool import RewardPool
from relax.rewards.remote import make_remote
from relax.types import Outcome, Prompt

Handler = Callable[[list[dict[str, Any]], int], Any]


class Server:
    """Answers each request with what `handler(items, number of the request)` says; keeps what it was asked."""

    def __init__(self, handler: Handler) -> None:
        self.handler, self.asked, self.headers = handler, [], {}
        self.url = ""
        self.most_at_once = self._at_once = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        items = (await request.json())["items"]
        self.asked.append(items)
        self.headers = dict(request.headers)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            said = self.handler(items, len(self.asked) - 1)
            if asyncio.iscoroutine(said):
                said = await said
        finally:
            self._at_once -= 1
        return said if isinstance(said, web.StreamResponse) else web.json_response({"rewards": said})


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Server]:
    server = Server(handler)
    app = web.Application()
    app.router.add_post("/score", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
    try:
        yield server
    finally:
        await runner.cleanup()


def config(server: Server, **changes: Any) -> RemoteRewardConfig:
    return RemoteRewardConfig(url=server.url, **{"backoff_s": 0.01, "request_time_limit_s": 2.0, **changes})


async def ask(reward: RemoteRewardConfig, *responses: str) -> list[Any]:
    call = make_remote(reward).call
    return list(await asyncio.gather(*(call("prompt", text, "42", {"level": 1}) for text in responses), return_exceptions=True))


async def test_responses_go_in_batches_and_each_gets_its_own_verdict() -> None:
    async with serving(lambda items, _: [len(item["response"]) for item in items]) as server:
        assert await ask(config(server, batch_size=4), *["x" * size for size in range(10)]) == list(range(10))
        assert [len(items) for items in server.asked] == [4, 4, 2]
        assert server.asked[0][1] == {"prompt": "prompt", "response": "x", "answer": "42", "metadata": {"level": 1}}


async def test_requests_at_once_are_bounded() -> None:
    async def slow(items: list[Any], _: int) -> Any:
        await asyncio.sleep(0.02)
        return [0.0] * len(items)

    async with serving(slow) as server:
        assert await ask(config(server, batch_size=1, max_requests=3), *"abcdefghi") == [0.0] * 9
        assert server.most_at_once == 3


async def test_no_verdict_is_an_error_of_that_response_only() -> None:
    said = [1.0, None, {"error": "not sure"}, {"reward": 0.5, "style": 1.0}, True, {"reward": 0.25, "error": None}]
    async with serving(lambda items, _: said) as server:
        answers = await ask(config(server), *"abcdef")
        assert [answers[0], *answers[3:]] == [1.0, {"reward": 0.5, "style": 1.0}, 1.0, {"reward": 0.25}]
        assert "no verdict" in str(answers[1])
        assert "not sure" in str(answers[2])
        assert all(isinstance(answer, RewardError) for answer in answers[1:3])


async def test_what_may_pass_is_asked_again_with_pauses_and_what_will_not_is_not() -> None:
    for status in (503, 429, 408):
        failing = [web.Response(status=status, headers={"Retry-After": "0"}), web.Response(status=status)]
        async with serving(lambda items, number, failing=failing: failing[number] if number < 2 else [1.0]) as server:
            assert await ask(config(server, retries=2), "a") == [1.0]
            assert len(server.asked) == 3
    for status in (400, 401, 404, 302):
        async with serving(lambda *_, status=status: web.Response(status=status, text="so sorry")) as server:
            (error,) = await ask(config(server, retries=5), "a")
            assert isinstance(error, RewardError)
            assert f"it answered {status}" in str(error)
            assert "so sorry" in str(error)
            assert len(server.asked) == 1


async def test_a_server_that_stays_broken_is_an_error_after_the_last_try() -> None:
    async with serving(lambda *_: web.Response(status=500, text="oh")) as server:
        (error,) = await ask(config(server, retries=2), "a")
        assert "it answered 500" in str(error)
        assert len(server.asked) == 3
    (gone,) = await ask(config(server, retries=1), "a")  # nobody listens any more
    assert isinstance(gone, RewardError)
    assert "Connect" in str(gone)

    async def silent(*_: Any) -> Any:
        await asyncio.sleep(5)

    async with serving(silent) as server:
        (late,) = await ask(config(server, retries=1, request_time_limit_s=0.05), "a")
        assert "no answer in reward.request_time_limit_s" in str(late)
        assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "did not answer with"),
        (b"OK", "did not answer with"),
        (b"[1.0]", "did not answer with"),
        (b'{"scores": [1.0]}', "did not answer with"),
        (b'{"rewards": 1.0}', "a float for 1 responses"),
        (b'{"rewards": []}', "0 rewards for 1 responses"),
        (b'{"rewards": [1.0, 1.0]}', "2 rewards for 1 responses"),
        (b"[" * 100_000, "did not answer with"),
        (b"\xff\x00", "did not answer with"),
    ],
)
async def test_an_answer_of_another_form_is_an_error(body: bytes, words: str) -> None:
    async with serving(lambda *_: web.Response(body=body)) as server:
        (error,) = await ask(config(server), "a")
        assert isinstance(error, RewardError)
        assert words in str(error)


async def test_a_token_and_headers_are_sent_and_a_missing_token_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_TEST_TOKEN", "abc")
    async with serving(lambda *_: [1.0]) as server:
        await ask(config(server, token_env="RELAX_TEST_TOKEN", headers={"X-Run": "seven"}), "a")
        assert (server.headers["Authorization"], server.headers["X-Run"]) == ("Bearer abc", "seven")
    monkeypatch.delenv("RELAX_TEST_TOKEN")
    with pytest.raises(ConfigError, match=r"reward\.token_env = 'RELAX_TEST_TOKEN': this environment variable is not set"):
        make_remote(config(server, token_env="RELAX_TEST_TOKEN"))


@pytest.mark.slow
async def test_in_a_worker_a_silent_server_is_a_reward_error_within_the_limit() -> None:
    async def some(items: list[dict[str, Any]], _: int) -> Any:
        if any(item["response"] == "hang" for item in items):
            await asyncio.sleep(5)
        return [json.loads(item["response"]) for item in items]

    async with serving(some) as server:
        pool = RewardPool(config(server, batch_size=1, time_limit_s=0.6, request_time_limit_s=5.0))
        await pool.start()
        try:
            prompt = Prompt("p", text="x")
            scored = await pool.score(prompt, ["0.5", "hang", '{"reward": 1, "a": 2}', '"text"', "null"])
            assert [result.value for result in scored] == [0.5, None, 1.0, None, None]
            assert scored[2].parts == {"a": 2.0}
            assert [result.outcome is Outcome.OK for result in scored] == [True, False, True, False, False]
            assert "reward.time_limit_s" in str(scored[1].error)
        finally:
            await pool.close()


async def test_a_time_limit_that_ends_the_retries_says_what_the_server_answered_last() -> None:
    async with serving(lambda *_: web.Response(status=500, text="boom")) as server:
        pool = RewardPool(config(server, retries=1000, batch_size=2, time_limit_s=0.4, backoff_s=0.1))
        await pool.start()
        try:
            scored = await pool.score(Prompt("p", text="x"), ["a", "b"])
        finally:
            await pool.close()
    said = f"the reward ran past reward.time_limit_s = 0.4; {server.url}: it answered 500 Internal Server Error: boom"
    assert [result.error for result in scored] == [said, said]
