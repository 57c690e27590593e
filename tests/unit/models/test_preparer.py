"""Prompts as a policy reads them: places become media wherever they are, and what comes next is begun."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from relax.config.data import DataSection
from relax.config.media import MediaConfig
from relax.config.model import ModelConfig
from relax.data.media.decoded import Audio
from relax.data.media.pool import MediaStats, Prepared
from relax.data.render import Renderer
from relax.data.tokenizer import load_tokenizer
from relax.errors import ConfigError, DataError
from relax.models import preparer as module
from relax.models.preparer import Preparer, ReadyPrompt, load_reader
from relax.types import Media, Prompt
from tests.omni_prompts import heard, image, messages

ONE_RUN = ReadyPrompt([1, 9, 9, 2], {}, (np.array([9, 9], np.int32),), frozenset({8, 9}))


class FakePool:
    """Gives every prompt two ids, and remembers what it was told to expect."""

    def __init__(self) -> None:
        self.expected: list[list[str]] = []
        self.stats = MediaStats()

    def expect(self, prompts: list[Prompt]) -> None:
        self.expected.append([prompt.key for prompt in prompts])

    async def prepare(self, prompt: Prompt) -> Prepared:
        nothing = np.zeros((0, 2), np.int64)
        return Prepared(features={"ids": np.array([5, 6], np.int32), "runs": nothing, "media_ids": nothing[:, 0]})


def shown(number: int) -> Prompt:
    return Prompt(f"rows:{number}", messages=tuple(messages(image(), "What?")), media=(Media("image", "a.png"),))


def test_a_place_becomes_what_stands_for_its_medium() -> None:
    assert ONE_RUN.expand([4, 9, 5, 6], [0, 0, 1, 1]) == ([4, 9, 9, 5, 6], [0, 0, 0, 1, 1])


@pytest.mark.parametrize("ids", [[4, 5], [9, 4, 8]])
def test_places_and_media_have_to_agree(ids: list[int]) -> None:
    with pytest.raises(DataError, match=r"it has \d places for 1 media"):
        ONE_RUN.expand(ids, [0] * len(ids))


@pytest.fixture
def of_pool(monkeypatch: pytest.MonkeyPatch, tiny_omni: Callable[[str], Path]) -> tuple[Preparer, FakePool]:
    pool, folder = FakePool(), tiny_omni("qwen3_vl")
    monkeypatch.setattr(module, "open_pool", lambda *_: pool)
    data = DataSection(media=MediaConfig())
    renderer = Renderer(AutoTokenizer.from_pretrained(folder), data)
    return Preparer(ModelConfig(path=str(folder)), data, renderer, spool=None, max_tokens=2), pool


def test_what_follows_is_begun_and_nothing_else_is_touched(of_pool: tuple[Preparer, FakePool]) -> None:
    preparer, pool = of_pool
    assert asyncio.run(preparer.prepare(shown(0), [shown(1), shown(2)])).ids == [5, 6]
    asyncio.run(preparer.prepare(shown(1)))
    assert pool.expected == [["rows:0", "rows:1", "rows:2"]]


def test_a_text_among_prompts_with_media_is_read_at_once(of_pool: tuple[Preparer, FakePool]) -> None:
    preparer, pool = of_pool
    text = Prompt("rows:7", messages=({"role": "user", "content": "Hello"},))
    ready = asyncio.run(preparer.prepare(text, [shown(8)]))
    assert ready.ids == preparer._renderer.prompt_ids(text)
    assert not ready.features
    assert pool.expected == [["rows:7", "rows:8"]], "its place in the order is no reason to stop looking ahead"


def test_media_count_as_tokens(of_pool: tuple[Preparer, FakePool]) -> None:
    preparer, _ = of_pool
    preparer.max_tokens = 1
    with pytest.raises(DataError, match=r"rows:0: with its media the prompt has 2 tokens, and 1 fit"):
        asyncio.run(preparer.prepare(shown(0)))


def test_a_conversation_that_is_learned_begins_as_its_prompt_does(tiny_omni: Callable[[str], Path]) -> None:
    folder = tiny_omni("qwen3_vl")
    read = load_reader(folder=str(folder), trust_remote_code=False, system_prompt="Look well.", template_options={})
    renderer = Renderer(AutoTokenizer.from_pretrained(folder), DataSection(system_prompt="Look well."))
    pictures = [image(64, 96), image(96, 64)]
    asked = messages(pictures[0], "What is it?", pictures[1])
    prompt = ReadyPrompt.of(read(asked, pictures))
    said = [*asked, {"role": "assistant", "content": "Noise."}]
    whole = ReadyPrompt.of(read(said, pictures))
    ids, mask = whole.expand(*renderer.render_chat(said))
    assert ids[: len(prompt.ids)] == list(prompt.ids)
    assert renderer.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "Noise.<|im_end|>"
    assert all(np.array_equal(whole.features[name], prompt.features[name]) for name in prompt.features)
    assert [len(run) for run in prompt.runs] == [6, 6]
    assert prompt.features["pixel_values"].shape == (4 * 12, 3, 16 * 16), "one frame of a patch that spans two"


def test_the_chat_template_may_be_the_processors_alone(tiny_omni: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_omni("qwen3_vl"), folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    assert not load_tokenizer(ModelConfig(path=str(folder))).chat_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(ModelConfig(path=str(folder))).chat_template == template


def test_a_model_that_does_not_hear_is_refused_where_videos_are_to_be_heard(tiny_omni: Callable[[str], Path]) -> None:
    options = {"trust_remote_code": False, "system_prompt": None, "template_options": {}, "hears_videos": True}
    with pytest.raises(ConfigError, match="the model does not hear videos"):
        load_reader(folder=str(tiny_omni("qwen3_vl")), **options)
    read = load_reader(folder=str(tiny_omni("qwen3_omni")), **options)
    prompt = ReadyPrompt.of(read(messages(heard(), "What?"), [heard()]))
    assert prompt.features["video_is_heard"].tolist() == [1]
    of_media = sum(token in prompt.media_ids for token in prompt.ids)
    assert [len(run) for run in prompt.runs] == [of_media + 2], "frames and sound, between the sound's marks"


def test_a_sound_of_which_a_processor_makes_nan_is_refused(tiny_omni: Callable[[str], Path]) -> None:
    read = load_reader(folder=str(tiny_omni("qwen3_omni")), trust_remote_code=False, system_prompt=None, template_options={})
    sound = Audio(np.tile(np.array([3e38, -3e38], np.float32), 4000), 16_000)
    with pytest.raises(DataError, match="NaN or infinity of its media"):
        read(messages(sound, "What?"), [sound])
