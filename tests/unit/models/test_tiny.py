"""The tiny model is a Qwen3 folder like any other, and building it twice gives the same bytes."""

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax.errors import ModelError
from relax.models.tiny import build_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    build_tiny_model(path)
    return path


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_the_folder_loads_as_a_qwen3_of_about_a_million_parameters(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert 0.7e6 < sum(weight.numel() for weight in model.parameters()) < 1.3e6
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id


def test_building_twice_gives_the_same_bytes_and_leaves_the_random_state_alone(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    build_tiny_model(tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    assert digest(tmp_path) == digest(folder)


def test_any_text_comes_back_and_digits_are_tokens_of_their_own(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("57+86=?", "31;41=143", "def f(x):\n\treturn 'é 日本 🙂'", "  two  spaces "):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert [tokenizer.decode([token]) for token in tokenizer("2048;10").input_ids] == ["2", "0", "4", "8", ";", "1", "0"]


def test_the_chat_template_writes_chatml_and_each_mark_is_one_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2=?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+2=?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text).input_ids
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert ids.count(tokenizer.eos_token_id) == 2
    assert [tokenizer.decode([token]) for token in ids[-3:]] == ["<|im_start|>", "assistant", "\n"]


def test_an_unknown_role_is_refused_by_name(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with pytest.raises(Exception, match="role robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "hi"}], tokenize=False)


@pytest.mark.parametrize("sizes", [{"hidden_size": 130}, {"num_kv_heads": 3}, {"vocab_size": 100}])
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tiny model"):
        build_tiny_model(tmp_path, **sizes)
