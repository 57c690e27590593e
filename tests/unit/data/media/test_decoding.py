"""Whatever the file, decoding gives plain arrays that are right, or says what is wrong with it."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_media import clip, encoded, picture, sound, tone
from PIL import Image as Pillow

from relax.config.media import AudioConfig, ImageConfig, MediaConfig, VideoConfig
from relax.data.media.audio import read_audio
from relax.data.media.decoded import Audio, Unreadable, Video, check
from relax.data.media.image import fit, read_image
from relax.data.media.video import read_video

TENTHS = range(0, 3000, 100)  # milliseconds of 30 frames


def image(content: bytes, **changes) -> np.ndarray:
    found = read_image(io.BytesIO(content), ImageConfig(**changes))
    check(found, "image")
    return found.pixels


def audio(content: bytes, **changes) -> Audio:
    found = read_audio(io.BytesIO(content), AudioConfig(**changes))
    check(found, "audio")
    return found


def video(content: bytes, **changes) -> Video:
    found = read_video(io.BytesIO(content), MediaConfig(video=VideoConfig(**changes)))
    check(found, "video")
    return found


def levels(found: Video) -> list[int]:
    """The grey of each frame's bottom right, in the units of `clip`'s frame numbers."""
    return [round(int(frame[-1, -1, 0]) / 8) for frame in found.frames]


# -- images --------------------------------------------------------------------------------------------------------------------
def test_an_image_is_what_it_was() -> None:
    original = picture()
    assert np.array_equal(image(encoded(original)), np.array(original))
    assert np.array_equal(image(encoded(original, "BMP")), np.array(original))  # whatever the name of the file says


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_grey_and_palette_images_become_rgb(mode: str) -> None:
    original = picture(mode=mode)
    assert np.array_equal(image(encoded(original)), np.array(original.convert("RGB")))


def test_cmyk_becomes_rgb() -> None:
    found = image(encoded(Pillow.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95))
    assert np.abs(found.astype(int) - [255, 0, 0]).max() < 8


def test_transparency_is_put_on_white() -> None:
    red = Pillow.new("RGBA", (4, 4), (255, 0, 0, 0))
    red.putpixel((0, 0), (255, 0, 0, 255))
    red.putpixel((1, 0), (255, 0, 0, 51))
    found = image(encoded(red))
    assert found[0, 0].tolist() == [255, 0, 0]
    assert found[0, 1].tolist() == [255, 204, 204]
    assert found[2, 2].tolist() == [255, 255, 255]
    palette = Pillow.new("P", (2, 1), 0)
    palette.putpalette([9, 9, 9, 200, 0, 0])
    palette.putpixel((1, 0), 1)
    assert image(encoded(palette, transparency=0)).tolist() == [[[255, 255, 255], [200, 0, 0]]]
    assert image(encoded(Pillow.new("LA", (1, 1), (0, 0)))).tolist() == [[[255, 255, 255]]]
    assert image(encoded(Pillow.new("RGB", (1, 1), (7, 7, 7)), transparency=(7, 7, 7))).tolist() == [[[255, 255, 255]]]


def test_sixteen_bits_become_eight() -> None:
    deep = Pillow.fromarray(np.array([[0, 128, 257, 32_896, 65_535]], np.uint16))
    for kind in ("PNG", "TIFF"):
        assert image(encoded(deep, kind))[0, :, 1].tolist() == [0, 0, 1, 128, 255]
    with pytest.raises(Unreadable, match="beyond 16 bits"):
        image(encoded(Pillow.fromarray(np.array([[0, 70_000]], np.int32)), "TIFF"))
    with pytest.raises(Unreadable, match="floating-point"):
        image(encoded(Pillow.fromarray(np.zeros((2, 2), np.float32)), "TIFF"))


def test_of_animated_images_the_first_frame_is_taken() -> None:
    first, *others = [Pillow.new("RGB", (6, 4), color) for color in ("red", "green", "blue")]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        content = encoded(first, kind, save_all=True, append_images=others, **options)
        assert image(content).reshape(-1, 3).tolist() == [[255, 0, 0]] * 24


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_exif_says(orientation: int) -> None:
    corner = Pillow.new("RGB", (8, 4))
    corner.putpixel((0, 0), (255, 255, 255))
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    found = image(encoded(corner, exif=exif))
    place = {1: (0, 0), 2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (0, 0), 6: (0, -1), 7: (-1, -1), 8: (-1, 0)}[orientation]
    assert found.shape == ((4, 8, 3) if orientation < 5 else (8, 4, 3))
    assert found[place].tolist() == [255, 255, 255]
    assert found.sum() == 3 * 255


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    bomb = bytearray(encoded(Pillow.new("1", (1, 1))))
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0)
    bomb[12:33] = header + struct.pack(">I", zlib.crc32(header))
    for content in (bytes(bomb), encoded(picture((9, 9)))):
        with pytest.raises(Unreadable, match=r"image\.pixel_limit"):
            image(content, pixel_limit=80)


def test_images_are_resized_into_the_bounds_and_keep_their_shape() -> None:
    large = encoded(picture((400, 200)))
    assert image(large, max_pixels=20_000).shape == (100, 200, 3)
    assert image(large, min_pixels=320_000).shape == (400, 800, 3)
    assert image(large, min_pixels=100, max_pixels=80_000).shape == (200, 400, 3)


@given(width=st.integers(1, 5000), height=st.integers(1, 5000), most=st.integers(1, 10**6))
def test_a_fitted_size_is_within_its_bound_and_of_the_same_shape(width: int, height: int, most: int) -> None:
    wide, high = fit(width, height, None, most)
    assert wide >= 1
    assert high >= 1
    assert wide * high <= max(most, 1)
    if wide > 20 and high > 20:
        assert abs(wide / high / (width / height) - 1) < 0.1


# -- audio ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rate", "channels", "container", "codec"),
    [
        (44_100, 2, "wav", "pcm_s16le"),
        (8_000, 1, "wav", "pcm_u8"),
        (96_000, 1, "wav", "pcm_s24le"),
        (22_050, 2, "wav", "pcm_f64le"),
        (16_000, 1, "flac", "flac"),
        (48_000, 2, "ogg", "libopus"),
        (44_100, 2, "mp3", "libmp3lame"),
        (32_000, 1, "mp4", "aac"),
    ],
)
def test_any_audio_becomes_one_channel_at_the_rate_that_is_asked_for(
    rate: int, channels: int, container: str, codec: str
) -> None:
    found = audio(sound(tone(1, rate, 500, channels), rate, container, codec))
    assert found.sampling_rate == 16_000
    assert 16_000 <= len(found.samples) < 17_200  # some codecs fill their last frame up
    expected = tone(1, 16_000, 500)[0]
    likeness = np.corrcoef(found.samples[2_000:14_000], expected[2_000:14_000])[0, 1]
    assert likeness > 0.99
    assert np.abs(found.samples[2_000:14_000]).max() == pytest.approx(0.5, abs=0.03)


def test_channels_are_averaged() -> None:
    both = np.concatenate([tone(0.5, 16_000), -tone(0.5, 16_000)])
    assert np.abs(audio(sound(both, 16_000)).samples).max() < 1e-3
    left = np.concatenate([tone(0.5, 16_000), 0 * tone(0.5, 16_000)])
    assert np.abs(audio(sound(left, 16_000)).samples).max() == pytest.approx(0.25, abs=1e-3)


def test_what_lies_above_half_the_rate_does_not_come_back_as_another_tone() -> None:
    found = audio(sound(tone(1, 48_000, 15_000), 48_000))
    assert np.abs(found.samples[500:-500]).max() < 1e-4


def test_audio_that_cannot_be_used_is_named() -> None:
    wave = sound(tone(1, 8_000), 8_000)
    song = sound(tone(1, 44_100), 44_100, "mp3", "libmp3lame")
    broken = tone(0.1, 8_000)
    broken[0, 10] = np.nan
    for content, words in (
        (sound(tone(0, 8_000), 8_000), "no samples|head is damaged"),
        (sound(broken, 8_000, codec="pcm_f32le"), "NaN or infinity"),
        (wave[: len(wave) // 2], "cut off"),
        (song[: len(song) // 2], "cut off: its head promises 1.0 s, and there are 0.5"),
        (encoded(picture()), "not of a format"),
        (clip(TENTHS), "no audio track"),
    ):
        with pytest.raises(Unreadable, match=words):
            audio(content)
    with pytest.raises(Unreadable, match=r"longer than 0\.5 s \(audio\.seconds_limit\)"):
        audio(wave, seconds_limit=0.5)


# -- video ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "libx264"),
        ("mp4", "mpeg4"),
        ("matroska", "libx264"),
        ("webm", "libvpx"),
        ("mpegts", "libx264"),
        ("flv", "libx264"),
    ],
)
def test_frames_are_taken_at_even_times(container: str, codec: str) -> None:
    found = video(clip(TENTHS, container=container, codec=codec))
    assert levels(found) == [0, 5, 10, 15, 20, 25]
    assert found.times == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5], abs=2e-3)
    assert found.fps == 2.0
    assert found.audio is None


def test_a_video_may_begin_late() -> None:
    for container in ("matroska", "mp4"):
        found = video(clip([5_000, 5_100], container=container))
        assert levels(found) == [0]
        assert found.times.tolist() == [0.0]


def test_a_file_without_times_is_counted() -> None:
    found = video(clip(TENTHS, container="h264", options={"bf": "0"}), fps=1e4, max_frames=30)
    assert levels(found) == list(range(30))


def test_the_budget_of_frames_lowers_the_rate() -> None:
    found = video(clip(TENTHS), max_frames=3)
    assert levels(found) == [0, 10, 20]
    assert found.fps == pytest.approx(1.0)
    assert levels(video(clip(TENTHS), max_frames=1)) == [0]
    whole = video(clip(TENTHS), fps=1000, max_frames=100)  # no more frames than there are
    assert levels(whole) == list(range(30))
    assert whole.fps == pytest.approx(10.0)


@settings(max_examples=12, deadline=None)
@given(
    gaps=st.lists(st.sampled_from([20, 40, 100, 100, 700, 1500]), min_size=1, max_size=25),
    fps=st.sampled_from([0.5, 1.0, 2.0, 7.0]),
    budget=st.integers(1, 12),
    bframes=st.sampled_from(["0", "3"]),
)
def test_under_a_varying_rate_each_frame_is_the_one_that_a_viewer_sees(gaps, fps: float, budget: int, bframes: str) -> None:
    times = [int(time) for time in np.cumsum([0, *gaps])]
    found = video(clip(times, options={"bf": bframes, "g": "5"}), fps=fps, max_frames=budget)
    assert len(found.frames) <= min(budget, len(times))
    for number, (level, time) in enumerate(zip(levels(found), found.times, strict=True)):
        instant = 1000 * number / found.fps
        seen = {max(i for i in range(len(times)) if times[i] <= instant + near) for near in (0.1, 1.0)}  # times are rounded
        assert level in seen
        assert time == pytest.approx(times[level] / 1000, abs=1e-3)


def test_stretches_without_a_frame_that_is_wanted_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax.data.media import video as module

    content, counts = clip(TENTHS, options={"g": "5", "bf": "2", "sc_threshold": "0"}), []
    needed = module._Index.needed

    def counting(self, instants):
        found = needed(self, instants)
        counts.append(int(found.sum()))
        return found

    monkeypatch.setattr(module._Index, "needed", counting)
    assert levels(video(content, max_frames=2)) == [0, 15]
    assert counts == [10]  # two of six stretches of five frames


@pytest.mark.parametrize("num_lost", [3, 12, 24])
def test_a_recording_that_begins_between_key_frames_begins_with_the_first_one(num_lost: int) -> None:
    packet, tables = 188, 3
    content = clip(TENTHS, size=(64, 48), container="mpegts", options={"bf": "2", "sc_threshold": "0"})
    found = video(content[: tables * packet] + content[(tables + num_lost) * packet :], fps=5)
    assert levels(found) == [12, 14, 16, 18, 20, 22, 24, 26, 28]
    assert found.times == pytest.approx(np.arange(9) / 5, abs=1e-3)


@pytest.mark.parametrize(("rotation", "bright"), [(0, (0, 0)), (90, (-1, 0)), (180, (-1, -1)), (270, (0, -1))])
def test_videos_are_turned_as_their_head_says(rotation: int, bright: tuple[int, int]) -> None:
    found = video(clip([0, 100], size=(32, 24), rotation=rotation))
    assert found.frames.shape[1:] == ((24, 32, 3) if rotation % 180 == 0 else (32, 24, 3))
    corners = {(y, x): int(found.frames[0, y, x, 0]) for y in (0, -1) for x in (0, -1)}
    assert max(corners, key=corners.__getitem__) == bright


def test_odd_sizes_and_large_frames() -> None:
    odd = video(clip([0, 100], size=(33, 25), codec="mpeg4"))
    assert odd.frames.shape == (1, 25, 33, 3)
    assert video(clip([0, 100], size=(64, 48)), max_pixels=768).frames.shape == (1, 24, 32, 3)
    with pytest.raises(Unreadable, match=r"64 x 48 pixels.*video\.pixel_limit"):
        video(clip([0, 100], size=(64, 48)), pixel_limit=3000)
    with pytest.raises(Unreadable, match="max_prompt_bytes = 10000"):
        read_video(io.BytesIO(clip(TENTHS)), MediaConfig(max_prompt_bytes=10_000))


def test_the_audio_track_comes_with_the_video_and_begins_with_it() -> None:
    found = video(clip(TENTHS, audio=tone(3, 8_000, 300)), audio=True)
    assert found.audio is not None
    assert len(found.audio.samples) == pytest.approx(48_000, abs=4_000)
    later = video(clip([time + 1000 for time in TENTHS], container="matroska", audio=tone(3, 8_000, 300)), audio=True)
    assert later.times[0] == 0.0
    assert later.audio is not None
    assert len(found.audio.samples) - len(later.audio.samples) == pytest.approx(16_000, abs=1_000)  # the second before it
    assert video(clip(TENTHS), audio=True).audio is None


def test_videos_that_cannot_be_used_are_named() -> None:
    content = clip(TENTHS, container="matroska")
    for wrong, words in (
        (sound(tone(1, 8_000), 8_000), "no video track"),
        (clip([]), "no video track|no frames|not of a format"),
        (b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", "not of a format"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "not of a format"),
        (clip(TENTHS)[:2000], "no video track"),
    ):
        with pytest.raises(Unreadable, match=words):
            video(wrong)
    with pytest.raises(Unreadable, match=r"longer than 1 s \(video\.seconds_limit\)"):
        video(content, seconds_limit=1)


def test_a_damaged_frame_that_is_wanted_is_an_error() -> None:
    content = bytearray(clip(TENTHS, size=(320, 240), codec="mpeg4", options={"g": "1"}))
    content[len(content) // 2 : len(content) // 2 + 40] = b"\xff" * 40
    with pytest.raises(Unreadable, match=r"the frame at 1\.[45]0 s is damaged"):
        video(bytes(content), fps=10)


def test_a_last_frame_that_stands_long_is_a_part_of_the_video() -> None:
    first, *others = [Pillow.new("L", (6, 4), level) for level in (0, 80, 160)]
    found = video(
        encoded(first, "GIF", save_all=True, append_images=others, duration=[1000, 1000, 8000]), max_frames=5, fps=0.5
    )
    assert [int(frame[0, 0, 0]) for frame in found.frames] == [0, 160, 160]
    assert found.fps == pytest.approx(3 / 10)
    with pytest.raises(Unreadable, match=r"video\.seconds_limit"):
        video(encoded(first, "GIF", save_all=True, append_images=others, duration=[1000, 1000, 8000]), seconds_limit=9)
