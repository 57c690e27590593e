"""The way of images, sounds and videos into training, stage by stage, against a loop over transformers' own processor.

    python benchmarks/media.py             # stages as multiples of the loop, and how often each byte is copied
    python benchmarks/media.py --run       # also: a run of examples/shapes_vqa, and how much of it waits for media

The loop and every stage take the same files in one run, one after the other, with one thread. What is measured is processor
time of this process, which other programs disturb less than a clock. Copies are counted where they are made: by the sizes of
what was written, not by what the code says of itself.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import tempfile
import time
import tracemalloc
import wave
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from bus import SMALL, queue, tickets
from PIL import Image as Pillow
from runs import ROOT, relax
from torch.utils._python_dispatch import TorchDispatchMode

from relax import shared_arrays
from relax.bus.arena import Arena
from relax.bus.client import connect
from relax.bus.core import Core
from relax.bus.server import BusServer
from relax.bus.transfer_queue import QueueLimits, TransferQueue
from relax.config.media import AudioConfig, ImageConfig, MediaConfig, VideoConfig
from relax.config.run import RunConfig
from relax.data.media.decoded import Image, Video
from relax.data.media.decoder import Decoder
from relax.data.media.pool import MediaPool
from relax.data.media.source import Spool
from relax.models.omni_lm import OmniForward
from relax.models.preparer import ReadyPrompt, load_reader
from relax.models.tiny_omni import build_tiny_omni
from relax.roles.serve import with_borrowed, with_lent
from relax.train.backend import TrainBatch
from relax.train.torch_backend import TorchBackend
from relax.types import GenerateRequest, Media, Prompt, Ragged, Sampling

KINDS = ("image", "audio", "video")
NUM_FILES, ROWS, ANSWER = 12, 8, 16
FPS, SECONDS, RATE = 2.0, 4, 16_000
LARGE = 1 << 16  # bytes: what is smaller is not what media are made of


# -- files and the loop ------------------------------------------------------------------------------------------------
def make_files(folder: Path) -> dict[str, list[Path]]:
    """Pictures of 1,024 x 768 (jpeg), sounds of four seconds (wav), videos of four seconds and 320 x 240 (h264)."""
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for number in range(NUM_FILES):
        draw = np.random.default_rng(number)
        small = draw.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        found["image"].append(folder / f"{number}.jpg")
        Pillow.fromarray(small).resize((1024, 768)).save(found["image"][-1])
        found["audio"].append(folder / f"{number}.wav")
        with wave.open(str(found["audio"][-1]), "wb") as out:
            out.setparams((1, 2, RATE, 0, "NONE", ""))
            out.writeframes(draw.integers(-9000, 9000, SECONDS * RATE, dtype=np.int16).tobytes())
        found["video"].append(folder / f"{number}.mp4")
        with av.open(str(found["video"][-1]), "w") as file:
            stream = file.add_stream("libx264", rate=25)
            stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
            for frame in range(SECONDS * 25):
                picture = np.asarray(Pillow.fromarray(np.roll(small, frame // 5, 1)).resize((320, 240)))
                file.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
            file.mux(stream.encode())
    return found


def plain_loop(folder: Path, kind: str) -> Callable[[Path], Any]:
    """What one writes by hand: transformers' loader, where it has one that needs no more packages, and its processor."""
    from transformers import AutoProcessor
    from transformers.image_utils import load_image
    from transformers.video_utils import load_video

    processor = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template(_messages(kind), add_generation_prompt=True)

    def image(path: Path) -> Any:
        return processor(text=[text], images=[load_image(str(path))], return_tensors="np")

    def audio(path: Path) -> Any:
        with wave.open(str(path)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
        return processor(text=[text], audio=[samples], return_tensors="np")

    def video(path: Path) -> Any:
        frames, metadata = load_video(str(path), fps=FPS, backend="pyav")
        options = {"do_sample_frames": False, "video_metadata": [metadata]}
        return processor(text=[text], videos=[frames], videos_kwargs=options, return_tensors="np")

    return {"image": image, "audio": audio, "video": video}[kind]


def _messages(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "What is it?"}]}]


def mirror(item: Any) -> Any:
    """A transform: left to right."""
    if isinstance(item, Image):
        return Image(np.ascontiguousarray(item.pixels[:, ::-1]))
    return replace(item, frames=np.ascontiguousarray(item.frames[:, :, ::-1])) if isinstance(item, Video) else item


# -- stages ------------------------------------------------------------------------------------------------------------
def timed(work: Callable[[int], Any]) -> float:
    """Processor seconds of this process for one prompt, the first one not counted."""
    work(0)
    started = time.process_time()
    for number in range(1, NUM_FILES):
        work(number)
    return (time.process_time() - started) / (NUM_FILES - 1)


async def timed_async(work: Callable[[int], Awaitable[Any]]) -> float:
    await work(0)
    started = time.process_time()
    for number in range(1, NUM_FILES):
        await work(number)
    return (time.process_time() - started) / (NUM_FILES - 1)


class Case:
    """One kind of media: its files, and what the stages before have made of them."""

    def __init__(self, model: Path, kind: str, files: Sequence[Path]) -> None:
        self.model, self.kind, self.files = model, kind, files
        sections = {"image": ImageConfig, "audio": AudioConfig, "video": VideoConfig}
        self.config = MediaConfig(roots=[str(files[0].parent)], num_workers=1)
        own = sections[kind](transforms=["media:mirror"])
        self.with_transform = self.config.model_copy(update={kind: own})
        self.options = {"folder": str(model), "trust_remote_code": False, "system_prompt": None, "template_options": {}}
        self.decoded: list[Any] = []
        self.made: list[Any] = []
        self.ready: list[ReadyPrompt] = []

    def media(self, number: int) -> tuple[Media, ...]:
        return (Media(self.kind, str(self.files[number])),)

    def stages(self) -> Iterator[tuple[str, float]]:
        loop, decoder, spool = plain_loop(self.model, self.kind), Decoder(self.config, Spool().fd), Spool()
        yield "loop over transformers' processor", timed(lambda n: loop(self.files[n]))
        self.decoded = [decoder.decode("", self.media(n)) for n in range(NUM_FILES)]
        yield "decode", timed(lambda n: decoder.decode("", self.media(n)))
        turning = Decoder(self.with_transform, spool.fd)
        yield "decode and transform", timed(lambda n: turning.decode("", self.media(n)))
        read = load_reader(**self.options)
        self.made = [read(_messages(self.kind), items) for items in self.decoded]
        yield "template and processor", timed(lambda n: read(_messages(self.kind), self.decoded[n]))
        yield "into shared memory", timed(lambda n: shared_arrays.share(self.made[n]))
        self.ready = [ReadyPrompt.of(shared_arrays.share(arrays)) for arrays in self.made]
        yield "hand-off by the pool, this side", asyncio.run(self._through_pool())
        yield "queue in this process: put, claim", asyncio.run(self._through_core())
        yield "queue elsewhere: put, claim, this side", asyncio.run(self._through_queue())
        yield from self._through_model()

    async def _through_pool(self) -> float:
        pool = MediaPool(self.config, processor="relax.models.preparer:load_reader", options=self.options)
        await pool.start()
        prompts = [Prompt(str(n), messages=tuple(_messages(self.kind)), media=self.media(n)) for n in range(NUM_FILES)]
        try:
            return await timed_async(lambda n: pool.prepare(prompts[n]))
        finally:
            await pool.close()

    async def _through_core(self) -> float:
        core = await ready_core()
        return await self._put_and_claim(core, [ticket.issue for ticket in await core.admit(NUM_FILES, 1.0)])

    async def _through_queue(self) -> float:
        async with queue() as (_, client):
            return await self._put_and_claim(client, await tickets(client, NUM_FILES))

    async def _put_and_claim(self, bus: TransferQueue, issues: Sequence[int]) -> float:
        async def work(number: int) -> None:
            await bus.put_group(issues[number], SMALL, 10.0, self.ready[number].features)
            lease = await bus.claim("actor", ("tokens",), num_groups=1, wait_s=10.0, shared=True)
            await bus.ack([lease.lease_id])

        return await timed_async(work)

    def _through_model(self) -> Iterator[tuple[str, float]]:
        backend = TorchBackend(run_config(self.model))
        forward = backend._forward
        assert isinstance(forward, OmniForward)
        with torch.no_grad():
            yield "engine: encode", timed(lambda n: forward.encode_prompt(self.ready[n].ids, self.ready[n].features))
        yield f"trainer: {ROWS} x {ANSWER} tokens", timed(lambda n: backend.forward_backward(batch_of([self.ready[n]])))


async def ready_core() -> Core:
    core = Core(QueueLimits(1 << 20, 0, 1, max_bytes=4 << 30))
    await core.subscribe("engine")
    await core.acknowledge("engine", 0)
    return core


def run_config(model: Path) -> RunConfig:
    data = {"type": "generator", "path": "examples.shapes_vqa.shapes:question"}
    return RunConfig.model_validate(
        {"model": {"path": str(model)}, "data": data, "reward": {"type": "exact"}, "train": {"num_steps": 1}}
    )


def batch_of(prompts: Sequence[ReadyPrompt]) -> TrainBatch:
    """A group of answers to each prompt."""
    rows = [np.append(prompt.ids, np.arange(100, 100 + ANSWER)).astype(np.int32) for prompt in prompts for _ in range(ROWS)]
    masks = [np.arange(len(row)) >= len(row) - ANSWER for row in rows]
    signs = [np.full(len(row), 1.0 if number % 2 else -1.0, np.float32) for number, row in enumerate(rows)]
    mask, zeros = Ragged.pack([m.astype(np.uint8) for m in masks]), Ragged.pack([0 * sign for sign in signs])
    return TrainBatch(
        Ragged.pack(rows),
        mask,
        np.repeat(np.arange(len(prompts)), ROWS),
        rollout_logprobs=zeros,
        advantages=Ragged.pack(signs),
        features={number: prompt.features for number, prompt in enumerate(prompts)},
    )


# -- copies ------------------------------------------------------------------------------------------------------------
class TorchCopies(TorchDispatchMode):
    """Bytes that torch writes by copying, in pieces that media may be, until an encoder begins."""

    NAMES = ("copy_", "_to_copy", "clone", "cat", "lift_fresh", "contiguous")

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.nbytes >= LARGE and function.overloadpacket.__name__ in self.NAMES:
            self.num_bytes += out.nbytes
        return out


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Bytes written meanwhile, for all that can hold a copy: numpy's and Python's own memory, shared memory, torch's."""
    written, torch_copies = [0], TorchCopies()
    new_memory, allocate = shared_arrays._new_memory, Arena.allocate

    def memory(size: int) -> int:
        written[0] += size
        return new_memory(size)

    def block(arena: Arena, size: int) -> Any:
        written[0] += size
        return allocate(arena, size)

    gc.collect()
    tracemalloc.start()
    shared_arrays._new_memory, Arena.allocate = memory, block  # type: ignore[method-assign]
    start = tracemalloc.get_traced_memory()[0]
    try:
        with torch_copies:
            yield lambda: written[0] + torch_copies.num_bytes + tracemalloc.get_traced_memory()[1] - start
    finally:
        shared_arrays._new_memory, Arena.allocate = new_memory, allocate  # type: ignore[method-assign]
        tracemalloc.stop()


class _EncoderBegins(Exception):
    """What came before it are copies; what comes after is computation."""


def until_encoder(work: Callable[[], Any], forward: OmniForward) -> int:
    """Runs `work` up to where the model's own encoders are called; the bytes that the first one is given."""
    given: list[int] = []

    def stop(features: torch.Tensor, *_: Any, **__: Any) -> None:
        given.append(features.nbytes)
        raise _EncoderBegins

    names = [f"get_{kind}_features" for kind in KINDS if hasattr(forward._core, f"get_{kind}_features")]
    for name in names:
        setattr(forward._core, name, stop)
    try:
        with contextlib.suppress(_EncoderBegins):
            work()
    finally:
        for name in names:
            delattr(forward._core, name)
    return given[0]


async def copies(model: Path, kind: str, made: Mapping[str, Any], is_ray: bool) -> dict[str, float]:
    """Bytes written for each byte that an encoder is given, from what the processor has made to where the encoder begins.
    `is_ray`: by the queue's socket and by requests that leave the process, as roles on Ray do it; both ends are here, so that
    all is seen."""
    forward = TorchBackend(run_config(model))._forward
    assert isinstance(forward, OmniForward)
    found: dict[str, float] = {}
    with counted() as num_bytes:
        ready = ReadyPrompt.of(shared_arrays.share(made))
        shared = num_bytes()
    with counted() as num_bytes:
        request = GenerateRequest("1", ready.ids, (0,), Sampling(1), features=ready.features)
        if is_ray:
            request = with_borrowed(through_ray(with_lent(request)))
        size = until_encoder(lambda: forward.encode_prompt(request.prompt_ids, request.features), forward)
        found["to the engine"] = (shared + num_bytes()) / size
    core = await ready_core()
    async with BusServer(core) as server:
        bus: Any = await connect(server.address) if is_ray else core
        issue = (await bus.admit(1, 1.0))[0].issue
        with counted() as num_bytes:
            await bus.put_group(issue, SMALL, 10.0, ready.features)
            lease = await bus.claim("actor", ("tokens",), num_groups=1, wait_s=10.0, shared=True)
            size = until_encoder(lambda: forward.encode_packed([(lease.shared[issue], len(ready.ids))]), forward)
            found["to the trainer"] = (shared + num_bytes()) / size
        if is_ray:
            await bus.close()
    return found


def through_ray(request: GenerateRequest) -> GenerateRequest:
    """As Ray sends it: what is large goes out of band, and is copied once into the object store."""
    import pickle

    buffers: list[Any] = []
    body = pickle.dumps(request, protocol=5, buffer_callback=buffers.append)
    request_again: GenerateRequest = pickle.loads(body, buffers=[bytearray(buffer.raw()) for buffer in buffers])
    return request_again


# -- a run -------------------------------------------------------------------------------------------------------------
def waits_of_a_run(folder: Path, steps: int) -> dict[str, float]:
    """Shares of the time of all steps but the first two, in which workers and engines start."""
    build_tiny_omni(folder / "vl", "qwen3_vl")
    settings = [f"model.path={folder}/vl", f"run.dir={folder}", "run.runtime=inprocess", f"train.num_steps={steps}"]
    settings += ["eval=none", "train.checkpoint.every=0", "observe.progress=false", "observe.tensorboard=false"]
    relax("train", f"{ROOT}/examples/shapes_vqa/run.toml", *settings)
    rows = [json.loads(line) for line in (folder / "shapes_vqa" / "metrics.jsonl").read_text("utf-8").splitlines()][2:]
    total = sum(row["step_s"] for row in rows)
    lost = sum(min(row["wait/media_s"], row["wait/actor_s"]) for row in rows)
    return {
        "engines idle for want of media": sum(row["wait/media_s"] for row in rows) / total,
        "actor waits for rows": sum(row["wait/actor_s"] for row in rows) / total,
        "nobody works for want of media, at most": lost / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="also a run of examples/shapes_vqa")
    parser.add_argument("--steps", type=int, default=12, help="of that run")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_tiny_omni(folder / "omni", "qwen3_omni")
        files = make_files(folder)
        for kind in arguments.kinds:
            case, first = Case(folder / "omni", kind, files[kind]), 0.0
            for stage, seconds in case.stages():
                first = first or seconds
                print(f"{kind:6} {stage:40} {1 / seconds:10.4g} /s {first / seconds:8.2f} x", flush=True)
            for is_ray in (False, True):
                for way, ratio in asyncio.run(copies(folder / "omni", kind, case.made[0], is_ray)).items():
                    print(
                        f"{kind:6} {'as on Ray' if is_ray else 'in process':10} {way:20} {ratio:6.2f} bytes a byte", flush=True
                    )
        if arguments.run:
            for share, value in waits_of_a_run(folder, arguments.steps).items():
                print(f"run    {share:40} {value:8.2%}", flush=True)


if __name__ == "__main__":
    main()
