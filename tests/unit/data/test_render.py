"""Rendering: prompts, text, and whose tokens are whose."""

from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import CHATML, FORGETFUL, OPTION, PLAIN, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.config.data import FileDataConfig
from relax.config.model import ModelConfig
from relax.data.render import Renderer
from relax.data.tokenizer import load_tokenizer
from relax.errors import DataError, ModelError
from relax.types import Prompt

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


def renderer(template: str | None = CHATML, **changes: Any) -> Renderer:
    return Renderer(byte_tokenizer(template), FileDataConfig(path="unused", **changes))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_chat_prompt_ends_with_the_generation_prompt() -> None:
    ids = renderer().prompt_ids(Prompt("p", messages=(user("1+1=?"),)))
    assert TOKENIZER.decode(ids) == "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"


def test_the_system_prompt_is_put_first_unless_the_row_has_its_own() -> None:
    with_system = renderer(system_prompt="Be brief.")
    assert TOKENIZER.decode(with_system.prompt_ids(Prompt("p", messages=(user("x"),)))).startswith(
        "<|im_start|>system\nBe brief."
    )
    own = Prompt("p", messages=({"role": "system", "content": "Mine."}, user("x")))
    assert "Be brief." not in TOKENIZER.decode(with_system.prompt_ids(own))


def test_plain_text_is_not_wrapped() -> None:
    plain = renderer(None, chat_template=False)
    assert TOKENIZER.decode(plain.prompt_ids(Prompt("p", text="00437+00085="))) == "00437+00085="
    with pytest.raises(DataError, match="chat messages cannot be rendered"):
        plain.prompt_ids(Prompt("p", messages=(user("x"),)))


def test_text_leaves_special_tokens_out_and_changes_nothing_else() -> None:
    ids = [*TOKENIZER("a , b .", add_special_tokens=False)["input_ids"], END]
    assert renderer().text(ids) == "a , b ."


def test_template_options_reach_the_template_and_its_refusals_are_explained() -> None:
    assert renderer(OPTION, template_options={"shout": True}).prompt_ids(Prompt("p", messages=(user("x"),)))
    with pytest.raises(DataError, match=r"p:7: the chat template refuses .* say whether to shout"):
        renderer(OPTION).prompt_ids(Prompt("p:7", messages=(user("x"),)))


def test_a_tokenizer_without_template_is_refused_with_the_way_out() -> None:
    with pytest.raises(ModelError, match="chat_template = false"):
        renderer(None)
    with pytest.raises(ModelError, match="system_prompt"):
        renderer(None, chat_template=False, system_prompt="x")


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=12)
TURNS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None)
@given(turns=TURNS, system=st.sampled_from([None, "Be brief."]), template=st.sampled_from([CHATML, PLAIN]))
def test_the_mask_covers_what_the_assistant_says_and_nothing_else(
    turns: list[tuple[str, str]], system: str | None, template: str
) -> None:
    rendering = renderer(template, system_prompt=system)
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    ids, mask = rendering.render_chat(messages)
    assert len(ids) == len(mask)
    assert TOKENIZER.decode(ids) == rendering.tokenizer.apply_chat_template(rendering._complete(messages), tokenize=False)
    spans: list[list[int]] = []
    for position, (token, is_trained) in enumerate(zip(ids, mask, strict=True)):
        if is_trained and (position == 0 or not mask[position - 1]):
            spans.append([])
        if is_trained:
            spans[-1].append(token)
    end = "<|im_end|>" if template is CHATML else "\n"
    assert [TOKENIZER.decode(span) for span in spans] == [answer + end for _, answer in turns]


@settings(max_examples=30, deadline=None)
@given(turns=TURNS)
def test_training_continues_exactly_what_an_engine_is_given(turns: list[tuple[str, str]]) -> None:
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    rendering = renderer()
    ids, mask = rendering.render_chat(messages)
    prompt = rendering.prompt_ids(Prompt("p", messages=tuple(messages[:1])))
    assert ids[: len(prompt)] == prompt
    assert mask[: len(prompt) + 1] == [0] * len(prompt) + [1]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    rendering = renderer(FORGETFUL)
    one_turn = [user("a"), assistant("hm</think>b")]
    assert TOKENIZER.decode(rendering.render_chat(one_turn)[0]).count("hm") == 1
    with pytest.raises(DataError, match="row:3: the chat template does not render message 2 as an extension"):
        rendering.render_chat([*one_turn, user("c"), assistant("hm</think>d")], "row:3")


def test_a_conversation_without_an_assistant_is_refused() -> None:
    with pytest.raises(DataError, match="no assistant message"):
        renderer().render_chat([user("a")])


def test_tokenizers_come_from_folders_only(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "nowhere")))
    with pytest.raises(ModelError, match="the folder has no tokenizer"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(ModelConfig(path=str(broken)))
    byte_tokenizer().save_pretrained(tmp_path / "good")
    assert load_tokenizer(ModelConfig(path=str(tmp_path), tokenizer_path=str(tmp_path / "good"))).eos_token_id == END


def test_half_a_surrogate_pair_is_refused_wherever_it_stands() -> None:
    for messages in ((assistant("\ud800"), user("x")), ({"role": "system", "content": "\udfff"}, user("x"))):
        with pytest.raises(DataError, match=r"p: half of a surrogate pair at character \d+, '.ud"):
            renderer().prompt_ids(Prompt("p", messages=messages))
    with pytest.raises(DataError, match="half of a surrogate pair"):
        renderer().whole_ids("x\ud800")
