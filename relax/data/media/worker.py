"""The process in which media are decoded: `python -m relax.data.media.worker CHANNEL LIFE SPOOL` (file descriptors).

Imports neither torch nor ray, unless a transform or the processor does. Standard output is sent to standard error.
"""

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.child import die_with_parent
from relax.config.media import MediaConfig
from relax.data.dotted import load_function
from relax.data.media.decoded import Audio, Decoded, Image
from relax.data.media.decoder import Decoder
from relax.data.media.wire import Done, Job, Ready, Refused, Setup, receive, send
from relax.errors import ConfigError, DataError
from relax.shared_arrays import place

Processor = Callable[[Sequence[Mapping[str, Any]], Sequence[Decoded]], Mapping[str, NDArray[Any]]]


def main(argv: Sequence[str]) -> None:
    """Decodes one prompt after another until the channel closes."""
    channel_fd, life_fd, spool_fd = map(int, argv)
    for fd in (channel_fd, life_fd, spool_fd):
        os.set_inheritable(fd, False)
    os.dup2(2, 1)
    die_with_parent(life_fd)
    channel = socket.socket(fileno=channel_fd)
    first = receive(channel, Setup)
    if first is None:
        return
    setup = first[0]
    sys.path.extend(path for path in setup.sys_path if path not in sys.path)
    try:
        decoder = Decoder(MediaConfig(**setup.config), spool_fd)
        processor = _load(setup.processor, setup.options)
    except ConfigError as error:
        send(channel, Refused(str(error)))
        return
    send(channel, Ready())
    while (received := receive(channel, Job)) is not None:
        job = received[0]
        try:
            decoded = decoder.decode(job.key, job.media)
            values, arrays = _flat(decoded) if processor is None else ({}, _process(processor, job, decoded))
            placed, num_bytes, fd = place(arrays)
        except DataError as error:
            send(channel, Refused(str(error)))
        except (MemoryError, OSError) as error:
            send(channel, Refused(f"{job.key}: there is no memory for its media: {error}"))
        else:
            send(channel, Done(values, placed, num_bytes), fd)
            os.close(fd)


def _load(path: str | None, options: Mapping[str, Any]) -> Processor | None:
    if path is None:
        return None
    make = load_function(path, "processor")
    try:
        processor: Processor = make(**options)
    except Exception as error:  # the user's function, or whatever a model's processor raises
        raise ConfigError(f"processor = {path!r}: {type(error).__name__}: {error}") from error
    return processor


def _process(processor: Processor, job: Job, decoded: Sequence[Decoded]) -> dict[str, NDArray[Any]]:
    try:
        found = {str(name): np.asarray(array) for name, array in processor(job.messages, decoded).items()}
    except Exception as error:
        raise DataError(f"{job.key}: the processor refuses its media: {type(error).__name__}: {error}") from error
    odd = [name for name, array in found.items() if array.dtype.kind not in "biuf"]
    if odd:
        raise DataError(f"{job.key}: the processor gave {odd} of the type {found[odd[0]].dtype}, and numbers are needed")
    return found


def _flat(decoded: Sequence[Decoded]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Items as values and arrays, named `number.field`."""
    values: dict[str, Any] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for number, item in enumerate(decoded):
        if isinstance(item, Image):
            arrays[f"{number}.pixels"] = item.pixels
        elif isinstance(item, Audio):
            arrays[f"{number}.samples"], values[f"{number}.sampling_rate"] = item.samples, item.sampling_rate
        else:
            arrays[f"{number}.frames"], arrays[f"{number}.times"] = item.frames, item.times
            values[f"{number}.fps"] = item.fps
            if item.audio is not None:
                arrays[f"{number}.samples"], values[f"{number}.sampling_rate"] = item.audio.samples, item.audio.sampling_rate
    return values, arrays


if __name__ == "__main__":
    main(sys.argv[1:])
