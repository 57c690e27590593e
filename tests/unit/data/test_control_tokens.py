"""What rows say stays text, and what they say without control tokens is tokenized as transformers does it."""

from collections.abc import Callable
from typing import Any

import pytest
from byte_tokenizer import CHATML, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from relax.config.data import DataSection
from relax.data.render import Renderer
from relax.errors import DataError
from relax.types import Prompt

CONTROL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
# Marks that are no special tokens, as some distilled models have them, and words of a template beside them.
MARKED = (
    "{% for m in messages %}{{ '<|im_end|>' }}{% if m['role'] == 'user' %}{{ '<User>' }}{% else %}{{ '<Bot>' }}{% endif %}"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '<Bot><think>\\n' }}{% endif %}"
)
TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}"
    "{% else %}{{ m['content'] | trim }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
)

PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'image' %}{{ '<|pad|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
)


def with_words(template: str = MARKED) -> Any:
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens([AddedToken(word, special=False) for word in ("<User>", "<Bot>", "<think>", "\n", "user")])
    return tokenizer


def stripping(template: str = CHATML) -> Any:
    """Control tokens that swallow the space beside them."""
    tokenizer = byte_tokenizer(template)
    core = tokenizer.backend_tokenizer
    core.add_special_tokens([AddedToken("<|im_start|>", special=True, lstrip=True, rstrip=True)])
    return tokenizer


def prefixing(template: str = CHATML) -> Any:
    """A tokenizer that marks the beginning of each text, wherever control tokens lie."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "<unk>": 257}
    core = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.ByteFallback()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def spelled(tokenizer: Any, ids: list[int], *tokens: str) -> list[int]:
    """How often each of the tokens is among the ids."""
    return [ids.count(tokenizer.convert_tokens_to_ids(token)) for token in tokens]


PIECES = st.sampled_from([*CONTROL, "<|im_", "end|>", "<|", "|>", " ", "\n", "a", "ä", "\ue000", "<think>", "🙂"])
SAID = st.lists(st.one_of(PIECES, st.text(max_size=4)), max_size=6).map("".join)
MAKERS: list[Callable[[], Any]] = [byte_tokenizer, stripping, with_words]
TOKENIZERS = {make.__name__: make() for make in MAKERS}


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(SAID, min_size=1, max_size=3), name=st.sampled_from(["byte_tokenizer", "stripping"]))
def test_what_is_said_makes_no_control_token(texts: list[str], name: str) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = Prompt("p", messages=tuple(user(text) for text in texts))
    ids = Renderer(tokenizer, DataSection()).prompt_ids(prompt)
    assert spelled(tokenizer, ids, *CONTROL) == [len(texts) + 1, len(texts), 0]
    if name == "byte_tokenizer":  # every byte is there, and none twice
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
            prompt.messages, tokenize=False, add_generation_prompt=True
        )


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(SAID, min_size=1, max_size=3), name=st.sampled_from(sorted(TOKENIZERS)))
def test_other_texts_have_the_ids_of_transformers(texts: list[str], name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for control in (*CONTROL, "<User>", "<Bot>"):
        texts = [text.replace(control, "") for text in texts]
    if any(control in text for text in texts for control in (*CONTROL, "<User>", "<Bot>")):
        return  # what was left has come together
    messages = tuple(user(text) for text in texts)
    own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Renderer(tokenizer, DataSection()).prompt_ids(Prompt("p", messages=messages)) == own


def test_a_spelled_token_has_the_ids_of_a_text_and_those_beside_it_stay() -> None:
    tokenizer = byte_tokenizer()
    ids = Renderer(tokenizer, DataSection()).prompt_ids(Prompt("p", messages=(user("a <|im_end|> b"),)))
    text = tokenizer("a <|im_end|> b", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    plain = tokenizer.apply_chat_template([user("")], add_generation_prompt=True, return_dict=False)
    at = plain.index(tokenizer.eos_token_id)
    assert ids == [*plain[:at], *text, *plain[at:]]


def test_marks_of_turns_are_control_tokens_and_other_added_words_are_not() -> None:
    tokenizer = with_words()
    messages = (user("<User> said <think> to <Bot>\n"), assistant("<think>hm<Bot>"), user("?"))
    ids = Renderer(tokenizer, DataSection()).prompt_ids(Prompt("p", messages=messages))
    assert spelled(tokenizer, ids, "<User>", "<Bot>", "<think>", "<|im_end|>") == [2, 2, 3, 3]
    assert spelled(tokenizer, ids, "\n", "user") == [2, 0]


def test_every_text_of_a_message_is_read_as_text() -> None:
    tokenizer = byte_tokenizer(TOOLS)
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": ["<|im_start|>"]}}}
    messages = (
        user("<|im_end|>"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "<|pad|>"},
    )
    ids = Renderer(tokenizer, DataSection()).whole_ids(messages)
    assert spelled(tokenizer, ids, *CONTROL) == [3, 3, 0]
    assert '{"<|im_end|>": ["<|im_start|>"]}' in tokenizer.decode(ids)


def test_an_answer_that_spells_the_end_of_a_turn_is_learned_whole() -> None:
    tokenizer = byte_tokenizer()
    ids, mask = Renderer(tokenizer, DataSection()).render_chat([user("How does it end?"), assistant("With <|im_end|>.")])
    learned = [token for token, is_learned in zip(ids, mask, strict=True) if is_learned]
    assert tokenizer.decode(learned) == "With <|im_end|>.<|im_end|>"
    assert learned.count(tokenizer.eos_token_id) == 1


def test_parts_that_come_together_make_none() -> None:
    tokenizer = byte_tokenizer(PARTS)
    texts = [{"type": "text", "text": text} for text in ("<|im_", "end|> <|p", "ad|>")]
    content = [*texts, {"type": "image"}, *texts]
    ids = Renderer(tokenizer, DataSection()).prompt_ids(Prompt("p", messages=({"role": "user", "content": content},)))
    assert spelled(tokenizer, ids, *CONTROL) == [0, 1, 1]
    assert tokenizer.decode(ids) == "<|im_end|> <|pad|>" + "<|pad|>" + "<|im_end|> <|pad|>" + "<|im_end|>"


def test_whole_texts_are_their_writers_own() -> None:
    """Without a chat template, control tokens are how a row says where turns begin."""
    tokenizer = byte_tokenizer(None)
    text = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    ids = Renderer(tokenizer, DataSection(chat_template=False)).prompt_ids(Prompt("p", text=text))
    assert spelled(tokenizer, ids, *CONTROL) == [2, 1, 0]


def test_a_text_in_the_midst_is_none_at_the_beginning() -> None:
    """To a tokenizer that marks where a text begins."""
    tokenizer = prefixing("{% for m in messages %}{{ '<|im_start|>' + m['content'] }}{% endfor %}")
    renderer = Renderer(tokenizer, DataSection())
    ids = renderer.whole_ids([user("not <|im_end|> plain"), user("plain")])
    start, mark = tokenizer.convert_tokens_to_ids(["<|im_start|>", "▁"])
    assert [place for place, token in enumerate(ids) if token == start] == [0, 21]
    assert ids[1:21] == [mark if byte == b" " else byte[0] for byte in (b"%c" % code for code in b"not <|im_end|> plain")]
    own = tokenizer.apply_chat_template([user("plain"), user("text")], return_dict=False)
    assert renderer.whole_ids([user("plain"), user("text")]) == own


def test_a_token_for_the_unknown_is_one_of_control_where_nothing_is_unknown() -> None:
    """As tokenizers of bytes have it, which call the end of a document so."""
    tokenizer = byte_tokenizer()
    tokenizer.unk_token = "<|pad|>"
    ids = Renderer(tokenizer, DataSection()).whole_ids([user("<|pad|>")])
    assert spelled(tokenizer, ids, *CONTROL) == [1, 1, 0]


def test_what_a_tokenizer_cannot_read_as_text_is_refused() -> None:
    """One whose vocabulary itself has the control token as a word."""
    core = Tokenizer(models.WordLevel({"<|im_end|>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    assert Renderer(tokenizer, DataSection()).whole_ids([user("a a")]) == [1, 1, 0]
    with pytest.raises(DataError, match=r"row:1: its messages spell out '<\|im_end\|>', which this tokenizer cannot read"):
        Renderer(tokenizer, DataSection()).whole_ids([user("a <|im_end|> a")], "row:1")
