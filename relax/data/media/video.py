"""Frames of a video at even times.

    times of all packets, without decoding -> length -> instants k / fps -> decode what they need -> the frames shown then

By times and not by numbers of frames, so that a rate that varies does no harm. Key frames part a video into stretches; those
into which no instant falls are not decoded.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import av
import numpy as np
from av.container import InputContainer
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from relax.config.media import MediaConfig
from relax.data.media.audio import read_audio
from relax.data.media.container import check_whole, open_container, single_thread
from relax.data.media.decoded import Unreadable, Video
from relax.data.media.image import fit

MOST_PACKETS = 1_000_000
NEAR_S = 5e-4  # times in files are rounded, in some to milliseconds
FRAME_S = 1 / 25  # where a file has no rate

Times = NDArray[np.float64]


def read_video(file: BinaryIO, config: MediaConfig) -> Video:
    """The video in `file`. Raises `Unreadable`, or `av.FFmpegError`."""
    settings = config.video
    with open_container(file) as container:
        index = _read_index(container, config)
        has_audio = bool(container.streams.audio)
        start, duration = float(index.shown[0]), index.duration_s
        check_whole(file, container, _stream(container, config), duration, start)
    most = min(settings.max_frames, len(index.shown))
    wanted = max(1, math.ceil(duration * settings.fps - 1e-3))
    fps = settings.fps if wanted <= most else most / duration
    instants = start + np.arange(min(wanted, most)) / fps
    with open_container(file) as container:
        frames, times = _take(container, index, instants, config)
    audio = read_audio(file, config.audio, origin_s=start) if settings.audio and has_audio else None
    return Video(frames, times - start, fps, audio)


@dataclass(frozen=True, slots=True)
class _Index:
    """The packets of a video in the order in which they are decoded: `times [P]` in seconds, `is_key [P]`, `is_shown [P]`,
    `lasting [P]`: seconds as the file has them, 0 where it does not say.

    `is_counted`: the file has no times, and these are numbers of frames over the rate.
    """

    times: Times
    is_key: NDArray[np.bool_]
    is_shown: NDArray[np.bool_]
    is_counted: bool
    lasting: Times

    @property
    def shown(self) -> Times:
        """When frames come on, in order."""
        return np.sort(self.times[self.is_shown])

    @property
    def interval_s(self) -> float:
        """What most frames last."""
        return float(np.median(np.diff(self.shown))) if self.is_shown.sum() > 1 else FRAME_S

    @property
    def duration_s(self) -> float:
        """From the first frame to the end of the last one, which may stand longer than others: slides, recorded screens."""
        last = np.argmax(np.where(self.is_shown, self.times, -np.inf))
        return float(self.times[last] - self.shown[0]) + max(self.interval_s, float(self.lasting[last]))

    def shown_at(self, instants: Times) -> Times:
        """When the frames came on that are shown at `instants`."""
        shown = self.shown
        return shown[np.maximum(np.searchsorted(shown, instants + NEAR_S, side="right") - 1, 0)]

    def needed(self, instants: Times) -> NDArray[np.bool_]:
        """Which packets `[P]` must be decoded to have what is shown at `instants`."""
        if self.is_counted or not self.is_key.any():
            return np.ones(len(self.times), bool)
        stretch = np.cumsum(self.is_key) - 1  # -1: before the first key frame
        wanted = np.isin(self.times, self.shown_at(instants))
        # Frames that are shown before the key frame of their stretch are made of frames of the stretch before as well.
        leads = self.times < self.times[self.is_key][stretch]
        stretches = np.concatenate([stretch[wanted], stretch[wanted & leads] - 1])
        return np.isin(stretch, stretches)


def _stream(container: InputContainer, config: MediaConfig) -> VideoStream:
    # A song's cover picture is no video.
    pictures = [stream for stream in container.streams.video if not stream.disposition & av.stream.Disposition.attached_pic]
    if not pictures:
        raise Unreadable("it has no video track")
    single_thread(pictures[0])
    pictures[0].codec_context.options = {"max_pixels": str(config.video.pixel_limit)}  # frames may grow in the middle of a file
    return pictures[0]


def _read_index(container: InputContainer, config: MediaConfig) -> _Index:
    stream, limit_s = _stream(container, config), config.video.seconds_limit
    _check_size(stream.codec_context.width, stream.codec_context.height, config)
    base = float(stream.time_base or 0)
    stamps: list[int | None] = []
    lasting: list[float] = []
    flags: list[tuple[bool, bool]] = []
    first: int | None = None
    for packet in container.demux(stream):
        if packet.size == 0:  # the end
            break
        stamps.append(packet.pts)
        lasting.append((packet.duration or 0) * base)
        flags.append((packet.is_keyframe, not packet.is_discard))
        first = packet.pts if first is None else first
        if len(stamps) > MOST_PACKETS:
            raise Unreadable(f"it has more than {MOST_PACKETS} frames")
        if first is not None and packet.pts is not None and (packet.pts - first) * base > limit_s:
            raise Unreadable(_too_long(limit_s))
    is_counted = not base or None in stamps
    rate = float(stream.average_rate or 1 / FRAME_S)
    times = np.arange(len(stamps)) / rate if is_counted else np.array(stamps, np.float64) * base
    is_key, is_shown = np.array(flags, bool).reshape(-1, 2).T
    if is_key.any() and not is_counted:  # a recording may begin between key frames: what precedes the first cannot be decoded
        begin = int(np.argmax(is_key))
        is_shown = is_shown & (np.arange(len(times)) >= begin) & (times >= times[begin])
    if not is_shown.any():
        raise Unreadable("it has no frames")
    index = _Index(times, is_key, is_shown, is_counted, np.array(lasting))
    if index.duration_s > limit_s:
        raise Unreadable(_too_long(limit_s))
    return index


def _take(container: InputContainer, index: _Index, instants: Times, config: MediaConfig) -> tuple[NDArray[np.uint8], Times]:
    """What is shown at `instants [F]`: frames `[F, H, W, 3]`, and when each came on, `[F]`."""
    frames: NDArray[np.uint8] | None = None
    times = np.empty(len(instants))
    scaler = VideoReformatter()  # one for all frames: preparing it takes longer than scaling a small frame
    expected = index.shown_at(instants)
    place, current, since = 0, None, 0.0
    for time, frame in itertools.chain(_decode(container, index, index.needed(instants), config), [(math.inf, None)]):
        while place < len(instants) and current is not None and time > instants[place] + NEAR_S:
            # A frame that cannot be decoded leaves the one before it on the screen, which must not go unnoticed.
            if current.is_corrupt or abs(expected[place] - since) > 1.5 * index.interval_s + NEAR_S:
                raise Unreadable(f"the frame at {expected[place] - index.shown[0]:.2f} s is damaged")
            if frames is None:
                size, turns = fit(current.width, current.height, None, config.video.max_pixels), current.rotation // 90
                shape = (len(instants), *(size if turns % 2 else size[::-1]), 3)
                if math.prod(shape) > config.max_prompt_bytes:
                    limit = f"max_prompt_bytes = {config.max_prompt_bytes}"
                    raise Unreadable(f"its frames have {math.prod(shape)} bytes {list(shape)}, and {limit}")
                frames = np.empty(shape, np.uint8)
            if place and times[place - 1] == since:
                frames[place] = frames[place - 1]
            else:
                scaled = scaler.reformat(current, *size, "rgb24", interpolation="AREA", threads=1)
                frames[place] = np.rot90(scaled.to_ndarray(), turns)
            times[place] = since
            place += 1
        if place == len(instants):
            break
        current, since = frame, time
        if frame is not None:
            _check_size(frame.width, frame.height, config)
    if frames is None or place < len(instants):
        raise Unreadable("its frames cannot be decoded")
    return frames, times


def _decode(
    container: InputContainer, index: _Index, needed: NDArray[np.bool_], config: MediaConfig
) -> Iterator[tuple[float, av.VideoFrame | None]]:
    """The frames of the needed packets with their times, in the order in which they are shown."""
    stream = _stream(container, config)
    codec, base = stream.codec_context, float(stream.time_base or 0)
    count, is_open = 0, False

    def timed(frame: av.VideoFrame) -> tuple[float, av.VideoFrame]:
        nonlocal count
        count += 1
        if index.is_counted:
            return float(index.times[min(count, len(index.times)) - 1]), frame
        if frame.pts is None:
            raise Unreadable(f"frame {count} has no time")
        return frame.pts * base, frame

    for number, packet in enumerate(container.demux(stream)):
        is_needed = packet.size > 0 and number < len(needed) and bool(needed[number])
        if is_needed:
            yield from map(timed, codec.decode(packet))
        elif is_open:  # a gap, or the end: what the decoder still holds
            yield from map(timed, codec.decode(None))
            codec.flush_buffers()
        is_open = is_needed


def _check_size(width: int, height: int, config: MediaConfig) -> None:
    if width * height > config.video.pixel_limit:
        raise Unreadable(
            f"its frames have {width} x {height} pixels, and {config.video.pixel_limit} are allowed (video.pixel_limit)"
        )


def _too_long(limit_s: float) -> str:
    return f"it is longer than {limit_s:g} s (video.seconds_limit)"
