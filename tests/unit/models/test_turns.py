"""The next turn's prompt: what was said stays as it was sampled, and media go on where they were."""

import numpy as np
import pytest
import torch
from omni_prompts import image, messages, prepare, sound, video

from relax.config.data import DataSection
from relax.data.media.decoded import Video
from relax.data.render import Renderer
from relax.errors import DataError
from relax.models.processor import OmniProcessor

SEEN = [(image(), "What?"), (video(3), "and", image(96, 64, 1), "?"), ("1+1=?",), (image(64, 64, 2), "?")]
HEARD = [(sound(0.3), "?"), ("And", video(4), sound(1.0, 1), "?"), (image(), "?")]
SAID = "It is a <dog>."


@pytest.fixture(scope="module")
def processors(tiny_omni):
    torch.set_num_threads(1)
    found = {}
    return lambda family: found.setdefault(family, OmniProcessor(tiny_omni(family)))


def media_of(content):
    return [c for c in content if not isinstance(c, str)]


def talk(processor, turns, answer):
    """The prompt of the last turn, turn by turn, with the same answer to all before."""
    prompt = prepare(processor, *turns[0])
    for content in turns[1:]:
        prompt = processor.extend(prompt, answer, processor.renderer.following(messages(*content)), media_of(content))
    return prompt


@pytest.mark.parametrize(
    ("family", "turns"),
    [("qwen3_vl", SEEN), *(pytest.param(f, HEARD, marks=pytest.mark.slow) for f in ("qwen3_omni", "qwen2_5_omni"))],
)
def test_turn_by_turn_is_the_whole_conversation(processors, family, turns) -> None:
    """Where the answer is what the tokenizer would make of its text."""
    processor = processors(family)
    answer = [*processor.tokenizer(SAID, add_special_tokens=False).input_ids, processor.tokenizer.eos_token_id]
    said = {"role": "assistant", "content": SAID}
    whole = [message for content in turns for message in (*messages(*content), said)][:-1]
    wanted = processor.prepare(processor.render(whole), [medium for content in turns for medium in media_of(content)])
    found = talk(processor, turns, answer)
    assert found.ids.tolist() == wanted.ids.tolist()
    assert found.unexpanded.tolist() == wanted.unexpanded.tolist()
    assert found.expansions == wanted.expansions
    assert set(found.features) - {"audio_passes"} == set(wanted.features)
    for name, values in wanted.features.items():
        # a spectrogram's last frame depends on whether silence follows
        assert np.allclose(found.features[name], values, atol=0.1 if name == "input_features" else 0), name


def test_an_answer_stays_as_it_was_sampled_and_one_that_was_cut_off_is_ended(processors) -> None:
    processor = processors("qwen3_vl")
    end = processor.tokenizer.eos_token_id
    odd = [token for letter in "return" for token in processor.tokenizer(letter).input_ids]  # which would be fewer together
    assert processor.tokenizer(processor.tokenizer.decode(odd), add_special_tokens=False).input_ids != odd
    text, shown = processor.renderer.following(messages(image(), "?")), [image()]
    first = prepare(processor, "?")
    ended, cut = (processor.extend(first, answer, text, shown) for answer in ([*odd, end], odd))
    assert ended.ids.tolist() == cut.ids.tolist()
    assert ended.expansions == cut.expansions
    begin = len(first.ids)
    assert ended.ids[begin : begin + len(odd) + 1].tolist() == [*odd, end]


def test_a_conversation_that_gets_too_long_is_refused_and_not_cut(processors) -> None:
    processor = processors("qwen3_vl")
    first, text = prepare(processor, "?"), processor.renderer.following(messages(image(), "?"))
    whole = processor.extend(first, [30], text, [image()])
    assert processor.extend(first, [30], text, [image()], max_tokens=len(whole.ids)).ids.tolist() == whole.ids.tolist()
    with pytest.raises(DataError, match=f"the conversation has {len(whole.ids)} tokens, and {len(whole.ids) - 1} fit"):
        processor.extend(first, [30], text, [image()], max_tokens=len(whole.ids) - 1)
    with pytest.raises(DataError, match="no model writes"):
        processor.extend(first, [processor.token_ids["image"]], text, [image()])
    with pytest.raises(DataError, match="has places for image, its media are none"):
        processor.extend(first, [30], text, [])


@pytest.mark.slow
def test_videos_with_and_without_sound_do_not_meet_in_later_turns_either(processors) -> None:
    processor, silent = processors("qwen3_omni"), video(2)
    first = prepare(processor, Video(silent.frames, silent.times, silent.fps, sound()), "?")
    with pytest.raises(DataError, match="some have a sound and others none"):
        processor.extend(first, [30], processor.renderer.following(messages(silent)), [silent])


def test_text_goes_on_in_the_same_way(tiny_model) -> None:
    from transformers import AutoTokenizer

    renderer = Renderer(AutoTokenizer.from_pretrained(tiny_model), DataSection(system_prompt="Be brief."))
    tool = {"role": "tool", "content": "4 <|im_end|>"}
    asked = [{"role": "user", "content": "2+2?"}]
    answer = [*renderer.tokenizer(SAID).input_ids, renderer.tokenizer.eos_token_id]
    before = renderer.rendered(asked).ids()
    found = renderer.extend(before, answer, [tool, *asked])
    assert found == renderer.rendered([*asked, {"role": "assistant", "content": SAID}, tool, *asked]).ids()
    assert found == renderer.extend(before, answer[:-1], [tool, *asked])
    assert found[: len(before) + len(answer)] == before + answer
