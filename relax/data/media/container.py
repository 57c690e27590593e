"""Opening what FFmpeg reads, without what else it could do."""

import os
from typing import BinaryIO

import av
from av.container import InputContainer
from av.stream import Stream

from relax.data.media.decoded import Unreadable

# Containers that hold their own bytes. FFmpeg reads others that name files or addresses (playlists, concatenations), and
# anything at all as raw samples.
FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,wav,w64,mp3,ogg,flac,aac,aiff,au,caf,amr,gif,flv,asf,mpeg,mpegts,mpegvideo,"
    "h264,hevc,ivf"
)
OPTIONS = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}  # nothing but the file itself is read
ENDS_EARLY = 0.95  # a file that has less than this of what its head promises was cut off
# Formats without a length in the head, of which FFmpeg guesses it by the bit rate. Most mp3 files have one (Xing).
GUESSED = ("mp3", "aac", "amr", "mpeg", "mpegts", "mpegvideo", "h264", "hevc")
STREAMED = 0x7FFFF000  # in the place of a size: the writer did not know it


def open_container(file: BinaryIO) -> InputContainer:
    """Raises `Unreadable` when the file is of no format that is read, has a damaged head, or is a part of a RIFF file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(8)
    file.seek(0)
    if head[:4] == b"RIFF" and size < ENDS_EARLY * (promised := int.from_bytes(head[4:], "little")) < STREAMED:
        raise Unreadable(f"it is cut off: its head promises {promised} bytes, and there are {size}")
    try:
        return av.open(file, "r", options=OPTIONS, metadata_errors="replace")
    except av.FFmpegError as error:
        raise Unreadable(f"it is not of a format that is read, or its head is damaged ({error.strerror})") from None


def single_thread(stream: Stream) -> None:
    """Decoders must not start threads of their own: each core has a worker. Raises `Unreadable` without a decoder."""
    if stream.codec_context is None:
        raise Unreadable("its codec is not known")
    stream.codec_context.thread_count = 1


def check_whole(file: BinaryIO, container: InputContainer, stream: Stream, found_s: float, begin_s: float) -> None:
    """Raises `Unreadable` when the stream ends long before the head says so. Nothing more can be read from the container."""
    is_guessed = container.format.name in GUESSED and not _has_xing(file)
    if is_guessed or stream.duration is None or stream.time_base is None:
        return
    promised_s = float(stream.duration * stream.time_base)
    if found_s + max(0.0, begin_s) < ENDS_EARLY * promised_s - 0.1:  # some heads count from 0, others from the beginning
        raise Unreadable(f"it is cut off: its head promises {promised_s:.1f} s, and there are {found_s:.1f}")


def _has_xing(file: BinaryIO) -> bool:
    file.seek(0)
    head = file.read(10)
    tag_size = sum(byte << 7 * place for place, byte in enumerate(reversed(head[6:]))) + 10 if head[:3] == b"ID3" else 0
    file.seek(tag_size)
    first = file.read(4096)
    return b"Xing" in first or b"Info" in first
