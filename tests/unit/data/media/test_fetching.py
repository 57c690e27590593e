"""Media of addresses: fetched within the limits, from http and https alone."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from made_media import encoded, picture

from relax.config.media import MediaConfig
from relax.data.media.decoder import Decoder
from relax.data.media.source import Spool
from relax.errors import DataError
from relax.types import Media

PNG = encoded(picture())


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/to-"):
            self.send_response(302)
            self.send_header("Location", {"/to-file": "file:///etc/hostname", "/to-image": "/image"}[self.path])
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        self.wfile.write(PNG if self.path == "/image" else b"0" * 5000)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_image_is_fetched_if_the_run_allows_it(address: str) -> None:
    decoder = Decoder(MediaConfig(allow_http=True), Spool().fd)
    found = decoder.decode("row", [Media("image", f"{address}/image"), Media("image", f"{address}/to-image")])
    assert all(np.array_equal(item.pixels, np.array(picture())) for item in found)
    with pytest.raises(DataError, match="cannot be decoded: FileNotFoundError"):
        Decoder(MediaConfig(), Spool().fd).decode("row", [Media("image", f"{address}/image")])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/none", "cannot be fetched: HTTP Error 404"),
        ("/large", r"media\.max_file_bytes"),
        ("/to-file", "not allowed"),
    ],
)
def test_what_cannot_be_fetched_is_named(address: str, path: str, words: str) -> None:
    decoder = Decoder(MediaConfig(allow_http=True, max_file_bytes=1000), Spool().fd)
    with pytest.raises(DataError, match=rf"^row: image, item 1 of 1, '{address}{path}': .*({words})"):
        decoder.decode("row", [Media("image", f"{address}{path}")])
    with pytest.raises(DataError, match="cannot be fetched"):
        decoder.decode("row", [Media("image", "http://127.0.0.1:1/closed")])
