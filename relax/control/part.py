"""One role or engine on Ray as its runtime sees it: a handle, a process, and the last answer."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import psutil
from ray.exceptions import RayActorError

from relax.control.processes import is_alive, kill, process_of

_PATIENCE_S = 1.0
_LOOK_S = 0.05


class Part:
    """`handle`: an actor, or a deployment's handle. Its process is the one that it named itself."""

    def __init__(self, name: str, handle: Any, *, is_engine: bool) -> None:
        self.name, self.handle, self.is_engine = name, handle, is_engine
        self._process: psutil.Process | None = None
        self._asked: asyncio.Task[dict[str, Any]] | None = None
        self._asked_at = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def is_dead(self) -> bool:
        """Whether its process is known, and gone."""
        return self._process is not None and not is_alive(self._process)

    def lives_in(self, pid: int) -> None:
        """Takes what the part says of its own process."""
        if self.pid != pid:
            self._process = process_of(pid)

    def kill(self) -> None:
        """SIGKILL to the process that the part named as its own."""
        if self._process is not None:
            kill(self._process)

    async def ended(self) -> None:
        """Returns once its process, if it is known, is gone."""
        while True:
            if self._process is None or self.is_dead:
                return
            await asyncio.sleep(_LOOK_S)

    def forget(self) -> None:
        """A new process takes its place."""
        self._process = None
        self._drop_question()

    async def status(self) -> dict[str, Any]:
        """Its answer; that it is dead; or for how long it has said nothing. Within a second or so."""
        if self.is_dead:
            self._drop_question()
            text = f"the process of {self.name} died (killed, or out of memory)"
            return {"role": self.name, "error": text, "error_kind": "dead"}
        loop = asyncio.get_running_loop()
        if self._asked is None:
            self._asked, self._asked_at = asyncio.create_task(_answer(self.handle.status.remote())), loop.time()
        done, _ = await asyncio.wait({self._asked}, timeout=_PATIENCE_S)
        if not done:
            return {"role": self.name, "error": None, "silent_s": loop.time() - self._asked_at}
        asked, self._asked = self._asked, None
        try:
            answer = asked.result()
        except Exception as error:  # noqa: BLE001 - the boundary: whatever Ray raises means that there is no answer
            return {"role": self.name, "error": _no_answer(self.name, error), "error_kind": "dead"}
        if (pid := answer.get("pid")) is not None:
            self.lives_in(int(pid))
        return answer

    def _drop_question(self) -> None:
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None


async def _answer(call: Awaitable[Any]) -> dict[str, Any]:
    return dict(await call)


def _no_answer(name: str, error: BaseException) -> str:
    if isinstance(error, RayActorError):
        return f"the process of {name} died (killed, or out of memory)"
    return f"{name} does not answer: {type(error).__name__}: {error}"
