"""Images, sounds and videos of rows for a role whose model is not the policy: a judge, a reward model.

messages with parts, as rows have them --ShownMedia.read--> messages with places, media in the order of these
media --PreparedMedia.of: once, in whatever texts they stand; the model's own processor--> features, and ids for each place
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from relax.config.data import DataSection
from relax.config.media import MediaConfig
from relax.config.model import ModelConfig
from relax.config.run import RunConfig
from relax.data.media.rows import MediaRows, Mismatch
from relax.data.media.source import Finder, Spool
from relax.data.prompts import data_folder
from relax.data.rows import BadRow, read_messages
from relax.errors import DataError
from relax.models.folder import read_model_folder
from relax.models.preparer import ReadyPrompt, open_pool
from relax.roles.reply_cache import ReplyCache
from relax.types import Media, Prompt

_KEPT, _KEPT_BYTES = 16, 1 << 30  # sets of media: what comes of a group is asked about at about the same time

Message = Mapping[str, Any]


class ShownMedia:
    """What requests to a role may show: bytes that come with them, and what rows of the run may name, by the same rules.

    `config`: how media are decoded; `spool`: where bytes are that came with a request.
    """

    def __init__(self, config: MediaConfig) -> None:
        self.config, self.spool = config, Spool()
        self._rows = MediaRows(config, Finder(config, ".", self.spool))

    @staticmethod
    def of(config: RunConfig) -> "ShownMedia | None":
        """None where rows of training and of evaluation are of text alone."""
        sections = [config.data, *([config.eval.data] if config.eval is not None else [])]
        having = [(section, section.media) for section in sections if section.media is not None]
        if not having:
            return None
        roots = [root for section, media in having for root in media.roots or [data_folder(section)]]
        first = having[0][1]
        plain = {kind: getattr(first, kind).model_copy(update={"file": "{}"}) for kind in ("image", "audio", "video")}
        allow_http = any(media.allow_http for _, media in having)
        return ShownMedia(first.model_copy(update={"roots": roots, "allow_http": allow_http, **plain}))

    def read(self, messages: Sequence[Message], kinds: Collection[str]) -> tuple[list[dict[str, Any]], tuple[Media, ...]]:
        """The messages with a part `{"type": kind}` in each place, and the media. What is of none of `kinds` is left out.

        Raises `DataError` for messages that are none, and for media that are not there or may not be read.
        """
        try:
            kept = [_only(message, kinds) for message in read_messages(messages, "messages", with_media=True)]
            placed, media = self._rows.read({}, kept)
        except (BadRow, Mismatch) as why:
            raise DataError(f"messages: {why}") from why
        return placed, tuple(media)


class PreparedMedia:
    """Media as the model at `model` reads them; the most recently used sets are kept. One event loop uses it."""

    def __init__(self, model: ModelConfig, shown: ShownMedia) -> None:
        config = shown.config
        if "audio" not in read_model_folder(model).media:  # it sees videos whose sound the policy may hear
            config = config.model_copy(update={"video": config.video.model_copy(update={"audio": False})})
        pool = open_pool(model, DataSection(media=config), shown.spool)
        assert pool is not None, "media are read"
        self._pool = pool
        self._kept = ReplyCache[ReadyPrompt](_KEPT, _KEPT_BYTES, _num_bytes)

    async def start(self) -> None:
        """Starts the workers. Raises `ConfigError` when packages or the model's processor are missing."""
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    async def of(self, media: Sequence[Media]) -> ReadyPrompt:
        """What `ReadyPrompt.expand` puts in the places of any ids that show `media`, and the features. Raises `DataError`."""
        key = hashlib.sha256(repr([(item.kind, item.source) for item in media]).encode()).digest()

        async def prepare() -> ReadyPrompt:
            # the features are the same in whatever text they stand
            places = {"role": "user", "content": [{"type": item.kind} for item in media]}
            made = await self._pool.prepare(Prompt("what is shown", messages=(places,), media=tuple(media)))
            return ReadyPrompt.of(made.features)

        ready, _ = await self._kept.get(key, prepare)
        return ready


def _only(message: Message, kinds: Collection[str]) -> Message:
    """The message without the media of other kinds."""
    if isinstance(message["content"], str):
        return message
    return {**message, "content": [part for part in message["content"] if part["type"] in ("text", *kinds)]}


def _num_bytes(ready: ReadyPrompt) -> int:
    return sum(array.nbytes for array in ready.features.values())
