"""Several engines behind one face: a request goes to the least loaded one, and on to another when that one fails.

generate --> least loaded engine that is ready and has not failed this request --EngineError--> another, with the tokens so far
               |   '--none is ready: wait until one is                            '--all failed it: pause, then all again
                beside it, for each engine: `progress` of its requests while it works, `stats` while it is not ready
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import replace

from relax.engines.engine import Engine, EngineAsleep, EngineStats, RequestError
from relax.engines.route import Member, Route, State
from relax.errors import EngineError
from relax.types import Completion, GenerateRequest

log = logging.getLogger("relax.engines")

_LONGEST_PAUSE_S = 5.0
_FIRST_LOOK_S = 0.01
_LONGEST_LOOK_S = 0.5
_ANSWER_S = 10.0  # an engine that takes longer to say how it is counts as down


class EnginePool:
    """Routes requests over engines, which may come and go. One event loop uses it.

    An engine is used while it holds weights: one that sleeps, has none yet or is down is asked again and again until it is
    ready. What requests have come to is asked for every `progress_s`; one whose engine fails goes on elsewhere from there, with
    the draws that it would have had. A request ends with an error when engines that answer have failed it `max_attempts` times
    in a row without a new token, or when no engine has answered for `max_down_s`. Between rounds over all engines it pauses
    for `first_pause_s`, which doubles up to 5 s and ends early when an engine is added or replaced.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        max_attempts: int = 8,
        first_pause_s: float = 0.1,
        max_down_s: float = 120.0,
        progress_s: float = 0.5,
    ) -> None:
        self._members = {name: Member(name, engine) for name, engine in engines.items()}
        self._max_attempts, self._first_pause_s = max_attempts, first_pause_s
        self._max_down_s, self._progress_s = max_down_s, progress_s
        self._routes: dict[str, Route] = {}
        self._names = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count())
        self._changed = asyncio.Event()
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        self._down_since_s: float | None = None  # since when requests have waited and no engine has answered

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    # -- requests -----------------------------------------------------------------------------------------------------
    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """One completion for each seed, in their order.

        Raises the last `EngineError` when all attempts have failed or no engine answers, and a `RequestError` at once.
        """
        name = request.request_id
        if name in self._routes:
            raise RequestError(f"request {name!r} is being served already: give each request an id of its own")
        self._routes[name] = route = Route(request)
        try:
            return await self._generate(route)
        finally:
            del self._routes[name]
            if not self._routes:
                self._down_since_s = None

    async def _generate(self, route: Route) -> list[Completion]:
        name, tries, pause_s = route.request.request_id, 0, self._first_pause_s
        while not route.is_aborted and not route.is_complete:
            member = self._least_loaded(route.failed)
            if member is None:
                if not self._is_one(State.READY):
                    await self._wait_for_engine(name)
                else:
                    await self._pause(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                route.failed.clear()
                continue
            num_tokens = route.num_tokens
            try:
                return await self._generate_on(member, route)
            except RequestError:
                raise
            except EngineAsleep as error:
                self._set(member, State.NO_WEIGHTS, error)
            except EngineError as error:
                await self._look_at(member, error)
                if member.state is State.NO_WEIGHTS:
                    continue
                route.failed.add(member)
                tries = 1 if route.num_tokens > num_tokens else tries + 1
                log.warning("request %s is tried again after %d tokens: %s", name, route.num_tokens, error)
                if tries == self._max_attempts:
                    raise EngineError(f"request {name!r} failed {tries} times in a row, at last: {error}") from error
        return route.what_there_is()

    async def _generate_on(self, member: Member, route: Route) -> list[Completion]:
        num = len(route.request.seeds)
        member.load += num
        route.member, route.since_s = member, asyncio.get_running_loop().time()
        route.engine_id = f"{route.request.request_id}@{next(self._names)}"
        self._start("progress", member, self._follow)
        try:
            completions = await member.engine.generate(replace(route.request, request_id=route.engine_id))
        except asyncio.CancelledError:
            self._run(self._abort_on(member, [route.engine_id]), f"abort-{route.engine_id}")  # it may be another process
            raise
        finally:
            member.load -= num
            route.member = None
        self._set(member, State.READY)
        return completions

    def _least_loaded(self, failed: set[Member]) -> Member | None:
        able = [member for member in self._members.values() if member.state is State.READY and member not in failed]
        return min(able, key=lambda member: member.load, default=None)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests wherever they are: their `generate` returns what there is. Ids of ended ones are let alone."""
        there: dict[Member, list[str]] = {}
        for name in request_ids:
            if (route := self._routes.get(name)) is not None:
                route.is_aborted = True
                if route.member is not None:
                    there.setdefault(route.member, []).append(route.engine_id)
        self._changed.set()
        await asyncio.gather(*(self._abort_on(member, names) for member, names in there.items()))

    async def _abort_on(self, member: Member, names: list[str]) -> None:
        try:
            await member.engine.abort(names)
        except EngineError as error:  # so its `generate` fails as well, and the requests end with what is known of them
            log.info("%s could not abort %s: %s", member.name, names, error)

    # -- waiting ------------------------------------------------------------------------------------------------------
    async def _wait_for_engine(self, name: str) -> None:
        """Until something changes; raises when no engine has answered for too long."""
        loop = asyncio.get_running_loop()
        if self._is_one(State.NO_WEIGHTS):
            self._down_since_s = None
        elif self._down_since_s is None:
            self._down_since_s = loop.time()
        for member in self._members.values():
            if member.state is not State.READY:
                self._start("look", member, self._revive)
        left = _LONGEST_PAUSE_S if self._down_since_s is None else self._down_since_s + self._max_down_s - loop.time()
        if left <= 0:
            reasons = "; ".join(f"{m.name}: {m.reason}" for m in self._members.values()) or "there is no engine"
            raise EngineError(f"request {name!r}: no engine has answered for {self._max_down_s:g} s ({reasons})")
        await self._pause(min(left, _LONGEST_PAUSE_S))

    async def _pause(self, seconds: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):  # `wait_for` loses a cancellation that comes with the event
                await self._changed.wait()
        except TimeoutError:
            log.debug("no engine was added or became ready within %.1f s", seconds)

    def _is_one(self, state: State) -> bool:
        return any(member.state is state for member in self._members.values())

    # -- engines, watched ---------------------------------------------------------------------------------------------
    def _set(self, member: Member, state: State, reason: EngineError | None = None) -> None:
        if member.state is not state:
            log.info("%s is %s%s", member.name, state, f": {reason}" if reason else "")
            member.state = state
            self._changed.set()
        member.reason = reason
        if state is not State.DOWN:
            self._down_since_s = None

    async def _look_at(self, member: Member, reason: EngineError | None = None) -> None:
        """Finds out how an engine is that failed a request with `reason`, or that was not ready."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                stats = await member.engine.stats()
        except EngineError as error:
            self._set(member, State.DOWN, reason or error)
        except TimeoutError:
            self._set(member, State.DOWN, reason or EngineError(f"{member.name} gave no answer within {_ANSWER_S:g} s"))
        else:
            self._set(member, State.READY if stats.version >= 0 else State.NO_WEIGHTS, reason)

    def _start(self, kind: str, member: Member, work: Callable[[Member], Coroutine[None, None, None]]) -> None:
        """One task of each kind for an engine, unless it is at work already."""
        key = (member, kind)
        running = self._tasks.get(key)
        if running is None or running.done():
            self._run(work(member), key)

    def _run(self, work: Coroutine[None, None, None], key: Hashable) -> None:
        self._tasks[key] = task = asyncio.create_task(work)

        def forget(ended: asyncio.Task[None]) -> None:
            if self._tasks.get(key) is ended:  # the next one may have begun before this is called
                del self._tasks[key]

        task.add_done_callback(forget)

    async def _follow(self, member: Member) -> None:
        """Asks what the engine's requests have come to, while it has some."""
        while member.load:
            await asyncio.sleep(self._progress_s)
            await self._ask_for_progress(member)

    async def _revive(self, member: Member) -> None:
        """Asks an engine how it is until it is ready, while requests wait."""
        look_s = _FIRST_LOOK_S
        while self._routes and member.state is not State.READY and self._members.get(member.name) is member:
            await asyncio.sleep(look_s)
            look_s = min(1.5 * look_s, _LONGEST_LOOK_S)
            await self._look_at(member)

    async def _ask_for_progress(self, member: Member) -> None:
        until = asyncio.get_running_loop().time() - self._progress_s
        routes = {
            route.engine_id: route for route in self._routes.values() if route.member is member and route.since_s <= until
        }
        if not routes:
            return
        try:
            async with asyncio.timeout(_ANSWER_S):
                found = await member.engine.progress(tuple(routes))
        except (EngineError, TimeoutError) as error:
            log.debug("%s does not say what its requests have come to: %s", member.name, error)
            return
        for engine_id, completions in found.items():
            routes[engine_id].told(completions)

    # -- engines, by name ---------------------------------------------------------------------------------------------
    def add(self, name: str, engine: Engine) -> None:
        """Routes to one engine more. Raises `EngineError` when there is one of that name."""
        if name in self._members:
            raise EngineError(f"there is an engine {name!r} already; `replace` puts another in its place")
        self.replace(name, engine)

    def replace(self, name: str, engine: Engine) -> Engine | None:
        """Puts `engine` in the place of the one called `name`, if there is one, and returns that, which stays open."""
        before = self._members.get(name)
        self._members[name] = Member(name, engine)
        self._changed.set()
        return before.engine if before else None

    def remove(self, name: str) -> Engine:
        """Routes nothing more to the engine, and returns it: open, and perhaps with requests still in hand."""
        if name not in self._members:
            raise EngineError(f"there is no engine {name!r}; there are: {', '.join(self._members) or 'none'}")
        return self._members.pop(name).engine

    def outstanding(self, name: str) -> int:
        """Completions that the engine called `name` has in hand for this pool."""
        return self._members[name].load

    async def stats(self) -> dict[str, EngineStats]:
        """Each engine's own, by name; an engine that does not answer is left out."""
        members = list(self._members.values())
        found = await asyncio.gather(*(self._stats_of(member.engine) for member in members))
        return {member.name: stats for member, stats in zip(members, found, strict=True) if stats is not None}

    @staticmethod
    async def _stats_of(engine: Engine) -> EngineStats | None:
        try:
            return await engine.stats()
        except EngineError as error:
            log.debug("an engine gives no statistics: %s", error)
            return None

    async def close(self) -> None:
        """Closes every engine."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in self._members.values()))
