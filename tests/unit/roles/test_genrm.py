"""The role that asks judges: routes, refusals, repetitions, limits; a local judge says what transformers would say."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fakes import FakeEngine

from relax.config import RunConfig, make_config
from relax.engines.pool import EnginePool
from relax.errors import ConfigError, ModelError, RoleError
from relax.roles.build import make_engine
from relax.roles.engine_host import EngineHost
from relax.roles.genrm import GenRM
from relax.roles.topology import devices_of, engine_pools, role_specs

RAW = {
    "model": {"path": "m"},
    "data": {"type": "reasoning_gym", "task": "chain_sum"},
    "reward": {"type": "genrm"},
    "train": {"num_steps": 1},
}
HELLO = [{"role": "user", "content": "hello"}]
BOTH = ["reward.type=sum", 'reward.parts={a={type="genrm"}, b={type="genrm", route="strict"}}']
Say = Callable[[dict[str, Any], int], Any]


class Server:
    """Speaks OpenAI's chat protocol; its replies are `say(body, number of the request)`: a text, or an answer of its own."""

    def __init__(self, say: Say) -> None:
        self.say, self.asked, self.headers, self.url = say, [], {}, ""
        self.now = self.most_at_once = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers = dict(request.headers)
        self.now += 1
        self.most_at_once = max(self.now, self.most_at_once)
        try:
            said = self.say(self.asked[-1], len(self.asked) - 1)
            said = await said if asyncio.iscoroutine(said) else said
        finally:
            self.now -= 1
        if isinstance(said, web.StreamResponse):
            return said
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": len(said)}})


@asynccontextmanager
async def asking(say: Say, cache_entries: int = 0, **settings: Any) -> AsyncIterator[tuple[GenRM, Server]]:
    server = Server(say)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    judge = {"type": "openai", "url": url, "model": "big", "backoff_s": 0.01, **settings}
    config = config_of({"default": judge, "strict": judge, "unused": judge}, cache_entries, *BOTH)
    role = GenRM(config, None, {})
    await role.start()
    try:
        yield role, server
    finally:
        await runner.cleanup()


def config_of(judges: dict[str, Any], cache_entries: int = 0, *overrides: str) -> RunConfig:
    return make_config({**RAW, "genrm": {"judges": judges, "cache_entries": cache_entries}}, overrides)


async def ask(role: GenRM, **body: Any) -> tuple[int, dict[str, Any]]:
    status, said = await role.answer("POST", "generate", json.dumps({"messages": HELLO, **body}).encode())
    return status, dict(said)


async def test_a_request_becomes_one_of_the_servers_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with asking(lambda *_: "yes", api_key_env="JUDGE_KEY", headers={"X-Team": "rl"}, max_new_tokens=77) as (role, server):
        status, said = await ask(role)
        assert (status, said) == (
            200,
            {"response": "yes", "route": "default", "finish_reason": "stop", "completion_tokens": 3, "cached": False},
        )
        assert server.asked == [{"model": "big", "messages": HELLO, "temperature": 0.0, "max_tokens": 77, "n": 1}]
        assert server.headers["Authorization"] == "Bearer secret"
        assert server.headers["X-Team"] == "rl"
        named = {"temperature": 0.5, "max_new_tokens": 5, "seed": 3, "stop": ["x"]}
        status, said = await ask(role, route="strict", sampling_params=named, attempt=1)
        assert (status, said["route"]) == (200, "strict")
        assert server.asked[-1] | {"temperature": 0.5, "max_tokens": 5, "seed": 3, "stop": ["x"]} == server.asked[-1]
        assert "secret" not in json.dumps(role.status())
        assert role.totals | {"genrm/requests": 2, "genrm/asked_again": 1, "genrm/failed": 0} == role.totals
        assert (await role.answer("GET", "health", b""))[0] == 200
        assert (await role.answer("GET", "engines", b""))[1]["judges"]["strict"][0]["is_ready"]
        assert (await role.answer("POST", "reply", b""))[0] == 404


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "wanted is JSON like"),
        (b'{"messages": []}', "messages: wanted is at least one"),
        (b'{"messages": [{"role": "user"}]}', "missing required field `content`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "unknown field `n`"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "route": "strickt"}',
            "judges default, strict; did you mean 'strict'",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "sampling_params": {"temperature": -1}}', "from 1e-06 to 100"),
        (b'{"messages": [{"role": "user", "content": "x"}], "sampling_params": {"temperature": 1e-40}}', "0, or from 1e-06"),
        (
            b'{"messages": [{"role": "user", "content": ' + b'[{"a":' * 2000 + b"1" + b"}]" * 2000 + b"}]}",
            "wanted is JSON like",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "sampling_params": {"seed": -1}}', "sampling_params.seed"),
        (b'{"messages": [{"role": "user", "content": "x"}], "sampling_params": {"top_k": 1}}', "unknown field `top_k`"),
        (b"\xff\xfe", "wanted is JSON like"),
    ],
)
async def test_a_wrong_request_is_told_what_is_right(body: bytes, message: str) -> None:
    async with asking(lambda *_: "yes") as (role, server):
        status, said = await role.answer("POST", "generate", body)
        assert status == 400
        assert message in said["error"]
        assert not server.asked


async def test_what_may_pass_is_tried_again_and_what_is_left_says_why() -> None:
    async with asking(lambda _, number: web.Response(status=500) if number < 2 else "yes", retries=2) as (role, server):
        assert (await ask(role))[0] == 200
        assert len(server.asked) == 3
    for say, status, message in (
        (lambda *_: web.Response(status=500, text="boom"), 503, "it answered 500 Internal Server Error: boom"),
        (lambda *_: web.Response(status=401, text="who?"), 502, "it answered 401 Unauthorized: who?"),
        (lambda *_: web.Response(text="<html>"), 502, "did not answer with a chat completion: <html>"),
        (lambda *_: web.json_response({"choices": []}), 502, "did not answer with a chat completion"),
        (lambda *_: web.json_response({"choices": [{"message": {"content": None}}]}), 502, "chat completion"),
        (lambda *_: asyncio.sleep(5), 504, "no answer in genrm.judges.default.request_time_limit_s = 0.1"),
    ):
        async with asking(say, retries=1, request_time_limit_s=0.1) as (role, _):
            found, said = await ask(role)
            assert (found, message in said["error"]) == (status, True), said
            assert message in str(role.status()["last_error"])
            assert (await role.answer("GET", "health", b""))[0] == 503
    await_nobody = {"type": "openai", "url": "http://127.0.0.1:9", "model": "m", "retries": 1, "backoff_s": 0.01}
    role = GenRM(config_of({"default": await_nobody}), None, {})
    assert (await ask(role)) == (503, {"error": "genrm is being started"})
    await role.start()
    status, said = await ask(role)
    assert status == 503
    assert "ClientConnectorError" in said["error"]


async def test_requests_at_once_are_bounded_and_the_same_question_is_asked_once() -> None:
    async def slow(*_: Any) -> str:
        await asyncio.sleep(0.02)
        return "yes"

    async with asking(slow, max_requests=2, cache_entries=10) as (role, server):
        different = [ask(role, messages=[{"role": "user", "content": str(number % 5)}]) for number in range(10)]
        found = await asyncio.gather(*different)
        assert {status for status, _ in found} == {200}
        assert sum(said["cached"] for _, said in found) == 5
        assert server.most_at_once == 2
        assert len(server.asked) == 5
        await ask(role, sampling_params={"temperature": 1.0})
        await ask(role, sampling_params={"temperature": 1.0})
        assert len(server.asked) == 7, "two replies may differ"
        await ask(role, sampling_params={"temperature": 1.0, "seed": 1})
        await ask(role, sampling_params={"temperature": 1.0, "seed": 1})
        assert len(server.asked) == 8
        assert (await ask(role, route="strict"))[1]["cached"] is False
        assert (await ask(role, sampling_params={"seed": 5}))[1]["cached"] is False
        assert (await ask(role, sampling_params={"seed": 6}))[1]["cached"] is True, "at temperature 0 seeds do nothing"


async def test_local_judge_says_what_transformers_says_and_cuts_nothing_off(tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    judge = {"type": "local", "model": {"path": str(tiny_model), "max_context": 200}, "max_new_tokens": 12}
    config = config_of({"default": judge})
    host = EngineHost("judge-default-0", config, None, make_engine)
    await host.start()
    role = GenRM(config, None, {"judge-default": EnginePool({"judge-default-0": host.engine})})
    await role.start()
    try:
        questions = [[{"role": "user", "content": text}] for text in ("12+7=19?", "Is it so?", "x")]
        found = await asyncio.gather(*(ask(role, messages=messages) for messages in questions))
        tokenizer, model = AutoTokenizer.from_pretrained(tiny_model), AutoModelForCausalLM.from_pretrained(tiny_model)
        for messages, (status, said) in zip(questions, found, strict=True):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                wanted = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
            assert status == 200, said
            assert said["response"] == tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)
        status, said = await ask(role, messages=[{"role": "user", "content": "long " * 100}])
        assert status == 400
        assert "nothing is cut off" in said["error"]
        status, said = await ask(role, messages=[{"role": "user", "content": "x"}], sampling_params={"max_new_tokens": 199})
        assert status == 400
        assert (await role.answer("GET", "engines", b""))[1]["judges"]["default"][0]["is_ready"]
    finally:
        await host.stop()
    hurried = config_of({"default": judge | {"request_time_limit_s": 0.05}})
    role = GenRM(hurried, None, {"judge-default": EnginePool({"judge-default-0": FakeEngine()})})
    await role.start()
    assert (await ask(role))[0] == 503, "an engine without weights"
    assert (await role.answer("GET", "health", b""))[0] == 503


async def test_judges_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    judge = {"type": "openai", "url": "http://h/v1", "model": "m", "api_key_env": "NO_KEY"}
    with pytest.raises(ConfigError, match=r"genrm.judges.default.api_key_env = 'NO_KEY'"):
        await GenRM(config_of({"default": judge}), None, {}).start()
    config = config_of({"default": {"type": "local", "model": {"path": str(tmp_path / "nowhere")}}})
    with pytest.raises(ModelError, match=r"genrm.judges.default.model.path = .*nowhere"):
        await GenRM(config, None, {"judge-default": EnginePool({})}).start()


LOCAL = {"type": "local", "model": {"path": "j"}}
SERVED = {"type": "openai", "url": "http://h/v1", "model": "m"}


@pytest.mark.parametrize("mode", ["colocate", "hybrid", "fully_async"])
def test_engines_of_judges_have_devices_of_their_own_in_every_mode(mode: str) -> None:
    overrides = [f"resources.mode={mode}", "rollout.max_staleness=0", "resources.genrm_gpus=0.5", "resources.genrm_cpus=2"]
    config = config_of({"default": {**LOCAL, "num_engines": 2}, "unused": LOCAL, "served": SERVED}, 0, *overrides)
    assert engine_pools(config) == {"policy": ("engine-0",), "judge-default": ("judge-default-0", "judge-default-1")}
    assert devices_of(config, "judge-default-1") == (2.0, 0.5)
    assert next(iter(role_specs(config))).name == "genrm"


@pytest.mark.parametrize(
    ("reward", "is_started"),
    [
        ({"type": "exact"}, False),
        ({"type": "function", "path": "m:f"}, True),
        ({"type": "sum", "parts": {"a": "math", "b": {"type": "genrm"}}}, True),
        ({"type": "by_row", "choices": {"a": "math", "b": "exact"}}, False),
    ],
)
def test_judges_are_started_where_a_reward_may_ask_them(reward: dict[str, Any], is_started: bool) -> None:
    config = make_config({**RAW, "reward": reward, "genrm": {"judges": {"default": LOCAL}}})
    assert ("genrm" in {spec.name for spec in role_specs(config)}) is is_started
    assert ("judge-default" in engine_pools(config)) is is_started


@pytest.mark.parametrize(
    ("reward", "genrm", "message"),
    [
        ({}, None, r'reward.type = "genrm" asks a judge: add \[genrm.judges.default\]'),
        ({"route": "strickt"}, {"judges": {"strict": LOCAL}}, "reward.route = 'strickt': .* strict; did you mean"),
        ({"num_votes": 3}, {"judges": {"default": LOCAL}}, "reward.num_votes = 3: all votes are the same at temperature 0"),
        ({}, {"judges": {}}, "genrm.judges"),
        ({}, {"judges": {"a b": LOCAL}}, "'a b' is no name of a judge"),
        ({}, {"judges": {"default": {"type": "locl"}}}, r"genrm.judges.default.type = 'locl': .* did you mean 'local'"),
        ({}, {"judges": {"default": {"url": "http://h"}}}, "default.type is missing: allowed are 'local', 'openai'"),
        ({}, {"judges": {"default": {**SERVED, "modle": "m"}}}, "did you mean genrm.judges.default.model?"),
        ({}, {"judges": {"default": {**SERVED, "num_engines": 2}}}, "it belongs to genrm.judges.default.type = 'local'"),
        ({}, {"judges": {"default": {"type": "openai"}}}, "genrm.judges.default.url: missing"),
        ({"verdict": {"type": "choice", "scores": {"yes": 1.0}}}, {"judges": {"default": LOCAL}}, "at least two words"),
        ({"verdict": {"type": "number", "low": 3, "high": 3}}, {"judges": {"default": LOCAL}}, "is not below"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(reward: dict[str, Any], genrm: Any, message: str) -> None:
    with pytest.raises((ConfigError, RoleError), match=message):
        make_config({**RAW, "reward": {"type": "genrm", **reward}, **({"genrm": genrm} if genrm is not None else {})})
