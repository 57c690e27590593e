"""Packed prompts with images, sounds and videos: what transformers computes of each alone, the encoders' gradients included."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omni_prompts import heard, image, plain_inputs, plain_logprobs, prepare, sound, spread, video
from transformers import AutoModelForMultimodalLM

from relax.engines.attention import attend_within
from relax.errors import ModelError
from relax.models.omni_lm import Encoded, OmniForward, is_omni
from relax.models.processor import OmniProcessor, without_repeats

SEEN = {
    "text": ("1+1=?",),
    "image": (image(), "What is it?"),
    "images": (image(64, 64, 1), "and", image(70, 200, 2), "?"),
    "video": (video(3), "?"),
    "both": (image(), video(4, 2.0, 1), "?", image(64, 64, 3)),
}
HEARD = {
    "sounds": (sound(0.3), "or", sound(1.2, 1)),
    "image and sound": (sound(0.4), image(), "?"),
    "videos with sound": (sound(0.4, 3), heard(), "and", heard(6, 2.0, 1, 4.2), "?", image()),
}
QUICK = ["qwen3_vl", "qwen3_omni"]
OTHERS_SLOWLY = [pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3_omni", "qwen3_vl_moe", "qwen2_5_omni")]
FAMILIES = [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in [*QUICK, "qwen3_vl_moe", "qwen2_5_omni"]]


@pytest.fixture(scope="module")
def load(tiny_omni):
    """By family: transformers' model, the forward pass on a copy of it, and prompts, of which the longest is of video."""
    torch.set_num_threads(1)
    found = {}

    def load(family):
        if family not in found:
            processor = OmniProcessor(tiny_omni(family))
            plain = spread(AutoModelForMultimodalLM.from_pretrained(tiny_omni(family)))
            contents = SEEN | HEARD if "omni" in family else SEEN
            prompts = {name: prepare(processor, *content) for name, content in contents.items()}
            found[family] = SimpleNamespace(plain=plain, forward=OmniForward(copy.deepcopy(plain)), prompts=prompts)
        return found[family]

    return load


def packed_logprobs(forward, prompts):
    """The log-probs of each prompt's tokens after the first, all prompts in one pass."""
    ids = torch.from_numpy(np.concatenate([prompt.ids for prompt in prompts]).astype(np.int64))
    positions = torch.cat([forward.positions(prompt.ids, prompt.features)[0] for prompt in prompts], 1)
    lengths = [len(prompt.ids) for prompt in prompts]
    encoded = Encoded.join([forward.encode(prompt.features) for prompt in prompts])
    hidden = forward.hidden(ids, positions, attend_within(lengths), encoded)
    logprobs = torch.log_softmax(torch.nn.functional.linear(hidden, *forward.head), -1)
    rows = zip(logprobs.split(lengths), ids.split(lengths), strict=True)
    return [row[:-1].gather(-1, own[1:, None])[:, 0] for row, own in rows]


def test_still_images_are_the_same_with_one_frame_of_each_patch(load) -> None:
    """Bit by bit, beside others that have all frames; and only what repeats is left out."""
    case = load("qwen3_vl")
    prompts = [case.prompts[name].features for name in ("images", "both", "image")]
    once = [without_repeats(features, 2) for features in prompts]
    for features, whole in zip(once, prompts, strict=True):
        assert 2 * features["pixel_values"].nbytes == whole["pixel_values"].nbytes
    assert once[1]["pixel_values_videos"] is prompts[1]["pixel_values_videos"]
    for array in once[0].values():
        array.flags.writeable = False  # as those of media workers are
    wanted, found = case.forward.encode(*prompts), case.forward.encode(once[0], prompts[1], once[2])
    for kind in ("image", "video"):
        assert torch.equal(found.embeds[kind], wanted.embeds[kind])
        assert all(torch.equal(a, b) for a, b in zip(found.deep[kind], wanted.deep[kind], strict=True))
    moving = dict(prompts[2]) | {"pixel_values": prompts[2]["pixel_values"].copy()}
    moving["pixel_values"][-1, -1] += 1
    assert without_repeats(moving, 2)["pixel_values"] is moving["pixel_values"]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_each_prompt_alone(load, family) -> None:
    case = load(family)
    prompts = list(case.prompts.values())
    wanted = [plain_logprobs(case.plain, prompt) for prompt in prompts]
    found = packed_logprobs(case.forward, prompts)
    for name, a, b in zip(case.prompts, wanted, found, strict=True):
        assert torch.allclose(a, b, atol=1e-5), name
    for logprobs in (wanted, found):
        sum((row * torch.linspace(0.5, 1, len(row))).sum() for row in logprobs).backward()
    reached = set()
    for (name, own), ours in zip(case.plain.named_parameters(), case.forward.model.parameters(), strict=True):
        if own.grad is None:
            assert ours.grad is None, name
            continue
        reached |= {part for part in ("visual", "audio_tower") if part in name and own.grad.norm() > 0}
        # Some gradients are zero but for rounding: that of a key's bias adds the same to all scores of a query.
        assert torch.linalg.norm(own.grad - ours.grad) <= 1e-4 * own.grad.norm() + 1e-6, name
    assert reached == ({"visual", "audio_tower"} if "omni" in family else {"visual"})
    case.plain.zero_grad()
    case.forward.model.zero_grad()


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_vl", *OTHERS_SLOWLY])
def test_each_prompt_alone_is_the_same_as_packed_and_sees_its_media(load, family) -> None:
    case = load(family)
    prompts = list(case.prompts.values())
    for prompt, packed in zip(prompts, packed_logprobs(case.forward, prompts), strict=True):
        assert torch.allclose(packed_logprobs(case.forward, [prompt])[0], packed, atol=1e-5)
        if prompt.features:
            other = {n: v if v.dtype.kind == "i" else v[::-1].copy() for n, v in prompt.features.items()}
            changed = SimpleNamespace(ids=prompt.ids, features=other)
            assert not torch.allclose(packed_logprobs(case.forward, [changed])[0], packed, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_go_on_where_transformers_has_them(load, family) -> None:
    """A prompt's positions and its delta give those of the prompt with 3 more tokens."""
    case = load(family)
    core = getattr(case.plain, "thinker", case.plain)
    for prompt in case.prompts.values():
        positions, delta = case.forward.positions(prompt.ids, prompt.features)
        ids = np.concatenate([prompt.ids, [20, 21, 22]])
        longer, _ = case.forward.positions(ids, prompt.features)
        assert torch.equal(longer[:, :-3], positions)
        assert torch.allclose(longer[:, -3:], torch.arange(len(ids) - 3, len(ids)).expand(3, -1) + delta)
        core(**plain_inputs(core, ids, prompt))
        own = getattr(core, "rope_deltas", None)
        if prompt.features and "input_features" not in prompt.features:
            own = core.model.rope_deltas if own is None else own
            assert float(own) == pytest.approx(delta)


@pytest.mark.parametrize("family", ["qwen3_omni", pytest.param("qwen2_5_omni", marks=pytest.mark.slow)])
def test_frames_and_the_sound_beside_them_stand_at_their_seconds(load, family) -> None:
    forward, prompt = load(family).forward, load(family).prompts["videos with sound"]
    rate = forward._core.config.position_id_per_seconds
    times = forward.positions(prompt.ids, prompt.features)[0][0]
    grids, seconds = prompt.features["video_grid_thw"], prompt.features["video_second_per_grid"]
    for run in (run for run in prompt.expansions if run.kind == "video"):
        ids, at = prompt.ids[run.start : run.start + run.length], times[run.start : run.start + run.length].numpy()
        heard_at, seen_at = (at[ids == forward.token_ids[kind]] for kind in ("audio", "video"))
        first, (frames, height, width) = heard_at[0], grids[run.item]
        assert heard_at.tolist() == [first + k for k in range(len(heard_at))]
        wanted = np.repeat(np.arange(frames) * seconds[run.item] * rate, height * width // 4)
        assert seen_at.tolist() == pytest.approx((first + wanted).tolist(), abs=1)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_marks_of_media_in_a_text_are_text(load, family) -> None:
    case = load(family)
    config = getattr(case.plain, "thinker", case.plain).config
    marks = [config.vision_start_token_id, getattr(config, "audio_start_token_id", config.vision_end_token_id)]
    for prompt in case.prompts.values():
        positions, _ = case.forward.positions([*prompt.ids, *marks, *marks], prompt.features)
        wanted, _ = case.forward.positions([*prompt.ids, 20, 21, 22, 23], prompt.features)
        assert torch.equal(positions, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_touching_encoders_gives_each_of_their_parameters_a_zero_gradient(load, family) -> None:
    forward = load(family).forward
    forward.model.zero_grad()
    total = forward.touch()
    assert total.item() == 0.0
    total.backward()
    touched = {n for n, p in forward.model.named_parameters() if p.grad is not None}
    assert all(not p.grad.any() for p in forward.model.parameters() if p.grad is not None)
    forward.model.zero_grad()
    prompts = load(family).prompts
    encoded = forward.encode(prompts["image and sound" if "omni" in family else "image"].features)
    values = [*encoded.embeds.values(), *(layer for deep in encoded.deep.values() for layer in deep)]
    sum(value.square().sum() for value in values).backward()
    reached = {n for n, p in forward.model.named_parameters() if p.grad is not None}
    assert touched == reached
    forward.model.zero_grad()
    seen = Encoded({kind: value for kind, value in encoded.embeds.items() if kind != "audio"}, encoded.deep)
    forward_only = {n.split(".")[0 if "thinker" not in n else 1] for n in _reached(forward, forward.touch(seen))}
    assert forward_only == ({"audio_tower"} if "omni" in family else set())


def _reached(forward, total):
    if total.requires_grad:
        total.backward()
    names = {n for n, p in forward.model.named_parameters() if p.grad is not None}
    forward.model.zero_grad()
    return names


@torch.no_grad()
def test_places_and_media_that_do_not_agree_are_an_error(load) -> None:
    case = load("qwen3_vl")
    prompt, text = case.prompts["image"], case.prompts["text"]
    with pytest.raises(ModelError, match="0 tokens for images, its images take 6"):
        case.forward.positions(text.ids, prompt.features)
    ids = torch.from_numpy(text.ids.astype(np.int64))
    with pytest.raises(ModelError, match="0 tokens stand for images, whose encoder gives 6"):
        case.forward.hidden(ids, torch.arange(len(ids)), attend_within([len(ids)]), case.forward.encode(prompt.features))


def test_what_reads_only_is_told_from_what_sees(load, tiny_model) -> None:
    from transformers import AutoConfig

    assert is_omni(load("qwen3_vl").plain.config)
    assert is_omni(load("qwen3_omni").plain.config)
    assert not is_omni(AutoConfig.from_pretrained(tiny_model))


@torch.no_grad()
def test_positions_that_are_known_are_those_of_the_same_prompt(load) -> None:
    """The same ids with other frame rates stand elsewhere."""
    case = load("qwen3_omni")
    prompt = case.prompts["video"]
    slow = prompt.features | {"video_second_per_grid": prompt.features["video_second_per_grid"] * 3}
    first, again = case.forward.positions(prompt.ids, prompt.features), case.forward.positions(prompt.ids, prompt.features)
    other = case.forward.positions(prompt.ids, slow)
    assert first[0] is again[0]
    assert other[1] > first[1]
    assert not torch.equal(other[0], first[0])
