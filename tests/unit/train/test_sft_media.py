"""Critics and reward models learn from rows with pictures: what they read is transformers' own input, row by row."""

import json
import re
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch
from omni_prompts import image, spread
from PIL import Image as Picture
from transformers import AutoModelForMultimodalLM, AutoProcessor

from relax.config.load import validate
from relax.config.sft import SFTConfig
from relax.data.media.source import Spool
from relax.errors import ConfigError, DataError
from relax.models.preparer import ReadyPrompt, load_reader
from relax.train.held_out import HeldOut
from relax.train.lessons import Lessons, decode, to_batch
from relax.train.sft import _make_backend, as_run, load_tokenizer, make_reader, run_sft

PICTURES = {f"{number}.png": image(64, 64 + 32 * number, number) for number in range(3)}
PAIR = {"prompt": "Look: <image> What?", "chosen": "a cat, surely", "rejected": "no", "images": "1.png"}
WHOLE = [{"role": "user", "content": "<image> or <image>?"}, {"role": "assistant", "content": "first"}]
TASKS = {
    "pairs": ({"type": "reward_model"}, [PAIR, PAIR | {"images": "2.png"}, {"prompt": "1+1?", "chosen": "2", "rejected": "3"}]),
    "numbers": (
        {"type": "reward_model", "loss": "squared"},
        [{"prompt": WHOLE, "label": 1.0, "images": ["0.png", "1.png"]}, {"prompt": "Hi", "answer": "you", "label": 0.5}],
    ),
    "critic": ({"type": "critic"}, [{"prompt": "See?", "answer": "a tree", "reward": 0.7, "images": "2.png"}]),
}


class Here:
    """What the media workers do, in this process and without files."""

    max_tokens = 4096

    def __init__(self, folder):
        self._read = load_reader(folder=str(folder), trust_remote_code=False, system_prompt=None, template_options={})
        self.asked = []

    async def prepare(self, prompt, following=()):
        self.asked.append(prompt)
        if "bad.png" in str(prompt.media):
            raise DataError(f"{prompt.key}: it is no picture")
        items = [PICTURES[str(item.source).rpartition("/")[2]] for item in prompt.media]
        return ReadyPrompt.of(self._read(prompt.messages, items))


@pytest.fixture(scope="module")
def folder(tiny_omni, tmp_path_factory):
    place = tmp_path_factory.mktemp("scalars") / "model"
    spread(AutoModelForMultimodalLM.from_pretrained(tiny_omni("qwen3_vl"))).save_pretrained(place)
    AutoProcessor.from_pretrained(tiny_omni("qwen3_vl")).save_pretrained(place)
    return place


@pytest.fixture
def read(folder, tmp_path):
    """The configuration and the lessons of a task on these rows."""

    def make(task, rows, **data):
        for name, picture in PICTURES.items():
            Picture.fromarray(picture.pixels).save(tmp_path / name)
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = {"type": "file", "path": f"{tmp_path}/rows.jsonl", "media": {"num_workers": 1}} | data
        raw = {"model": {"path": str(folder)}, "data": data, "task": task, "train": {"num_steps": 1, "batch_size": 1}}
        config = validate(SFTConfig, raw | {"output": {"path": f"{tmp_path}/out"}})
        run = as_run(config, folder)
        reader = make_reader(config, config.data, load_tokenizer(run.model), 4096, Spool(), ("image", "video"))
        return config, Lessons(config.data, reader, seed=0)

    return make


@pytest.mark.parametrize("name", TASKS)
async def test_numbers_are_read_where_transformers_reads_them(folder, read, name) -> None:
    task, rows = TASKS[name]
    config, lessons = read(task, rows)
    here, run = Here(folder), as_run(config, folder)
    batch = to_batch(await decode([lessons.row(n) for n in range(len(rows))], here, lessons))
    assert len(here.asked) == sum("images" in row for row in rows), "the two of a pair share their media"
    backend = _make_backend(config, run, load_tokenizer(run.model))
    with torch.no_grad():
        backend.model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    found, score = backend.values(batch), backend.model.score.weight[0]
    processor, core = AutoProcessor.from_pretrained(folder), AutoModelForMultimodalLM.from_pretrained(folder).eval()
    place = 0
    for row in rows:
        asked = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
        for said in [row[column] for column in ("chosen", "rejected", "answer") if column in row] or [None]:
            shown = asked + ([{"role": "assistant", "content": said}] if said is not None else [])
            given = own_inputs(processor, shown, row.get("images", []))
            ids = given["input_ids"][0].numpy()
            own = (core(**given, output_hidden_states=True).hidden_states[-1][0] @ score).detach().numpy()
            trained = np.flatnonzero(batch.loss_mask[place])
            assert np.array_equal(batch.tokens[place][: trained[-1]], ids[: trained[-1]])
            assert name == "critic" or trained.tolist() == [len(ids)], "after the last token"
            assert np.allclose(found[place][trained], own[trained - 1], rtol=1e-4, atol=1e-4)
            place += 1


def own_inputs(processor, messages, images):
    """transformers' own, for messages with `<image>` in their places, or else before the first text."""
    names = [images] if isinstance(images, str) else images
    if names and "<image>" not in str(messages):
        messages = [{"role": "user", "content": "<image>" * len(names) + messages[0]["content"]}, *messages[1:]]
    cut = [{**message, "content": re.split("(<image>)", message["content"])} for message in messages]
    parts = [
        {**m, "content": [{"type": "image"} if t == "<image>" else {"type": "text", "text": t} for t in m["content"] if t]}
        for m in cut
    ]
    text = processor.apply_chat_template(parts, tokenize=False)
    pictures = [Picture.fromarray(PICTURES[name].pixels) for name in names] or None
    return processor(text=[text], images=pictures, return_tensors="pt")


async def test_pairs_that_cannot_share_their_media_are_bad_rows(read, folder) -> None:
    other = [{"role": "user", "content": "<image> and <image>?"}, {"role": "assistant", "content": "last"}]
    row = {"chosen": WHOLE, "rejected": other, "images": ["0.png", "1.png"]}
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: 'chosen' and 'rejected' are different before their last media"):
        read({"type": "reward_model"}, [row])
    with pytest.raises(DataError, match="3 places for image"):
        read({"type": "reward_model"}, [PAIR | {"prompt": "<image><image><image>"}])
    with pytest.raises(ConfigError, match=r"data\.media is not set, so the images"):
        read({"type": "reward_model"}, [PAIR], media=None)
    other = {
        "prompt": "<image> What?",
        "answer": "red",
        "image": "red.png",
    }  # without its media `<image>` is a text to learn from
    with pytest.raises(DataError, match=r"no row has media in 'images'.*'prompt', 'answer', 'image'"):
        read({"type": "policy"}, [other])
    _, lessons = read({"type": "reward_model"}, [PAIR])
    here = Here(folder)
    here.max_tokens = 20
    with pytest.raises(DataError, match=r"rows\.jsonl:1: with its media the conversation has \d+ tokens, and 20 fit"):
        await decode([lessons.row(0)], here, lessons)


async def test_rows_whose_media_cannot_be_read_are_left_out_only_if_the_data_may_have_bad_rows(read, folder, tmp_path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no picture")
    bad, here = PAIR | {"images": "bad.png"}, Here(folder)
    _, lessons = read({"type": "reward_model"}, [PAIR, bad, PAIR])
    with pytest.raises(DataError, match=r'rows\.jsonl:2: it is no picture; data\.on_bad_row = "skip"'):
        await decode([lessons.row(0), lessons.row(1)], here, lessons)
    _, lessons = read({"type": "reward_model"}, [PAIR, bad, PAIR], on_bad_row="skip")
    for _ in range(2):  # epochs
        found = await decode([lessons.row(number) for number in range(3)], here, lessons)
        assert [len(lesson) for lesson in found] == [2, 2]
        assert all(row.features for lesson in found for row in lesson)
    assert lessons.num_skipped == 1
    assert await decode([lessons.row(1)], here, lessons) == []
    assert "it is no picture" in lessons.last_refusal


async def test_an_evaluation_says_the_same_however_few_rows_it_holds(read, folder, tmp_path, monkeypatch) -> None:
    rows = [{"prompt": "<image>?", "answer": "red", "label": n % 3 / 2, "images": f"{n % 3}.png"} for n in range(5)]
    (tmp_path / "bad.png").write_bytes(b"no picture")
    rows.insert(2, rows[0] | {"images": "bad.png"})
    config, lessons = read({"type": "reward_model", "loss": "squared"}, rows, on_bad_row="skip")
    here = Here(folder)
    here.start = here.close = AsyncMock()
    backend = _make_backend(config, as_run(config, folder), load_tokenizer(as_run(config, folder).model))
    with torch.no_grad():
        backend.model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    scores = []
    for at_once in (1, 4, 32):
        monkeypatch.setattr("relax.train.held_out._AT_ONCE", at_once)
        scores.append(await HeldOut(lessons, 6, here).score(backend, 0))
    assert abs(scores[0]) > 1e-3
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-4)
    _, bad = read({"type": "reward_model", "loss": "squared"}, rows[2:3], on_bad_row="skip")
    with pytest.raises(DataError, match=r"eval\.data: none of 1 rows can be read: .*it is no picture"):
        await HeldOut(bad, 6, here).score(backend, 0)


def test_media_for_a_model_that_reads_text_are_a_mistake(tiny_model, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Which?", "answer": "red", "images": "red.png"}))
    raw = {"model": {"path": str(tiny_model)}, "data": {"type": "file", "path": f"{tmp_path}/rows.jsonl", "media": {}}}
    raw |= {"train": {"num_steps": 1}, "output": {"path": f"{tmp_path}/out"}}
    with pytest.raises(ConfigError, match=r"data\.media: model\.path = .* reads text alone"):
        run_sft(validate(SFTConfig, raw))


@pytest.mark.slow
def test_held_out_rows_are_left_out_or_refused_by_the_same_rule(tmp_path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no picture")
    Picture.new("RGB", (64, 64), (200, 0, 0)).save(tmp_path / "good.png")
    rows = [{"prompt": "Which colour?", "answer": "red", "images": name} for name in ("good.png", "bad.png")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"type": "file", "path": f"{tmp_path}/rows.jsonl", "media": {"num_workers": 1}}

    def train(name, **held_out):
        raw = {"model": {"build": "tiny-vl"}, "data": data | {"on_bad_row": "skip"}, "reward": {"type": "exact"}}
        raw |= {"eval": {"data": data | held_out, "max_new_tokens": 2}, "train": {"num_steps": 1, "batch_size": 2}}
        return run_sft(validate(SFTConfig, raw | {"output": {"path": f"{tmp_path}/{name}"}}))

    assert train("skips", on_bad_row="skip").num_skipped == 1
    with pytest.raises(DataError, match=r'bad\.png.*eval\.data\.on_bad_row = "skip"'):
        train("refuses")
    with pytest.raises(ConfigError, match=r"eval\.data\.media is not set, so the images"):
        train("forgets", media=None)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["reward_model", "critic"])
def test_a_colour_is_learned_from_the_picture_alone(tmp_path, task) -> None:
    """Held-out pictures are judged right: whole training, decoding in its own processes, and the folder is used again."""
    rows = []
    for number in range(24):
        is_red = number % 2 == 0
        Picture.new("RGB", (64, 64), (220, 30 + number, 20) if is_red else (20, 30 + number, 220)).save(
            tmp_path / f"{number}.png"
        )
        better, worse = ("red", "blue") if is_red else ("blue", "red")
        said = {"answer": "red", "reward": 1.0 if is_red else -1.0}
        rows.append({"prompt": "Which colour?", "chosen": better, "rejected": worse, "images": f"{number}.png", **said})
    for name, part in (("train", rows[:16]), ("test", rows[16:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    data = {"type": "file", "media": {"num_workers": 1}}
    raw = {
        "model": {"build": "tiny-vl"},
        "task": {"type": task},
        "data": data | {"path": f"{tmp_path}/train.jsonl"},
        "eval": {"data": data | {"path": f"{tmp_path}/test.jsonl"}, "every": 20, "num_prompts": 8, "stop_at": 0.95},
        "train": {"num_steps": 200, "batch_size": 8, "lr": 3e-3},
        "output": {"path": f"{tmp_path}/out"},
    }
    result = run_sft(validate(SFTConfig, raw))
    assert result.score is not None
    assert result.score.value >= 0.95
    again = raw | {"model": {"path": f"{tmp_path}/out"}, "output": {"path": f"{tmp_path}/again"}}
    again["train"] = raw["train"] | {"num_steps": 1, "lr": 1e-9}
    assert run_sft(validate(SFTConfig, again)).score.value == pytest.approx(result.score.value, abs=1e-3)
