"""A reward model that sees: rewards are transformers' own for each picture, however they are asked for together."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from relax.config import make_config
from relax.rewards.media import as_request
from relax.roles.reward_model import RewardModel
from relax.roles.role import RoleTask
from relax.roles.shown_media import PreparedMedia

pytestmark = pytest.mark.usefixtures("media_here")
SAID = ["red", "blue, I would say", "no"]


class Bus:
    """Remembers the events that it is sent."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def emit(self, event: dict[str, Any]) -> None:
        self.events.append(event)


@pytest.fixture(scope="module")
def folder(tiny_omni: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with two labels that sees; what it sees matters."""
    from transformers import AutoConfig, AutoProcessor

    from relax.models.scalar_omni import scalar_class

    start, place = tiny_omni("qwen3_vl"), tmp_path_factory.mktemp("judge")
    config = AutoConfig.from_pretrained(start, num_labels=2)
    torch.manual_seed(1)
    model = scalar_class(config, "SequenceClassification", has_bias=False).from_pretrained(start, config=config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    model.save_pretrained(place)
    AutoProcessor.from_pretrained(start).save_pretrained(place)
    return place


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, Path]:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8)).save(tmp_path / "noise.png")
    return {name: tmp_path / f"{name}.png" for name in ("red", "noise")}


def config_of(folder: Path, tmp_path: Path) -> Any:
    return make_config(
        {
            "model": {"path": "m"},
            "data": {"type": "file", "path": str(tmp_path / "rows.jsonl"), "media": {"num_workers": 1}},
            "reward": {"type": "reward_model", "model": {"path": str(folder)}, "label": 1},
            "train": {"num_steps": 1},
        }
    )


@pytest.fixture
async def role(folder: Path, tmp_path: Path) -> AsyncIterator[RoleTask]:
    task = RoleTask(RewardModel(config_of(folder, tmp_path), Bus()))  # type: ignore[arg-type]
    await task.start()
    task.run()
    yield task
    await task.stop()


async def ask(role: RoleTask, prompts: list[Any]) -> list[Any]:
    """The rewards of each response to each prompt."""
    items = [{"prompt": prompt, "response": said} for prompt in prompts for said in SAID]
    status, said = await role.answer("POST", "score/1", json.dumps({"items": items}).encode())
    assert status == 200
    return list(said["rewards"])


def chat(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*content, {"type": "text", "text": "Which colour?"}]}]


def of_transformers(folder: Path, picture: Path | None, response: str) -> float:
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoProcessor

    processor, model = AutoProcessor.from_pretrained(folder), AutoModel.from_pretrained(folder)
    parts = [*([{"type": "image"}] if picture else []), {"type": "text", "text": "Which colour?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": response}]}
    text = processor.apply_chat_template([{"role": "user", "content": parts}, answer], tokenize=False)
    given = processor(text=[text], images=[Image.open(picture)] if picture else None, return_tensors="pt")
    score = load_file(folder / "model.safetensors")["score.weight"]
    with torch.no_grad():
        return float((model(**given).last_hidden_state[0, -1] @ score.T)[1])


async def test_nothing_is_scored_before_it_can_be_shown(
    folder: Path, tmp_path: Path, pictures: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = RoleTask(RewardModel(config_of(folder, tmp_path), Bus()))  # type: ignore[arg-type]
    items = [{"prompt": chat({"type": "image", "path": str(pictures["red"])}), "response": "red"}]
    said: list[int] = []

    async def start(_: PreparedMedia) -> None:
        said.append((await asyncio.wait_for(task.answer("POST", "score", json.dumps({"items": items}).encode()), 5))[0])

    monkeypatch.setattr(PreparedMedia, "start", start)
    await task.start()
    await task.stop()
    assert said == [503]


async def test_who_is_asking_when_it_ends_is_told_to_ask_again(
    role: RoleTask, pictures: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = PreparedMedia.of

    async def end_first(self: PreparedMedia, media: Any) -> Any:
        await role.stop()
        return await prepare(self, media)

    monkeypatch.setattr(PreparedMedia, "of", end_first)
    items = [{"prompt": chat({"type": "image", "path": str(pictures["red"])}), "response": "red"}]
    status, said = await role.answer("POST", "score", json.dumps({"items": items}).encode())
    assert (status, said) == (500, {"error": "reward_model: ended before it had scored this"})


async def test_rewards_are_those_of_transformers_for_each_picture(
    role: RoleTask, folder: Path, pictures: dict[str, Path]
) -> None:
    shown = [pictures["red"], pictures["noise"], None]
    prompts = [chat(*([{"type": "image", "path": str(picture)}] if picture else [])) for picture in shown]
    expected = [of_transformers(folder, picture, said) for picture in shown for said in SAID]
    found = await ask(role, prompts)
    assert found == pytest.approx(expected, abs=1e-4)
    assert abs(found[0] - found[3]) > 0.01, "prompts of one text are told apart by their pictures"
    assert await ask(role, prompts[:1]) == pytest.approx(found[:3], abs=1e-5)
    carried = {"type": "image", "base64": base64.b64encode(pictures["red"].read_bytes()).decode()}
    assert await ask(role, [chat(carried)]) == pytest.approx(found[:3], abs=1e-5)
    named = as_request(chat({"type": "image", "source": str(pictures["red"])}))
    assert await ask(role, [named]) == pytest.approx(found[:3], abs=1e-5), "as reward workers send it"


async def test_a_picture_that_may_not_be_read_has_no_reward_and_others_have(
    role: RoleTask, pictures: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n and nothing else")
    shown = ["/etc/hostname", str(tmp_path / "bad.png"), str(pictures["red"])]
    found = await ask(role, [chat({"type": "image", "path": path}) for path in shown])
    assert [type(reward) for reward in found] == [dict] * 6 + [float] * 3
    assert "root" in found[0]["error"]
    assert "bad.png" in found[3]["error"] or "image" in found[3]["error"]


async def test_a_response_that_spells_a_place_is_text(role: RoleTask, pictures: dict[str, Path]) -> None:
    prompt = chat({"type": "image", "path": str(pictures["red"])})
    body = json.dumps({"items": [{"prompt": prompt, "response": "see <|image_pad|> there"}]}).encode()
    _, said = await role.answer("POST", "score", body)
    assert isinstance(said["rewards"][0], float)
