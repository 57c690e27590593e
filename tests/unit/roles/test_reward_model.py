"""The reward model: transformers' own answers, what cannot be scored told apart, and workers that find and await the role."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from relax.config import make_config
from relax.config.run import RunConfig
from relax.control.pages import Pages
from relax.errors import ConfigError, ModelError
from relax.models.tiny import build_tiny_model
from relax.rewards.pool import RewardPool
from relax.roles.reward_model import RewardModel
from relax.roles.role import Reply, RoleTask
from relax.roles.topology import answering_roles, role_specs
from relax.types import Prompt

torch.set_num_threads(1)
CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "12+9=?"}]
SAID = ["21", "22", "a much longer response than the others", "?"]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of conversations with three labels, and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    start, folder = tmp_path_factory.mktemp("start"), tmp_path_factory.mktemp("judge")
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64, "max_context": 96}
    build_tiny_model(start, vocab_size=300, **sizes)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=3)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(start).save_pretrained(folder)
    return folder


def asks(judge: Path, **settings: Any) -> dict[str, Any]:
    return {"type": "reward_model", "model": {"path": str(judge)}} | settings


def configure(judge: Path, reward: dict[str, Any] | None = None) -> RunConfig:
    return make_config(
        {
            "model": {"path": str(judge)},
            "data": {"type": "generator", "path": "relax.data.arithmetic:addition"},
            "reward": reward or asks(judge),
            "train": {"num_steps": 1},
        }
    )


@pytest.fixture
async def role(judge: Path) -> AsyncIterator[RoleTask]:
    task = RoleTask(RewardModel(configure(judge), None))  # type: ignore[arg-type]
    await task.start()
    task.run()
    yield task
    await task.stop()


async def ask(role: RoleTask, items: Any, page: str = "score") -> tuple[int, Any]:
    status, said = await role.answer("POST", page, json.dumps({"items": items}).encode())
    return status, said.get("rewards", said)


def of_transformers(folder: Path, prompt: Any, response: str) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if isinstance(prompt, str):
        given = tokenizer(prompt + response, return_tensors="pt")
    else:
        chat = [*prompt, {"role": "assistant", "content": response}]
        given = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        return model(**given).logits[0]


async def test_rewards_are_those_of_transformers_whatever_they_are_computed_with(role: RoleTask, judge: Path) -> None:
    items = [{"prompt": prompt, "response": said} for prompt in (CHAT, CHAT[1:], "12+9=") for said in SAID]
    expected = [of_transformers(judge, item["prompt"], item["response"]) for item in items]
    for page, found in (
        ("score", [logits[0] for logits in expected]),
        ("score/2", [logits[2] for logits in expected]),
        ("score/1/probability", [logits.softmax(0)[1] for logits in expected]),
    ):
        status, rewards = await ask(role, items, page)
        assert status == 200
        assert rewards == pytest.approx([float(value) for value in found], abs=1e-5)
        alone = [await ask(role, [item], page) for item in items[:3]]
        assert [one[1][0] for one in alone] == pytest.approx(rewards[:3], abs=1e-5)


async def test_a_single_label_is_a_probability_by_its_sigmoid(judge: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1, ignore_mismatched_sizes=True)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(judge).save_pretrained(tmp_path)
    task = RoleTask(RewardModel(configure(tmp_path), None))  # type: ignore[arg-type]
    await task.start()
    task.run()
    (_, (logit,)), (_, (share,)) = [
        await ask(task, [{"prompt": "1", "response": "2"}], p) for p in ("score", "score/0/probability")
    ]
    assert share == pytest.approx(float(torch.sigmoid(torch.tensor(logit))), abs=1e-6)
    await task.stop()


async def test_what_is_too_long_is_never_cut(role: RoleTask) -> None:
    items = [{"prompt": CHAT, "response": said} for said in ("21", "9" * 96, "22")]
    _, rewards = await ask(role, items)
    assert [type(reward) for reward in rewards] == [float, dict, float]
    assert "tokens, and the reward model's context is 96" in rewards[1]["error"]


async def test_a_prompt_that_the_template_refuses_is_told(role: RoleTask) -> None:
    _, rewards = await ask(role, [{"prompt": [{"role": "robot", "content": "x"}], "response": "y"}])
    assert "the chat template refuses" in rewards[0]["error"]


@pytest.mark.parametrize(
    "items",
    [None, [{"prompt": "x"}], [{"prompt": 3, "response": "y"}], ["x"]]
    + [[{"prompt": [{"role": "user", **content}], "response": "y"}] for content in ({}, {"content": [3]}, {"content": 3})],
)
async def test_a_request_of_another_form_is_refused(role: RoleTask, items: Any) -> None:
    status, said = await ask(role, items)
    assert (status, "wanted" in said["error"]) == (400, True)


@pytest.mark.parametrize("page", ["scores", "score/x", "score/3", "score/0/odds", "score/0/logit/more"])
async def test_a_page_that_there_is_not_is_told(role: RoleTask, page: str) -> None:
    status, said = await ask(role, [{"prompt": "x", "response": "y"}], page)
    assert status == 404
    assert "score/LABEL/SCALE" in said["error"] or "counted from 0" in said["error"]


async def test_the_role_is_started_where_a_reward_asks_it_and_nowhere_else(judge: Path) -> None:
    inside = {"type": "sum", "parts": {"right": "exact", "style": asks(judge, label=2), "other": asks(judge)}}
    for config in (configure(judge), configure(judge, inside)):
        assert answering_roles(config) == ("reward_model",)
    assert RewardModel(configure(judge, inside), None)._settings.label == 2  # type: ignore[arg-type]
    assert "reward_model" not in [spec.name for spec in role_specs(configure(judge, {"type": "exact"}))]


async def test_rewards_that_want_different_models_are_refused(judge: Path) -> None:
    parts = {name: asks(Path(name)) for name in ("a", "b")}
    with pytest.raises(ConfigError, match="give them the same model"):
        configure(judge, {"type": "sum", "parts": parts})


async def test_a_label_that_the_model_has_not_is_a_mistake(judge: Path) -> None:
    with pytest.raises(ModelError, match=r"reward\.label = 3: .* has 3 label\(s\), counted from 0"):
        await RewardModel(configure(judge, asks(judge, label=3)), None).start()  # type: ignore[arg-type]


async def test_workers_ask_it_and_wait_for_it_while_it_is_away(judge: Path, role: RoleTask) -> None:
    is_away, asked = True, asyncio.Event()

    async def answer(name: str, method: str, page: str, body: bytes) -> Reply:
        asked.set()
        return (503, {"error": "restarting"}) if is_away else await role.answer(method, page, body)

    pages = Pages(answer)
    url = await pages.start(0)
    parts = {"style": asks(judge, label=1), "right": "exact"}
    config = configure(judge, {"type": "sum", "parts": parts, "time_limit_s": 30.0})
    pool = RewardPool(config.reward, services={"reward_model": f"{url}/reward_model"})
    await pool.start()
    scoring = asyncio.create_task(pool.score(Prompt("p", messages=tuple(CHAT), answer="21"), [*SAID, "9" * 96]))
    await asked.wait()
    is_away = False
    results = await scoring
    await pool.close()
    await pages.stop()
    expected = [float(of_transformers(judge, CHAT, said)[1]) for said in SAID]
    assert [result.parts["style"] for result in results[:-1]] == pytest.approx(expected, abs=1e-5)
    assert results[0].value == pytest.approx(expected[0] + 1, abs=1e-5)
    assert results[-1].value is None
    assert "context is 96" in str(results[-1].error)


async def test_half_a_surrogate_pair_has_no_reward_and_the_role_goes_on(role: RoleTask) -> None:
    _, rewards = await ask(role, [{"prompt": "x", "response": "\ud800"}, {"prompt": "x", "response": "y"}])
    assert "half of a surrogate pair" in rewards[0]["error"]
    assert isinstance(rewards[1], float)
    assert role.status()["running"]
