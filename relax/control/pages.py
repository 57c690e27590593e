"""The HTTP interface of roles that run in this process: the pages that Ray Serve gives them elsewhere.

GET, POST http://127.0.0.1:port/{role}/{page} -> the role's answer, as JSON
"""

from collections.abc import Awaitable, Callable

from aiohttp import web

from relax.errors import ConfigError
from relax.roles.role import Reply

Answer = Callable[[str, str, str, bytes], Awaitable[Reply]]
"""`answer(role, method, page, body)`."""

_HOST = "127.0.0.1"
_MAX_BODY_BYTES = 64 << 20
_MAX_MEDIA_BYTES = 2 << 30  # where videos may come with a request


class Pages:
    """Serves what `answer` says, from `start` to `stop`. `with_media`: requests may bring images, sounds and videos along."""

    def __init__(self, answer: Answer, *, with_media: bool = False) -> None:
        self._answer, self._max_body_bytes = answer, _MAX_MEDIA_BYTES if with_media else _MAX_BODY_BYTES
        self._runner: web.AppRunner | None = None

    async def start(self, port: int) -> str:
        """Listens on `port`, 0 for a free one; returns the URL. Raises `ConfigError` when the port is taken."""
        app = web.Application(client_max_size=self._max_body_bytes)
        app.router.add_route("*", "/{role}/{page:.*}", self._serve)
        # who hangs up wants no answer any more
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, _HOST, port).start()
        except OSError as error:
            await self.stop()
            raise ConfigError(
                f"services.http_port = {port}: the port is in use ({error}); choose another, or 0 for a free one"
            ) from error
        return f"http://{_HOST}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.Request) -> web.Response:
        role, page = request.match_info["role"], request.match_info["page"].strip("/")
        status, said = await self._answer(role, request.method, page, await request.read())
        return web.json_response(dict(said), status=status)
