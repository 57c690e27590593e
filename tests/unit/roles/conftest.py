"""Media for roles, prepared in the test's own process: a worker of its own takes seconds to start."""

from typing import Any

import pytest

from relax.data.media.decoder import Decoder
from relax.data.media.pool import Prepared
from relax.models.preparer import load_reader
from relax.roles import shown_media


class PoolHere:
    """A media pool without processes."""

    def __init__(self, model: Any, data: Any, spool: Any) -> None:
        self.num_prepared, self.config = 0, data.media
        self._read = load_reader(folder=model.path, trust_remote_code=False, system_prompt=None, template_options={})
        self._decoder = Decoder(data.media, spool.fd)

    async def start(self) -> None:
        """There is nothing to start."""

    async def close(self) -> None:
        """There is nothing to end."""

    async def prepare(self, prompt: Any) -> Prepared:
        self.num_prepared += 1
        return Prepared(features=self._read(prompt.messages, self._decoder.decode(prompt.key, prompt.media)))


@pytest.fixture
def media_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_media, "open_pool", PoolHere)
