"""The same question is asked once, whether its reply is there or under way; failures are asked again."""

import asyncio

import pytest

from relax.roles.reply_cache import ReplyCache


class Source:
    """Replies `reply` once it is let go; counts how often it was asked, and given up."""

    def __init__(self, reply: str = "yes") -> None:
        self.reply, self.num_asked, self.num_given_up = reply, 0, 0
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> str:
        self.num_asked += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        if self.error:
            raise self.error
        return self.reply


async def test_who_asks_meanwhile_waits_for_the_same_reply_and_later_ones_find_it() -> None:
    cache, source = ReplyCache[str](2), Source()
    asked = [asyncio.create_task(cache.get(b"k", source)) for _ in range(3)]
    await asyncio.sleep(0)
    source.go.set()
    assert await asyncio.gather(*asked) == [("yes", False), ("yes", True), ("yes", True)]
    assert await cache.get(b"k", source) == ("yes", True)
    assert source.num_asked == 1


async def test_the_least_recently_used_reply_goes() -> None:
    cache, source = ReplyCache[str](2), Source()
    source.go.set()
    for key in (b"a", b"b", b"a", b"c", b"a", b"b"):
        await cache.get(key, source)
    assert source.num_asked == 4, "a, b, c, and b again"
    assert len(cache) == 2


async def test_large_replies_go_earlier_but_for_the_newest() -> None:
    cache, source = ReplyCache[str](9, 3, len), Source()
    source.go.set()
    sizes = []
    for key, reply in ((b"a", "x"), (b"b", "xx"), (b"c", "x"), (b"d", "x" * 9), (b"e", "x")):
        source.reply = reply
        await cache.get(key, source)
        sizes.append(len(cache))
    assert sizes == [1, 2, 2, 1, 1]


async def test_a_failure_is_everybodys_who_waits_and_is_not_kept() -> None:
    cache, source = ReplyCache[str](2), Source()
    source.error = ValueError("no")
    source.go.set()
    results = await asyncio.gather(cache.get(b"k", source), cache.get(b"k", source), return_exceptions=True)
    assert [str(result) for result in results] == ["no", "no"]
    source.error = None
    assert await cache.get(b"k", source) == ("yes", False)


async def test_a_question_goes_on_while_anyone_waits_and_is_given_up_when_nobody_does() -> None:
    cache, source = ReplyCache[str](2), Source()
    first, second = (asyncio.create_task(cache.get(b"k", source)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert source.num_given_up == 0
    source.go.set()
    assert await second == ("yes", True)
    source.go.clear()
    lonely = asyncio.create_task(cache.get(b"other", source))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    lonely.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lonely
    await asyncio.sleep(0)
    assert source.num_given_up == 1
    source.go.set()
    assert await cache.get(b"other", source) == ("yes", False)
