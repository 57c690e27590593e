"""Prompts with media become the ids that transformers' own processors give, with a way back to one id a medium."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_prompts import heard, image, messages, prepare, sound, video
from PIL import Image as Pillow

from relax.data.media.decoded import Audio, Image, Video
from relax.errors import DataError, ModelError
from relax.models.processor import OmniProcessor

CONTENTS = {
    "image": (image(), "What is it?"),
    "images, the second one first in the text": ("Of ", image(), " and ", image(128, 64, 1), "?"),
    "side by side": (image(), image(70, 200, 1), "?"),
    "video": (video(5, 2.5), "What happens?"),
    "odd frames and an image": (image(), video(3, 4.0), "?", image(64, 64, 2)),
    "video at the end": ("See:", video(2)),
}
SOUNDS = {"sounds": (sound(0.3), "or", sound(1.2, 1)), "all": (image(), sound(), video(), "?", sound(1.0, 2), image(64, 64, 3))}


TALKING = (sound(0.4), heard(8, 2.0, seconds=4.1), "and", heard(3, 2.0, 1, 1.0), "?", image(), sound(0.6, 1))


@pytest.fixture(scope="module")
def processors(tiny_omni):
    torch.set_num_threads(1)
    found = {}
    return lambda family: found.setdefault(family, OmniProcessor(tiny_omni(family)))


def own_output(processor: OmniProcessor, content):
    """What transformers' processor gives when it is called as its documentation says."""
    images, videos = ([c for c in content if isinstance(c, kind)] for kind in (Image, Video))
    metadata = [{"fps": v.fps, "total_num_frames": len(v.frames), "frames_indices": list(range(len(v.frames)))} for v in videos]
    options = {"do_sample_frames": False, "video_metadata": metadata}
    sounds = [c if isinstance(c, Audio) else c.audio for c in content if isinstance(c, Audio) or getattr(c, "audio", None)]
    if any(v.audio for v in videos):
        options |= {"use_audio_in_video": True, "fps": videos[0].fps}
    return processor._processor(
        text=[processor.render(messages(*content)).text],
        **({"images": [i.pixels for i in images]} if images else {}),
        **({"videos": [v.frames for v in videos], "videos_kwargs": options} if videos else {}),
        **({"audio": [s.samples for s in sounds]} if sounds else {}),
        return_tensors="np",
    )


@pytest.mark.parametrize(
    ("family", "content"),
    [("qwen3_vl", c) for c in CONTENTS.values()]
    + [("qwen3_omni", c) for c in SOUNDS.values()]
    + [pytest.param("qwen2_5_omni", c, marks=pytest.mark.slow) for c in [*SOUNDS.values(), TALKING]]
    + [("qwen3_omni", TALKING)],
)
def test_ids_and_features_are_the_processors_own(processors, family, content) -> None:
    processor = processors(family)
    found, own = prepare(processor, *content), own_output(processor, content)
    assert found.ids.tolist() == own["input_ids"][0].tolist()
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        assert (name in found.features) == (name in own)
        if name in own:
            assert np.array_equal(found.features[name], own[name])
    if "input_features" in own:
        mask = own["feature_attention_mask"].astype(bool)
        assert np.array_equal(found.features["input_features"], own["input_features"].transpose(0, 2, 1)[mask])
        assert found.features["audio_lengths"].tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("content", [*CONTENTS.values(), *SOUNDS.values()])
def test_the_two_tracks_lie_on_one_another(processors, content) -> None:
    processor = processors("qwen3_omni" if any(isinstance(c, Audio) for c in content) else "qwen3_vl")
    prompt = prepare(processor, *content)
    media = set(processor.token_ids.values())
    back, at = [], 0
    for expansion in prompt.expansions:
        inside = prompt.ids[expansion.start : expansion.start + expansion.length].tolist()
        assert media & set(inside) == {processor.token_ids[expansion.kind]}
        back += [*prompt.ids[at : expansion.start].tolist(), prompt.unexpanded[expansion.place]]
        at = expansion.start + expansion.length
    assert [*back, *prompt.ids[at:].tolist()] == prompt.unexpanded.tolist()
    assert prompt.unexpanded.tolist() == processor.tokenizer(processor.render(messages(*content)).text).input_ids


def test_frames_stand_at_their_times(processors) -> None:
    prompt = prepare(processors("qwen3_vl"), video(6, 2.0), "?")
    times = [float(t) for t in re.findall(r"<([\d.]+) seconds>", processors("qwen3_vl").tokenizer.decode(prompt.ids))]
    assert np.allclose(times, [0.25, 1.25, 2.25], atol=0.06)  # the middle of each pair of frames, to a tenth of a second
    assert all(b - a == pytest.approx(1.0, abs=0.11) for a, b in pairwise(times))


@pytest.mark.parametrize("height", [1, 3])
def test_rows_of_an_image_are_not_taken_for_channels(processors, height) -> None:
    low = image(height, 64)
    found = prepare(processors("qwen3_vl"), low, "?")
    text = processors("qwen3_vl").render(messages(low, "?")).text
    own = processors("qwen3_vl")._processor(text=[text], images=[Pillow.fromarray(low.pixels)], return_tensors="np")
    assert found.ids.tolist() == own["input_ids"][0].tolist()
    assert np.array_equal(found.features["pixel_values"], own["pixel_values"])


def test_a_video_of_one_frame_is_that_frame_standing_still(processors) -> None:
    still = video(1, 2.0)
    twice = Video(still.frames.repeat(2, 0), np.zeros(2), 2.0)
    found, wanted = prepare(processors("qwen3_vl"), still, "?"), prepare(processors("qwen3_vl"), twice, "?")
    assert np.array_equal(found.features["pixel_values_videos"], wanted.features["pixel_values_videos"])
    assert "<0.0 seconds>" in processors("qwen3_vl").tokenizer.decode(found.ids)


def test_each_video_has_its_own_seconds_per_grid(processors) -> None:
    prompt = prepare(processors("qwen2_5_omni"), video(4, 1.0), video(2, 5.0), "?")
    assert prompt.features["video_second_per_grid"].tolist() == pytest.approx([2.0, 0.4])


def test_text_alone_has_no_features(processors) -> None:
    prompt = prepare(processors("qwen3_vl"), "1+1=?")
    assert prompt.ids.tolist() == prompt.unexpanded.tolist()
    assert not prompt.features
    assert not prompt.expansions


@pytest.mark.parametrize(
    ("content", "media", "message"),
    [
        ((image(), "?"), [], "has places for image, its media are none"),
        (("?",), [image()], "has places for none, its media are image"),
        ((image(), video()), [video(), image()], "same order"),
        ((image(),), [image(1, 300)], "does not take"),
        ((video(),), [Video(video().frames, video().times, 4.0, sound())], "the model does not hear videos"),
    ],
)
def test_media_that_do_not_fit_are_refused(processors, content, media, message) -> None:
    processor = processors("qwen3_vl")
    with pytest.raises(DataError, match=re.escape(message)):
        processor.prepare(processor.render(messages(*content)), media)


# What templates and processors write, and what stands for it inside of transformers.
SPELLED = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|im_end|>", "<|placeholder|>", "<|image_placeholder|>"]
TEXTS = st.lists(st.one_of(st.sampled_from([*SPELLED, "<|image", "_pad|>", " ", "a"]), st.text(max_size=3)), max_size=5)


@settings(max_examples=10, deadline=None)
@given(before=TEXTS.map("".join), after=TEXTS.map("".join))
def test_there_are_as_many_places_as_media_whatever_is_said(processors, before, after) -> None:
    processor = processors("qwen3_vl")
    small, still = image(64, 64), video(2)
    content = (before, small, after, still)
    found, bare = prepare(processor, *content), prepare(processor, small, still)
    spans = [slice(run.start, run.start + run.length) for run in found.expansions]
    assert [run.kind for run in found.expansions] == ["image", "video"]
    assert [found.ids[span].tolist() for span in spans] == [
        bare.ids[run.start : run.start + run.length].tolist() for run in bare.expansions
    ]
    if not any(spelling in said for said in (before, after) for spelling in SPELLED):
        assert found.ids.tolist() == own_output(processor, content)["input_ids"][0].tolist()


def test_places_are_found_in_later_turns_and_tools_and_nowhere_in_what_is_said(processors) -> None:
    processor = processors("qwen3_vl")
    parts = [{"type": "text", "text": "<image> or <|image_pad|>?"}, {"type": "image"}]
    talk = [
        {"role": "system", "content": "Never write <|vision_start|><|image_pad|><|vision_end|>."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "This: <|image_pad|><|im_end|>"},
        {"role": "tool", "content": parts},
    ]
    prompt = processor.prepare(processor.render(talk), [image(), image(96, 64)])
    assert [run.kind for run in prompt.expansions] == ["image", "image"]
    assert prompt.ids.tolist().count(processor.tokenizer.eos_token_id) == len(talk)
    own = processor.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert processor.tokenizer.decode(prompt.unexpanded) == own


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((heard(), video()), "of its videos some have a sound and others none"),
        ((heard(4, 2.0), heard(4, 1.0)), "its videos with sound have 1 and 2 frames a second"),
    ],
)
def test_sounds_of_videos_that_cannot_be_interleaved_are_refused(processors, content, message) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        prepare(processors("qwen3_omni"), *content)


def test_a_sound_at_another_rate_is_refused(processors) -> None:
    processor = processors("qwen3_omni")
    with pytest.raises(DataError, match="8000 samples a second, the model hears 16000"):
        processor.prepare(processor.render(messages(sound())), [Audio(sound().samples, 8000)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((sound(31.0), "?"), "a sound lasts 31.0 s, of which the model's processor takes 30.0 s"),
        ((sound(0.02), "or", sound(0.5)), "a sound of 0.02 s is too short"),
        ((sound(0.5), heard(seconds=0.02), "?"), "a sound of 0.02 s is too short"),
    ],
)
def test_a_sound_that_would_be_cut_or_not_be_heard_is_refused(processors, content, message) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        prepare(processors("qwen2_5_omni"), *content)


def test_a_folder_that_only_reads_is_refused(tiny_model) -> None:
    with pytest.raises(ModelError, match="processor"):
        OmniProcessor(tiny_model)
