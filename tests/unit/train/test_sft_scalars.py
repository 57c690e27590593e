"""Reward models and critics: what they learn, that transformers says the same, and that a run's critic begins with its head."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.config import make_config
from relax.config.load import validate
from relax.config.sft import SFTConfig
from relax.errors import ConfigError, DataError, ModelError
from relax.models.tiny import build_tiny_model
from relax.train.critic_backend import CriticBackend
from relax.train.lessons import Lessons, to_batch
from relax.train.sft import SFTStep, _make_backend, as_run, load_tokenizer, make_reader, run_sft

torch.set_num_threads(1)
PAIRS = {"task": {"type": "reward_model"}}
BIG = [{"prompt": f"{n} or {n + 1}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(1, 9)]
WORTH = [{"prompt": f"say {word}", "answer": word, "reward": float(len(word))} for word in ("a", "bcd", "efghi", "jk")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scalars") / "model"
    build_tiny_model(path, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=300)
    return path


def write(file: Path, rows: list[Any]) -> dict[str, Any]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return {"type": "file", "path": str(file)}


def configure(folder: Path, tmp_path: Path, rows: list[Any], **sections: Any) -> SFTConfig:
    data = write(tmp_path / "rows.jsonl", rows) | sections.pop("data", {})
    raw = {
        "model": {"path": str(folder)},
        "data": data,
        "train": {"num_steps": 40, "batch_size": 4, "lr": 1e-2},
        "output": {"path": str(tmp_path / "out")},
    }
    return validate(SFTConfig, raw | sections)


def read(config: SFTConfig, folder: Path) -> tuple[Lessons, Any]:
    tokenizer = load_tokenizer(as_run(config, folder).model)
    return Lessons(config.data, make_reader(config, config.data, tokenizer, 512), seed=0), tokenizer


def make_backend(config: SFTConfig, folder: Path) -> Any:
    """With a head that says something."""
    run = as_run(config, folder)
    backend = _make_backend(config, run, load_tokenizer(run.model))
    torch.manual_seed(0)
    with torch.no_grad():
        backend.model.score.weight.normal_()
    return backend


@pytest.fixture(scope="module")
def judge(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[SFTConfig, list[SFTStep]]:
    """A reward model that was trained on pairs, and its steps."""
    place = tmp_path_factory.mktemp("judge")
    held_out = {"data": write(place / "held_out.jsonl", BIG[:4]), "every": 10, "stop_at": 1.0}
    config = configure(folder, place, BIG, **PAIRS, eval=held_out)
    steps: list[SFTStep] = []
    run_sft(config, on_step=steps.append)
    return config, steps


def test_a_reward_model_learns_pairs_and_stops_when_it_tells_them_apart(judge: tuple[SFTConfig, list[SFTStep]]) -> None:
    _, steps = judge
    assert steps[0].loss == pytest.approx(np.log(2)), "a new head prefers nothing"
    assert steps[-1].loss < 0.3
    assert steps[-1].score is not None
    assert (steps[-1].score.name, steps[-1].score.value) == ("accuracy", 1.0)
    assert len(steps) % 10 == 0


def test_transformers_loads_a_reward_model_and_says_the_same(judge: tuple[SFTConfig, list[SFTStep]]) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    config, _ = judge
    out = Path(config.output.path)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert (model.config.num_labels, model.config.pad_token_id) == (1, tokenizer.pad_token_id)
    lessons, _ = read(config, out)
    run = as_run(config, out)
    values = _make_backend(config, run, tokenizer).values(to_batch([lessons.row(n) for n in range(8)]))
    for number, row in enumerate(BIG):
        for member, column in enumerate(("chosen", "rejected")):
            chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[column]}]
            ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
            with torch.no_grad():
                expected = float(model(**ids).logits[0, 0])
            assert abs(values[2 * number + member][-1] - expected) < 1e-5
            assert abs(expected) > 0.1


@pytest.mark.parametrize("loss", ["bradley_terry", "squared", "logistic"])
def test_micro_batches_change_neither_loss_nor_gradient_and_never_part_a_pair(folder: Path, tmp_path: Path, loss: str) -> None:
    rows = [row | {"answer": row["chosen"], "label": n / 8, "by": n / 4} for n, row in enumerate(BIG)]
    results = []
    for budget in (8192, 30, 1):
        task = {"type": "reward_model", "loss": loss, "margin_key": "by"}
        train = {"num_steps": 1, "max_tokens_per_micro_batch": budget}
        config = configure(folder, tmp_path, rows, task=task, train=train)
        backend, lessons = make_backend(config, folder), read(config, folder)[0]
        sums = backend.forward_backward(to_batch([lessons.row(n) for n in range(8)]))
        results.append((sums.values()["loss"], backend.gradients()))
    for value, gradients in results[1:]:
        assert value == pytest.approx(results[0][0], rel=1e-5)
        for name, gradient in gradients.items():
            largest = float(results[0][1][name].abs().max())
            torch.testing.assert_close(gradient, results[0][1][name], rtol=1e-4, atol=1e-5 * largest)


def test_the_gradient_of_pairs_is_that_of_a_plain_loop_in_float64(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    config = configure(folder, tmp_path, [row | {"by": 0.5} for row in BIG], task=PAIRS["task"] | {"margin_key": "by"})
    backend, lessons = make_backend(config, folder), read(config, folder)[0]
    batch = [lessons.row(n) for n in range(8)]
    sums = backend.forward_backward(to_batch(batch))
    backend.export(tmp_path / "start")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "start", dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for pair in batch:
        chosen, rejected = (model(torch.from_numpy(side.ids[:-1].astype(np.int64))[None]).logits[0, 0] for side in pair)
        total = total + (1 + (rejected + 0.5 - chosen).exp()).log()
    total.backward()
    assert sums.values()["loss"] == pytest.approx(float(total.detach()) / 8, rel=1e-5)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in backend.gradients().items():
        torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-3, atol=1e-4 * float(expected[name].abs().max()))


USER, GOOD, BAD = {"role": "user", "content": "q"}, *({"role": "assistant", "content": text} for text in ("good", "bad"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [USER], "chosen": "good", "rejected": "bad"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "q", "chosen": [{"from": "gpt", "value": "good"}], "rejected": [{"from": "gpt", "value": "bad"}]},
    ],
)
def test_pairs_come_in_every_usual_form(folder: Path, tmp_path: Path, row: Any) -> None:
    lessons, tokenizer = read(configure(folder, tmp_path, [row], **PAIRS), folder)
    texts = [tokenizer.decode(side.ids[:-1]) for side in lessons.row(0)]
    start = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [f"{start}good<|im_end|>\n", f"{start}bad<|im_end|>\n"]
    assert [int(side.mask.sum()) for side in lessons.row(0)] == [1, 1]


def test_plain_texts_need_no_template(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"chosen": "1+1=2", "rejected": "1+1=3"}]
    lessons, tokenizer = read(configure(folder, tmp_path, rows, **PAIRS, data={"chat_template": False}), folder)
    for number in (0, 1):
        assert [tokenizer.decode(side.ids[:-1]) for side in lessons.row(number)] == ["1+1=2", "1+1=3"]


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ({}, {"prompt": "q", "chosen": "a"}, "no column 'rejected'"),
        ({}, {"prompt": "q", "chosen": "a", "rejected": "a"}, "neither is better"),
        ({}, {"chosen": "a", "rejected": "b"}, "'chosen' must be a response to the column 'prompt'"),
        ({}, {"chosen": [GOOD, USER], "rejected": [USER, BAD]}, "ends with the assistant's turn"),
        ({"margin_key": "by"}, {"prompt": "q", "chosen": "a", "rejected": "b", "by": "much"}, "'by' must be a number from"),
        (
            {"margin_key": "by"},
            {"prompt": "q", "chosen": "a", "rejected": "b", "by": -1e308},
            "'by' must be a number from -1,000,000 to 1,000,000, and is -1e\\+308",
        ),
        (
            {"loss": "squared"},
            {"prompt": "q", "answer": "a", "label": 10**400},
            "'label' must be a number .*, and is 10{76}\\.\\.\\.",
        ),
        (
            {"loss": "squared"},
            {"prompt": "q", "answer": "a", "label": float("nan")},
            "'label' must be a number .*, and is nan;",
        ),
        ({"type": "critic"}, {"prompt": "q", "answer": "a", "reward": 1e7}, "'reward' must be a number"),
        ({"loss": "squared"}, {"prompt": "q", "answer": "a"}, "no column 'label'"),
        ({"loss": "logistic"}, {"prompt": "q", "answer": "a", "label": 7}, "a probability, from 0 to 1"),
        ({}, {"prompt": "q" * 600, "chosen": "a", "rejected": "b"}, "context is 512"),
    ],
)
def test_a_row_that_says_nothing_about_responses_is_named(
    folder: Path, tmp_path: Path, task: Any, row: Any, message: str
) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl, line 1: .*{message}"):
        read(configure(folder, tmp_path, [row], task={"type": "reward_model"} | task), folder)


@pytest.fixture(scope="module")
def critic(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SFTConfig:
    """A critic that has learned what its four rows are worth."""
    place = tmp_path_factory.mktemp("critic")
    held_out = {"data": write(place / "same.jsonl", WORTH), "every": 100}
    train = {"num_steps": 100, "batch_size": 4, "lr": 1e-2}
    config = configure(folder, place, WORTH, task={"type": "critic"}, eval=held_out, train=train)
    result = run_sft(config)
    assert result.score is not None
    assert result.score.name == "correlation"
    assert result.score.value > 0.95
    return config


def ppo(path: Path) -> Any:
    return make_config(
        {
            "model": {"path": str(path)},
            "data": {"type": "generator", "path": "relax.data.arithmetic:addition"},
            "reward": {"type": "exact"},
            "train": {"num_steps": 1},
            "algorithm": {"type": "ppo"},
        }
    )


def test_a_runs_critic_says_at_once_what_the_saved_one_has_learned(critic: SFTConfig, folder: Path) -> None:
    from transformers import AutoModelForTokenClassification

    out = Path(critic.output.path)
    lessons, _ = read(critic, folder)
    batch = to_batch([lessons.row(n) for n in range(4)])
    values, theirs = CriticBackend(ppo(out)).values(batch), AutoModelForTokenClassification.from_pretrained(out)
    for row, worth in enumerate(WORTH):
        trained = np.flatnonzero(batch.loss_mask[row])
        assert np.abs(values[row][trained[1:]] - worth["reward"]).max() < 1.0  # before the first token nobody can know
        with torch.no_grad():
            expected = theirs(torch.from_numpy(batch.tokens[row].astype(np.int64))[None]).logits[0, :, 0]
        assert np.allclose(values[row][trained], expected[trained - 1], atol=1e-5)


def test_a_reward_model_may_become_a_critic(judge: tuple[SFTConfig, list[SFTStep]], folder: Path) -> None:
    config, _ = judge
    backend = CriticBackend(ppo(Path(config.output.path)))
    judged = _make_backend(config, as_run(config, Path(config.output.path)), load_tokenizer(as_run(config, folder).model))
    batch = to_batch([read(config, folder)[0].row(0)])
    assert np.array_equal(backend.values(batch).values, judged.values(batch).values)
    assert backend.values(batch).values.any()


def test_a_classifier_of_several_labels_is_no_reward_model(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    many = tmp_path / "many"
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).save_pretrained(many)
    load_tokenizer(as_run(configure(folder, tmp_path, BIG), folder).model).save_pretrained(many)
    with pytest.raises(ModelError, match=r"many.*score\.weight"):
        run_sft(configure(many, tmp_path, BIG, **PAIRS))


def test_settings_without_a_meaning_are_refused(folder: Path, tmp_path: Path) -> None:
    data = {"type": "generator", "path": "relax.data.arithmetic:addition"}
    with pytest.raises(ConfigError, match=r"leave \[reward\] out"):
        configure(folder, tmp_path, BIG, **PAIRS, reward={"type": "exact"})
    with pytest.raises(ConfigError, match=r"leave eval\.temperature out"):
        configure(folder, tmp_path, BIG, **PAIRS, eval={"data": data, "temperature": 0.5})
    with pytest.raises(ConfigError, match=r"loss_on"):
        configure(folder, tmp_path, BIG, task={"type": "critic", "loss_on": "last"})
