"""Audio by FFmpeg to one channel at one rate. Resampling is soxr's, which is what feature extractors' own loaders use."""

from typing import BinaryIO

import av
import numpy as np
import soxr
from numpy.typing import NDArray

from relax.config.media import AudioConfig
from relax.data.media.container import check_whole, open_container, single_thread
from relax.data.media.decoded import Audio, Unreadable


def read_audio(file: BinaryIO, config: AudioConfig, *, origin_s: float | None = None) -> Audio:
    """The first audio track of `file`. With `origin_s`, the time of the file at which the samples begin (as its video does):
    what is before is cut off, and silence put where the track begins later. Raises `Unreadable`, or `av.FFmpegError`.
    """
    with open_container(file) as container:
        if not container.streams.audio:
            raise Unreadable("it has no audio track")
        stream = container.streams.audio[0]
        single_thread(stream)
        chunks: list[NDArray[np.float32]] = []
        num_samples, rate, begin_s = 0, 0, 0.0
        for frame in container.decode(stream):
            if not chunks:
                rate, begin_s = frame.sample_rate, frame.time or 0.0
            elif frame.sample_rate != rate:
                raise Unreadable(f"its sampling rate changes from {rate} to {frame.sample_rate}")
            num_samples += frame.samples
            if num_samples > config.seconds_limit * rate:
                raise Unreadable(f"it is longer than {config.seconds_limit:g} s (audio.seconds_limit)")
            chunks.append(_mono(frame))
        if num_samples == 0 or not rate:
            raise Unreadable("it has no samples")
        check_whole(file, container, stream, num_samples / rate, begin_s)
    samples = np.concatenate(chunks)
    if not np.isfinite(samples).all():
        raise Unreadable("it holds NaN or infinity")
    if origin_s is not None:
        shift = round((begin_s - origin_s) * rate)
        samples = np.pad(samples, (max(0, shift), 0))[max(0, -shift) :]
    samples = soxr.resample(samples, rate, config.sampling_rate, quality="HQ")
    if len(samples) == 0:
        raise Unreadable("it is shorter than one sample")
    return Audio(samples, config.sampling_rate)


def _mono(frame: av.AudioFrame) -> NDArray[np.float32]:
    """The mean of the channels, from -1 to 1."""
    raw = frame.to_ndarray()
    channels = raw if frame.format.is_planar else raw.reshape(frame.samples, -1).T
    mean: NDArray[np.float64] = channels.mean(axis=0, dtype=np.float64)
    if raw.dtype.kind == "u":
        mean = (mean - 128) / 128
    elif raw.dtype.kind == "i":
        mean /= 2.0 ** (8 * raw.dtype.itemsize - 1)
    return mean.astype(np.float32)
