"""Supervised training: what is learned, what is refused, and that a folder is complete or not there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.cli.sft import load_sft_config
from relax.config.load import validate
from relax.config.sft import SFTConfig
from relax.data.tokenizer import load_tokenizer
from relax.errors import ConfigError, DataError
from relax.models.tiny import build_tiny_model
from relax.train.lessons import Lessons
from relax.train.sft import Score, SFTStep, as_run, make_reader, run_sft

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sft") / "model"
    build_tiny_model(path, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=300)
    return path


def make_config(folder: Path, out: Path, **sections: Any) -> SFTConfig:
    raw: dict[str, Any] = {
        "model": {"path": str(folder)},
        "data": {"type": "generator", "path": "relax.data.arithmetic:addition", "size": 64, "answer_key": "solution"},
        "train": {"num_steps": 3, "batch_size": 4, "lr": 1e-2},
        "output": {"path": str(out)},
    }
    return validate(SFTConfig, raw | sections)


def conversations(config: SFTConfig, folder: Path, max_tokens: int = 512) -> tuple[Lessons, Any]:
    tokenizer = load_tokenizer(as_run(config, folder).model)
    return Lessons(config.data, make_reader(config, config.data, tokenizer, max_tokens), seed=0), tokenizer


def write_rows(file: Path, *rows: Any) -> dict[str, Any]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return {"type": "file", "path": str(file)}


def test_only_the_assistants_tokens_are_learned_end_of_turn_included(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder, tmp_path / "out")
    found, tokenizer = conversations(config, folder)
    ((ids, mask, *_),) = found.batch(0, 1)[0]
    assert tokenizer.decode(ids[mask == 0]).startswith("<|im_start|>user\n")
    learned = tokenizer.decode(ids[mask == 1])
    assert learned.endswith("<|im_end|>")
    assert "=" in learned
    assert "user" not in learned


def test_every_turn_of_the_assistant_is_learned_from_chat_messages(folder: Path, tmp_path: Path) -> None:
    turns = [("user", "hi"), ("assistant", "A"), ("user", "and?"), ("assistant", "B")]
    data = write_rows(tmp_path / "chat.jsonl", {"messages": [{"role": role, "content": text} for role, text in turns]})
    found, tokenizer = conversations(make_config(folder, tmp_path / "out", data=data | {"prompt_key": "messages"}), folder)
    ((ids, mask, *_),) = found.batch(0, 1)[0]
    assert tokenizer.decode(ids[mask == 1]) == "A<|im_end|>B<|im_end|>"


def test_layouts_of_open_data_sets_are_learned(folder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "choices.jsonl", {"prompt": "Which?", "choices": ["x", "y"], "answer": 1})
    found, tokenizer = conversations(make_config(folder, tmp_path / "out", data=data | {"layout": "choices"}), folder)
    ((ids, mask, *_),) = found.batch(0, 1)[0]
    assert "A. x\nB. y" in tokenizer.decode(ids[mask == 0])
    assert tokenizer.decode(ids[mask == 1]) == "B<|im_end|>"
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "A"}]
    data = write_rows(tmp_path / "talk.jsonl", {"prompt": turns}) | {"layout": "conversations"}
    found, tokenizer = conversations(make_config(folder, tmp_path / "out", data=data), folder)
    ((ids, mask, *_),) = found.batch(0, 1)[0]
    assert tokenizer.decode(ids[mask == 1]) == "A<|im_end|>"


def test_media_that_are_forgotten_are_refused_where_the_model_could_read_them(folder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", {"prompt": "Which colour?", "answer": "red", "images": "a.png"})
    config = make_config(folder, tmp_path / "out", data=data)
    _, tokenizer = conversations(config, folder)  # a model of text has no use for them
    with pytest.raises(ConfigError, match=r"data\.media is not set, so the images in the column 'images'.*rows\.jsonl:1"):
        Lessons(config.data, make_reader(config, config.data, tokenizer, 512, sees=("image",)), seed=0)


def said(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    """Messages from (role, text) or (role, text with its own marks)."""
    return [{"role": role} | (text if isinstance(text, dict) else {"content": text}) for role, text in turns]


@pytest.mark.parametrize(
    ("loss_on", "marks", "learned"),
    [
        ("assistant", ({}, {}), "A<|im_end|>B<|im_end|>"),
        ("last", ({}, {}), "B<|im_end|>"),
        ("assistant", ({"train": False}, {}), "B<|im_end|>"),
        ("assistant", ({}, {"weight": 0}), "A<|im_end|>"),
        ("last", ({"weight": 1}, {"train": False}), "A<|im_end|>"),
    ],
)
def test_the_task_or_the_message_says_which_turns_are_learned(
    loss_on: str, marks: Any, learned: str, folder: Path, tmp_path: Path
) -> None:
    chat = said(
        ("system", "S"), ("user", "hi"), ("assistant", {"content": "A"} | marks[0]), ("tool", "42"),
        ("assistant", {"content": "B"} | marks[1]),
    )  # fmt: skip
    data = write_rows(tmp_path / "chat.jsonl", {"prompt": chat})
    found, tokenizer = conversations(make_config(folder, tmp_path / "out", data=data, task={"loss_on": loss_on}), folder)
    ((ids, mask, *_),) = found.batch(0, 1)[0]
    assert tokenizer.decode(ids[mask == 1]) == learned
    plain = [{"role": message["role"], "content": message["content"]} for message in chat]
    assert ids.tolist() == tokenizer.apply_chat_template(plain, return_dict=False), "marks are not rendered"


def test_a_template_may_rewrite_turns_that_are_not_learned(folder: Path, tmp_path: Path) -> None:
    """As those of reasoning models, which leave earlier thoughts out."""
    chat = said(("user", "hi"), ("assistant", "<think>long</think>A"), ("user", "and?"), ("assistant", "<think>x</think>B"))
    data = write_rows(tmp_path / "chat.jsonl", {"prompt": chat})
    config = make_config(folder, tmp_path / "out", data=data, task={"loss_on": "last"})
    tokenizer = load_tokenizer(as_run(config, folder).model)
    last = "message.content if loop.last else message.content.split('</think>')[-1]"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ message.content }}", "{{ " + last + " }}")
    ((ids, mask, *_),) = Lessons(config.data, make_reader(config, config.data, tokenizer, 512), seed=0).row(0)
    assert tokenizer.decode(ids[mask == 1]) == "<think>x</think>B<|im_end|>"
    assert "long" not in tokenizer.decode(ids)
    every = make_config(folder, tmp_path / "out", data=data)
    with pytest.raises(DataError, match="use one row for each assistant turn"):
        Lessons(every.data, make_reader(every, every.data, tokenizer, 512), seed=0)


def test_rows_of_other_tools_are_read_by_the_names_of_their_columns(folder: Path, tmp_path: Path) -> None:
    turns = [("system", "S"), ("human", "hi"), ("gpt", "A"), ("human", "and?"), ("gpt", "B")]
    row = {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    data = write_rows(tmp_path / "chat.jsonl", row) | {"prompt_key": "conversations"}
    found, tokenizer = conversations(make_config(folder, tmp_path / "out", data=data), folder)
    ((ids, mask, *_),) = found.batch(0, 1)[0]
    assert tokenizer.decode(ids).startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi")
    assert tokenizer.decode(ids[mask == 1]) == "A<|im_end|>B<|im_end|>"


def test_plain_text_prompts_are_continued_without_a_template(folder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "plain.jsonl", {"prompt": "1+1", "answer": "=2"}) | {"chat_template": False}
    found, tokenizer = conversations(make_config(folder, tmp_path / "out", data=data), folder)
    ((ids, mask, *_),) = found.batch(0, 1)[0]
    assert tokenizer.decode(ids) == "1+1=2<|im_end|>"
    assert tokenizer.decode(ids[mask == 1]) == "=2<|im_end|>"


def test_an_epoch_gives_every_row_once_and_the_next_one_another_order(folder: Path, tmp_path: Path) -> None:
    found, _ = conversations(make_config(folder, tmp_path / "out"), folder)
    epochs = [[row[0].ids.tobytes() for step in range(16) for row in found.batch(epoch * 16 + step, 4)] for epoch in (0, 1, 0)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert epochs[0] == epochs[2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1+1"}, "nothing to learn"),
        ({"prompt": "1+1", "answer": 2}, "int in it"),
        ({"prompt": [{"role": "robot", "content": "x"}, {"role": "assistant", "content": "y"}]}, "robot"),
        ({"question": "1+1", "answer": "2"}, "no column 'prompt'"),
        ({"prompt": "1+" * 400, "answer": "2"}, "context is 512"),
        ({"prompt": said(("user", {"content": "x", "train": True}), ("assistant", "y"))}, "only turns of the assistant"),
        ({"prompt": said(("user", "x"), ("assistant", {"content": "y", "weight": 0.5}))}, "weight = 0.5"),
        ({"prompt": said(("user", "x"), ("assistant", {"content": "y", "train": False}))}, "no assistant message to learn"),
    ],
)
def test_a_row_that_cannot_be_learned_is_named_by_its_line(row: Any, message: str, folder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "answer": "b"}, row)
    with pytest.raises(DataError, match=rf"rows.jsonl, line 2: .*{message}"):
        conversations(make_config(folder, tmp_path / "out", data=data), folder)
    found, _ = conversations(make_config(folder, tmp_path / "out", data=data | {"on_bad_row": "skip"}), folder)
    assert (len(found), found.num_skipped) == (1, 1)


def test_training_lowers_the_loss_and_the_folder_loads_with_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    steps: list[SFTStep] = []
    config = make_config(folder, tmp_path / "out", train={"num_steps": 30, "batch_size": 8, "lr": 1e-2})
    result = run_sft(config, on_step=steps.append)
    assert (result.step, result.score, len(steps)) == (30, None, 30)
    assert np.mean([s.loss for s in steps[-5:]]) < 0.6 * steps[0].loss
    assert AutoTokenizer.from_pretrained(result.path).chat_template
    assert AutoModelForCausalLM.from_pretrained(result.path).config.model_type == "qwen3"
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("loss_on", ["assistant", "last"])
def test_the_first_loss_is_that_of_transformers_own_forward_on_one_conversation_after_another(
    loss_on: str, folder: Path, tmp_path: Path
) -> None:
    """What is packed with others sees none of them."""
    from transformers import AutoModelForCausalLM

    rows = [{"prompt": said(*[(("user", "assistant")[n % 2], f"{row} {n}") for n in range(2 * row + 2)])} for row in range(4)]
    data = write_rows(tmp_path / "chat.jsonl", *rows) | {"shuffle": False}
    train = {"num_steps": 1, "batch_size": 4, "max_tokens_per_micro_batch": 100}
    config = make_config(folder, tmp_path / "out", data=data, train=train, task={"loss_on": loss_on})
    steps: list[SFTStep] = []
    run_sft(config, on_step=steps.append)
    model = AutoModelForCausalLM.from_pretrained(folder)
    total, count = 0.0, 0
    for ((ids, mask, *_),) in conversations(config, folder)[0].batch(0, 4):
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1].double(), -1)
        chosen = logprobs.gather(1, tokens[1:, None])[:, 0]
        total -= float(chosen[torch.from_numpy(mask[1:]) == 1].sum())
        count += int(mask.sum())
    assert steps[0].loss == pytest.approx(total / count, rel=1e-5)


def test_a_seed_gives_the_same_weights_again(folder: Path, tmp_path: Path) -> None:
    made = [run_sft(make_config(folder, tmp_path / name)).path / "model.safetensors" for name in ("a", "b")]
    assert made[0].read_bytes() == made[1].read_bytes()


def test_a_folder_that_is_there_is_kept_unless_told_otherwise(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").touch()
    with pytest.raises(ConfigError, match=r"output\.overwrite"):
        run_sft(make_config(folder, out))
    assert (out / "precious").exists()
    run_sft(make_config(folder, out, output={"path": str(out), "overwrite": True}))
    assert not (out / "precious").exists()


def test_a_failure_leaves_no_folder_behind(folder: Path, tmp_path: Path) -> None:
    data = {"type": "generator", "path": "relax.data.arithmetic:addition", "answer_key": "nonsense"}
    with pytest.raises(DataError, match="nonsense"):
        run_sft(make_config(folder, tmp_path / "out", data=data))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {}}, r'model\.path.*model\.build = "tiny"'),
        ({"model": {"path": "x", "build": "tiny"}}, r"either model\.path"),
        ({"train": {"num_steps": 3, "learning_rate": 1.0}}, "learning_rate"),
        ({"eval": {"data": {"type": "generator", "path": "relax.data.arithmetic:addition"}}}, r"needs a \[reward\]"),
        ({"reward": {"type": "reward_model", "model": {"path": "x"}}}, "asks a role of a run"),
        ({"reward": {"type": "sum", "parts": {"a": "genrm"}}}, 'reward.type = "genrm" asks a role of a run'),
    ],
)
def test_settings_that_do_not_fit_are_refused(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(tmp_path, tmp_path / "out", **sections)


def test_a_run_file_is_told_from_an_sft_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[rollout]\ngroup_size = 4\n", "utf-8")
    with pytest.raises(ConfigError, match="relax train"):
        load_sft_config(file, [])


def test_training_ends_as_soon_as_the_exam_is_passed(folder: Path, tmp_path: Path) -> None:
    exam = {
        "data": {"type": "generator", "path": "relax.data.arithmetic:addition", "size": 4},
        "every": 2,
        "max_new_tokens": 2,
        "stop_at": 1.0,
    }
    sections = {"eval": exam, "reward": {"type": "format", "pattern": ".*"}, "train": {"num_steps": 9, "batch_size": 2}}
    steps: list[SFTStep] = []
    result = run_sft(make_config(folder, tmp_path / "out", **sections), on_step=steps.append)
    assert (result.step, result.score) == (2, Score("reward", 1.0))
    assert [step.score for step in steps] == [None, Score("reward", 1.0)]


def test_the_demos_file_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    config = load_sft_config(Path("examples/arithmetic/sft.toml"), [])
    assert config.eval is not None
    assert config.eval.data.model_dump() != config.data.model_dump()
