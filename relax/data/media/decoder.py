"""Decodes the media of prompts: read, decode, transform, check. Whatever goes wrong is a `DataError` that names the item."""

from collections.abc import Callable, Sequence
from typing import Any

from relax.config.media import MediaConfig
from relax.data.dotted import load_function
from relax.data.media.audio import read_audio
from relax.data.media.decoded import Decoded, Unreadable, check
from relax.data.media.image import read_image
from relax.data.media.source import open_source, shown
from relax.data.media.video import read_video
from relax.errors import DataError
from relax.types import Media


class Decoder:
    """Decodes as `config` says; `spool_fd`: the file of bytes that came inside rows.

    Raises `ConfigError` when a transform cannot be imported.
    """

    def __init__(self, config: MediaConfig, spool_fd: int) -> None:
        self._config, self._spool_fd = config, spool_fd
        sections = {"image": config.image, "audio": config.audio, "video": config.video}
        self._transforms: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {
            kind: [(path, load_function(path, f"media.{kind}.transforms")) for path in section.transforms]
            for kind, section in sections.items()
        }

    def decode(self, key: str, media: Sequence[Media]) -> list[Decoded]:
        """What `media` hold, in their order. Raises `DataError`."""
        decoded: list[Decoded] = []
        num_bytes = 0
        for number, item in enumerate(media, 1):
            place = f"{key}: {item.kind}, item {number} of {len(media)}, {shown(item)}"
            try:
                found = self._read(item)
                for path, transform in self._transforms[item.kind]:
                    place = f"{place}, after {path}"
                    found = transform(found)
                num_bytes += check(found, item.kind)
                if num_bytes > self._config.max_prompt_bytes:
                    limit = f"{self._config.max_prompt_bytes} are allowed (media.max_prompt_bytes)"
                    raise Unreadable(f"the prompt's media have {num_bytes} bytes, and {limit}")
            except Unreadable as why:
                raise DataError(f"{place}: {why}") from why
            except Exception as error:  # decoders raise whatever a damaged file makes them, and transforms are the user's
                raise DataError(f"{place}: cannot be decoded: {type(error).__name__}: {error}") from error
            decoded.append(found)
        return decoded

    def _read(self, item: Media) -> Decoded:
        with open_source(item, self._config, self._spool_fd) as file:
            if item.kind == "image":
                return read_image(file, self._config.image)
            if item.kind == "audio":
                return read_audio(file, self._config.audio)
            return read_video(file, self._config)
