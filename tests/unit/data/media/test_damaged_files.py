"""Damaged files, random bytes and files that change: decoded or named, never a hang."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from made_media import clip, encoded, picture, sound, tone

from relax.config.media import MediaConfig, VideoConfig
from relax.data.media.decoded import Audio, Image, Video, check
from relax.data.media.decoder import Decoder
from relax.data.media.source import Spool
from relax.errors import DataError
from relax.types import Media

REAL = {
    "png": encoded(picture((16, 12))),
    "jpeg": encoded(picture((16, 12)), "JPEG"),
    "gif": encoded(picture((16, 12)), "GIF"),
    "webp": encoded(picture((16, 12)), "WEBP"),
    "tiff": encoded(picture((16, 12)), "TIFF"),
    "wav": sound(tone(0.2, 8_000), 8_000),
    "flac": sound(tone(0.2, 8_000), 8_000, "flac", "flac"),
    "ogg": sound(tone(0.2, 48_000), 48_000, "ogg", "libopus"),
    "mp3": sound(tone(0.2, 32_000), 32_000, "mp3", "libmp3lame"),
    "mp4": clip(range(0, 600, 100), audio=tone(0.5, 8_000)),
    "mkv": clip(range(0, 600, 100), container="matroska"),
    "avi": clip(range(0, 100, 10), container="avi", codec="mpeg4"),
}
DAMAGE = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), max_size=8)


def decoded_or_named(content: bytes, kind: str) -> None:
    spool, config = Spool(), MediaConfig(video=VideoConfig(audio=True))
    try:
        (found,) = Decoder(config, spool.fd).decode("row", [Media(kind, spool.keep(content))])
    except DataError as error:
        reason = str(error)
    else:
        assert isinstance(found, {"image": Image, "audio": Audio, "video": Video}[kind])
        assert check(found, kind) > 0
        return
    assert reason.startswith(f"row: {kind}, item 1 of 1, 'spool:")


def damaged(name: str, keep: float, damage: list[tuple[float, int]]) -> bytes:
    content = bytearray(REAL[name])
    for place, flip in damage:
        content[int(place * (len(content) - 1))] ^= flip
    return bytes(content[: int(keep * len(content))])


ANY_DAMAGE = {
    "name": st.sampled_from(sorted(REAL)),
    "keep": st.one_of(st.just(1.0), st.floats(0, 1)),
    "damage": DAMAGE,
    "kind": st.sampled_from(["image", "audio", "video"]),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(name="png", keep=1.0, damage=[], kind="video")
@example(name="mp4", keep=1.0, damage=[], kind="image")
@example(name="mp4", keep=1.0, damage=[], kind="audio")
@given(**ANY_DAMAGE)
def test_a_damaged_file_is_decoded_or_named(name: str, keep: float, damage, kind: str) -> None:
    decoded_or_named(damaged(name, keep, damage), kind)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**ANY_DAMAGE)
def test_a_damaged_file_is_decoded_or_named_at_length(name: str, keep: float, damage, kind: str) -> None:
    decoded_or_named(damaged(name, keep, damage), kind)


@settings(max_examples=40, deadline=None)
@given(head=st.sampled_from([b"", *(content[:16] for content in REAL.values())]), rest=st.binary(max_size=400))
def test_any_bytes_are_decoded_or_named(head: bytes, rest: bytes) -> None:
    for kind in ("image", "audio", "video"):
        decoded_or_named((head + rest) or b"\0", kind)


def test_a_file_that_became_a_pipe_or_grew_is_refused_and_nothing_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "large.png").write_bytes(b"0" * 2000)
    decoder = Decoder(MediaConfig(max_file_bytes=1000), Spool().fd)
    for name, words in (("pipe.png", "no longer a file"), ("large.png", "media.max_file_bytes"), ("none.png", "No such file")):
        with pytest.raises(DataError, match=words):
            decoder.decode("row", [Media("image", str(tmp_path / name))])
