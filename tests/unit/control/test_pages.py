"""The HTTP interface of roles in one process: a role that answers requests, one that is asked for its status, and mistakes."""

import asyncio
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from relax.config import make_config
from relax.control.pages import Pages
from relax.errors import ConfigError
from relax.roles.role import Reply, Role, RoleTask

CONFIG = make_config(
    {
        "model": {"path": "m"},
        "data": {"type": "reasoning_gym", "task": "chain_sum"},
        "reward": {"type": "exact"},
        "train": {"num_steps": 1},
    }
)


class Echo(Role):
    """Says what it was asked."""

    async def answer(self, method: str, page: str, body: bytes) -> Reply:
        if page == "fail":
            raise ValueError("no")
        return 200, {"method": method, "page": page, "body": body.decode()}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    tasks = {name: RoleTask(role(name, CONFIG, None)) for name, role in (("echo", Echo), ("plain", Role))}

    async def answer(role: str, method: str, page: str, body: bytes) -> Reply:
        return await tasks[role].answer(method, page, body)

    pages = Pages(answer)
    yield await pages.start(0)
    await pages.stop()


async def ask(method: str, url: str, body: str = "") -> tuple[int, dict]:
    async with aiohttp.ClientSession() as session, session.request(method, url, data=body) as answer:
        return answer.status, await answer.json()


async def test_a_role_says_what_it_was_asked_and_every_role_its_status(url: str) -> None:
    body = "ü" * (2 << 20)
    assert await ask("POST", f"{url}/echo/a/b/", body) == (200, {"method": "POST", "page": "a/b", "body": body})
    for role in ("echo", "plain"):
        status, said = await ask("GET", f"{url}/{role}/status")
        assert (status, said["role"], said["activity"]) == (200, role, "starting")


async def test_a_request_is_as_large_as_it_may_be_and_no_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax.control.pages._MAX_BODY_BYTES", 100)
    monkeypatch.setattr("relax.control.pages._MAX_MEDIA_BYTES", 1000)

    async def answer(role: str, method: str, page: str, body: bytes) -> Reply:
        return 200, {"bytes": len(body)}

    for with_media, status in ((False, 413), (True, 200)):
        pages = Pages(answer, with_media=with_media)
        url = await pages.start(0)
        async with aiohttp.ClientSession() as session, session.post(f"{url}/judge/generate", data=b"x" * 500) as said:
            assert said.status == status
        await pages.stop()


async def test_what_cannot_be_said_is_an_answer_as_well(url: str) -> None:
    status, said = await ask("POST", f"{url}/plain/generate")
    assert (status, said) == (404, {"error": "no such page: GET /plain/status"})
    status, said = await ask("GET", f"{url}/echo/fail")
    assert (status, said) == (500, {"error": "echo: ValueError: no"})


async def test_who_hangs_up_is_not_answered() -> None:
    began, given_up = asyncio.Event(), asyncio.Event()

    async def answer(*_: object) -> Reply:
        began.set()
        try:
            return await asyncio.Future()
        finally:
            given_up.set()

    pages = Pages(answer)
    asking = asyncio.create_task(ask("GET", f"{await pages.start(0)}/role/page"))
    await began.wait()
    asking.cancel()
    await asyncio.wait_for(given_up.wait(), 5)
    await pages.stop()


async def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"services.http_port = {port}: the port is in use"):
            await Pages(lambda *_: None).start(port)
