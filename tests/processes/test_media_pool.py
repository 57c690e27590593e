"""The media pool: prompts are decoded once, ahead of need; a worker that dies or hangs loses one prompt and no more."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_media import clip, encoded, picture, sound, tone
from PIL import Image

from relax.config.media import AudioConfig, ImageConfig, MediaConfig, VideoConfig
from relax.data.media.decoder import Decoder
from relax.data.media.pool import MediaPool, Prepared
from relax.data.media.source import Spool
from relax.errors import ConfigError, DataError
from relax.types import Media, Prompt

SPOOL = Spool()
HANGS, DIES_ONCE, DIES = 1, 2, 3
PLUGINS = '''
import os, signal, time
import numpy as np
from dataclasses import replace
from relax.data.media.decoded import Image

def halve(image):
    return Image(np.ascontiguousarray(image.pixels[::2, ::2]))

def wrong(image):
    return image.pixels.astype("float32")

def trouble(image):
    """Does what the top left pixel says, once for each mark that the folder has."""
    act = int(image.pixels[0, 0, 0])
    if act == 1:
        time.sleep(60)
    if act in (2, 3):
        mark = os.environ["MARKS"] + f"/{act}"
        if act == 3 or not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return image

def unlucky():
    """Dies when it is set up for the second time."""
    marks = [os.environ["MARKS"] + f"/unlucky{number}" for number in (1, 2, 3)]
    begun = next(mark for mark in marks if not os.path.exists(mark))
    open(begun, "w").close()
    if begun == marks[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    return processor()

def processor(factor=1):
    def process(messages, items):
        return {"pixel_values": np.concatenate([i.pixels.reshape(-1, 3) for i in items]).astype("float32") * factor,
                "num_messages": np.array([len(messages)])}
    return process
'''


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "media_plugins.py").write_text(PLUGINS)
    sys.path.append(str(folder))
    os.environ["MARKS"] = str(folder)
    yield folder
    sys.path.remove(str(folder))


def prompt(key: str, *media: Media) -> Prompt:
    return Prompt(key, messages=({"role": "user", "content": "?"},), media=media)


def image_of(level: int) -> Media:
    return Media("image", SPOOL.keep(encoded(Image.fromarray(np.full((6, 8, 3), level, np.uint8)))))


@pytest.fixture(scope="module")
def pool(plugins: Path) -> Iterator[MediaPool]:
    """One worker, shared by the tests: starting one takes longer than they do."""
    image = ImageConfig(transforms=["media_plugins:trouble"])
    pool = MediaPool(MediaConfig(num_workers=1, look_ahead=3, image=image, video=VideoConfig(audio=True)), spool=SPOOL)
    asyncio.run(pool.start())
    yield pool
    asyncio.run(pool.close())
    assert pool.worker_pids == []


async def test_what_comes_out_is_what_the_decoder_gives_and_does_not_go_through_the_pipe(
    pool: MediaPool, tmp_path: Path
) -> None:
    (tmp_path / "song.wav").write_bytes(sound(tone(1, 8000), 8000))
    media = (
        Media("image", SPOOL.keep(encoded(picture((640, 480))))),
        Media("audio", str(tmp_path / "song.wav")),
        Media("video", SPOOL.keep(clip(range(0, 2000, 100), audio=tone(2, 8000)))),
    )
    before = replace(pool.stats)
    image, audio, video = (await pool.prepare(prompt("row", *media))).items
    first, second, third = Decoder(MediaConfig(video=VideoConfig(audio=True)), SPOOL.fd).decode("row", media)
    assert np.array_equal(image.pixels, first.pixels)
    assert np.array_equal(audio.samples, second.samples)
    assert audio.sampling_rate == second.sampling_rate == 16_000
    assert np.array_equal(video.frames, third.frames)
    assert np.array_equal(video.times, third.times)
    assert video.fps == third.fps == 2.0
    assert np.array_equal(video.audio.samples, third.audio.samples)
    assert not image.pixels.flags.writeable  # a group's samples share it
    num_bytes = pool.stats.num_bytes - before.num_bytes
    assert num_bytes > image.pixels.nbytes + video.frames.nbytes
    assert pool.stats.num_piped_bytes - before.num_piped_bytes < 0.001 * num_bytes
    assert await pool.prepare(Prompt("text", text="no media")) == Prepared()


async def test_prompts_are_decoded_ahead_of_need_within_a_bound_and_once(pool: MediaPool) -> None:
    prompts = [prompt(f"row {n}", image_of(10 + n)) for n in range(10)]
    before = pool.stats.num_prepared
    pool.expect(prompts)
    pool.expect(prompts)
    await pool.prepare(prompts[2])
    assert pool.stats.num_prepared - before == 3  # 0, 1 and 2, in this order; none of the other seven
    pool.expect(prompts[5:7])  # 0 and 1 are no longer wanted
    assert [(await pool.prepare(p)).items[0].pixels[0, 0, 0] for p in prompts[5:7]] == [15, 16]
    assert pool.stats.num_prepared - before == 5


async def test_an_error_names_the_row_and_the_item_and_the_worker_goes_on(pool: MediaPool) -> None:
    (pid,) = pool.worker_pids
    broken = SPOOL.keep(encoded(picture((64, 64)))[:-2000])
    with pytest.raises(DataError, match=r"^row x: image, item 2 of 2, 'spool:[\d:]+': cannot be decoded: OSError: .*truncated"):
        await pool.prepare(prompt("row x", image_of(0), Media("image", broken)))
    with pytest.raises(DataError, match=r"^row y: image, item 1 of 1, 'nowhere\.png': .*No such file"):
        await pool.prepare(prompt("row y", Media("image", "nowhere.png")))
    assert pool.worker_pids == [pid]


async def test_a_worker_that_dies_is_replaced_and_its_prompt_tried_again(pool: MediaPool) -> None:
    (pid,) = pool.worker_pids
    tries = [pool.prepare(prompt(f"row {act}", image_of(act))) for act in (0, DIES_ONCE, 6)]
    assert [prepared.items[0].pixels[0, 0, 0] for prepared in await asyncio.gather(*tries)] == [0, DIES_ONCE, 6]
    assert pool.stats.num_lost_workers == 1
    assert pool.worker_pids != [pid]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
async def test_killed_and_hanging_workers_lose_their_prompts_only(plugins: Path) -> None:
    config = MediaConfig(num_workers=2, time_limit_s=2.0, image=ImageConfig(transforms=["media_plugins:trouble"]))
    pool = MediaPool(config, spool=SPOOL)
    await pool.start()
    try:
        tries = [pool.prepare(prompt(f"row {act}", image_of(act))) for act in (0, HANGS, DIES, 4, 5)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        assert [type(result).__name__ for result in results] == ["Prepared", "DataError", "DataError", "Prepared", "Prepared"]
        assert str(results[1]) == f"row {HANGS}: its media were not decoded within media.time_limit_s = 2"
        assert str(results[2]) == f"row {DIES}: the process that decoded its media was lost 2 times (signal SIGKILL)"
        assert pool.stats.num_lost_workers == 3
        assert (await pool.prepare(prompt("after", image_of(7)))).items[0].pixels[0, 0, 0] == 7
    finally:
        await pool.close()
    with pytest.raises(DataError, match="closed"):
        await pool.prepare(prompt("late", image_of(7)))


@pytest.mark.slow
async def test_closing_ends_what_is_being_decoded(plugins: Path) -> None:
    pool = MediaPool(MediaConfig(num_workers=1, image=ImageConfig(transforms=["media_plugins:trouble"])), spool=SPOOL)
    await pool.start()
    tries = [asyncio.create_task(pool.prepare(prompt(f"row {n}", image_of(HANGS)))) for n in range(2)]
    await asyncio.sleep(0)
    await pool.close()
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert all(isinstance(result, DataError) and "closed" in str(result) for result in results)


@pytest.mark.slow
async def test_a_processor_runs_in_the_worker_and_its_features_come_back(plugins: Path) -> None:
    pool = MediaPool(MediaConfig(num_workers=1), spool=SPOOL, processor="media_plugins:processor", options={"factor": 2})
    await pool.start()
    try:
        prepared = await pool.prepare(prompt("row", image_of(3), image_of(4)))
        assert prepared.items == ()
        assert prepared.features["pixel_values"].shape == (96, 3)
        assert set(prepared.features["pixel_values"].flat) == {6.0, 8.0}
        assert prepared.features["num_messages"].tolist() == [1]
    finally:
        await pool.close()


async def test_a_worker_that_dies_while_it_is_set_up_again_loses_its_prompt_only(plugins: Path) -> None:
    pool = MediaPool(MediaConfig(num_workers=1), spool=SPOOL, processor="media_plugins:unlucky")
    await pool.start()
    try:
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        with pytest.raises(DataError, match=r"was lost 2 times \(a media worker could not be set up: .*SIGKILL"):
            await pool.prepare(prompt("row", image_of(3)))
        assert set((await pool.prepare(prompt("after", image_of(4)))).features["pixel_values"].flat) == {4.0}
        assert pool.stats.num_lost_workers == 2
    finally:
        await pool.close()


@pytest.mark.slow
async def test_what_cannot_be_set_up_is_said_at_the_start(plugins: Path) -> None:
    for config, processor, words in (
        (MediaConfig(num_workers=1, audio=AudioConfig(transforms=["media_plugins:nothing"])), None, "media.audio.transforms"),
        (MediaConfig(num_workers=1), "media_plugins:halve", "processor = 'media_plugins:halve': TypeError"),
    ):
        pool = MediaPool(config, processor=processor)
        with pytest.raises(ConfigError, match=words):
            await pool.start()
        assert pool.worker_pids == []


def test_a_transform_that_gives_something_else_is_named(plugins: Path) -> None:
    decoder = Decoder(MediaConfig(image=ImageConfig(transforms=["media_plugins:wrong"])), SPOOL.fd)
    with pytest.raises(DataError, match="after media_plugins:wrong: gave a ndarray, and Image"):
        decoder.decode("row", [image_of(0)])
