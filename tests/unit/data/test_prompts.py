"""Prompt sources: every row once an epoch, in an order that only seed and issue fix; bad rows are named or counted."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.config.data import FileDataConfig, GeneratorDataConfig, ReasoningGymDataConfig
from relax.data.arithmetic import addition, solution
from relax.data.dotted import load_object
from relax.data.prompts import PromptSource, check_lengths, open_prompts
from relax.data.render import Renderer
from relax.errors import ConfigError, DataError

GOOD = '{"prompt": "1+1=?", "answer": 2, "level": 3}'


def write(tmp_path: Path, *lines: str | bytes, name: str = "train.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def open_file(path: Path, seed: int = 0, **changes: Any) -> PromptSource:
    return open_prompts(FileDataConfig(path=str(path), **changes), seed=seed)


def numbers(size: int, seed: int, **changes: Any) -> PromptSource:
    return open_prompts(GeneratorDataConfig(path="relax.data.arithmetic:addition", size=size, **changes), seed=seed)


# -- order ---------------------------------------------------------------------------------------------------------------------
@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 60), seed=st.integers(-5, 2**40), epoch=st.integers(0, 1000))
def test_every_epoch_gives_every_row_once(size: int, seed: int, epoch: int) -> None:
    source = numbers(size, seed)
    keys = [source.prompt(epoch * size + place).key for place in range(size)]
    assert sorted(keys) == sorted(source.row(index).key for index in range(size))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100), issues=st.lists(st.integers(0, 500), min_size=1, max_size=20))
def test_a_prompt_depends_on_its_issue_only_and_not_on_what_was_asked_before(seed: int, issues: list[int]) -> None:
    source = numbers(37, seed)
    assert [source.prompt(issue) for issue in issues] == [numbers(37, seed).prompt(issue) for issue in issues]


def test_the_order_is_another_one_each_epoch_and_for_each_seed_and_never_changes_between_releases() -> None:
    orders = [[source.prompt(e * 50 + i).key for i in range(50)] for source in (numbers(50, 0), numbers(50, 1)) for e in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert [int(key.rsplit(":", 1)[1]) for key in orders[0][:6]] == PINNED
    unshuffled = numbers(50, 0, shuffle=False)
    assert [unshuffled.prompt(50 + i) for i in range(50)] == [unshuffled.row(i) for i in range(50)]


PINNED = [11, 3, 20, 13, 2, 48]  # of seed 0: a run that is resumed with another release goes on with the same rows


# -- files ---------------------------------------------------------------------------------------------------------------------
def test_rows_keep_their_columns_and_are_named_by_file_and_line(tmp_path: Path) -> None:
    chat = json.dumps({"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]})
    source = open_file(write(tmp_path, b"\xef\xbb\xbf" + GOOD.encode(), "", chat, "", "  ", ""), shuffle=False)
    assert (len(source), source.num_skipped) == (2, 0)
    first, second = source.row(0), source.row(1)
    assert (first.key, first.answer, first.metadata) == ("train.jsonl:1", 2, {"level": 3})
    assert first.messages == ({"role": "user", "content": "1+1=?"},)
    assert (second.key, second.answer, len(second.messages)) == ("train.jsonl:3", None, 2)
    plain = open_file(tmp_path / "train.jsonl", chat_template=False, on_bad_row="skip")
    assert (plain.row(0).text, plain.row(0).messages, plain.num_skipped) == ("1+1=?", (), 1)


BAD_ROWS = [
    ("{", "line 2: not JSON"),
    ("[" * 100_000, "line 2: not JSON"),
    ("3", "line 2: a row must be an object with named columns, and is int"),
    (b'{"prompt": "caf\xe9"}', "line 2: not UTF-8: byte 0xe9"),
    ('{"promt": "x"}', "line 2: there is no column 'prompt' (data.prompt_key); it has 'promt'; did you mean 'promt'?"),
    ('{"prompt": 5}', "must be a text or a list of chat messages, and is int"),
    ('{"prompt": null}', "and is null"),
    ('{"prompt": "  "}', "'prompt' is empty"),
    ('{"prompt": []}', "an empty list"),
    ('{"prompt": "\\ud800"}', "half a surrogate pair"),
    ('{"prompt": ["x"]}', "message 1 must be an object with role and content"),
    (
        '{"prompt": [{"role": "usr", "content": "x"}]}',
        "has the role 'usr': allowed are system, user, assistant, tool; did you mean",
    ),
    ('{"prompt": [{"role": "human", "content": "x"}]}', "did you mean 'user'?"),
    ('{"prompt": [{"content": "x"}]}', "has the role None"),
    ('{"prompt": [{"from": ["human"], "value": "x"}]}', "has the role ['human']"),
    ('{"prompt": [{"role": "user", "content": 5}]}', "message 1 must have a text as content"),
    ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "only text can be rendered"),
    ('{"prompt": [{"role": "assistant", "content": "x"}]}', "the last message is the assistant's"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_a_malformed_row_is_named_or_counted(tmp_path: Path, row: str | bytes, words: str) -> None:
    path = write(tmp_path, GOOD, row, GOOD)
    with pytest.raises(DataError) as caught:
        open_file(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert words in str(caught.value)
    assert "data.on_bad_row" in str(caught.value)
    skipping = open_file(path, on_bad_row="skip")
    assert (len(skipping), skipping.num_skipped) == (2, 1)
    only_bad = write(tmp_path, row, name="bad.jsonl")
    with pytest.raises(DataError, match="all 1 rows are bad; the first one"):
        open_file(only_bad, on_bad_row="skip")


def test_a_file_that_is_one_json_list_has_its_items_as_rows(tmp_path: Path) -> None:
    source = open_file(
        write(tmp_path, b"\xef\xbb\xbf[" + GOOD.encode() + b",", '{"prompt": "?"}', "]", name="llava.json"), shuffle=False
    )
    assert [source.row(number).key for number in range(2)] == ["llava.json:0", "llava.json:1"]
    assert [dict(message) for message in source.row(1).messages] == [{"role": "user", "content": "?"}]
    with pytest.raises(DataError, match=r"llava\.json, row 1: a row must be an object"):
        open_file(write(tmp_path, "[" + GOOD + ", 7]", name="llava.json"))


def test_what_is_not_there_or_empty_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").write_text("")
    write(tmp_path, GOOD, name="a.jsonl")
    with pytest.raises(DataError, match=r"no such file or folder; .* has train\.jsonl, a\.jsonl$"):
        open_file(tmp_path / "tran.jsonl")
    with pytest.raises(DataError, match="there are no rows"):
        open_file(write(tmp_path, "", "", name="empty.jsonl"))
    with pytest.raises(DataError, match="unknown kind of file"):
        open_file(write(tmp_path, GOOD, name="train.csv"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"the folder has no \.jsonl"):
        open_file(tmp_path / "folder")
    with pytest.raises(
        DataError, match=r"no row of .* has this column; it has 'prompt', 'answer', 'level'; did you mean 'answer'"
    ):
        open_file(path, answer_key="anwser")
    with pytest.raises(DataError, match="one a line is needed"):
        open_file(write(tmp_path, "{", '"rows": [', GOOD, "]}", name="object.json"))
    with pytest.raises(DataError, match=r"begins as a JSON list, and cannot be read as one: .* line 3"):
        open_file(write(tmp_path, "[", GOOD, GOOD, "]", name="list.json"))
    with pytest.raises(DataError, match="not a readable parquet file"):
        open_file(write(tmp_path, "no", name="x.parquet"))


def test_parquet_rows_are_named_by_row_and_hold_what_json_knows(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}, {"prompt": None, "answer": "2"}]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows).append_column("raw", pa.array([b"xy", None])), path)
    with pytest.raises(DataError, match=r"train\.parquet, row 1: 'prompt' must be a text"):
        open_file(path)
    source = open_file(path, on_bad_row="skip")
    assert source.row(0).key == "train.parquet:0"
    assert json.loads(json.dumps(source.row(0).metadata)) == source.row(0).metadata
    pq.write_table(pa.table({"question": ["x"]}), path)
    with pytest.raises(DataError, match="there is no column 'prompt'"):
        open_file(path)


def test_a_folder_of_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path, '{"prompt": "b"}', name="b.jsonl")
    pq.write_table(pa.table({"prompt": ["a1", "a2"]}), tmp_path / "a.parquet")
    source = open_file(tmp_path, shuffle=False)
    assert [source.row(i).key for i in range(len(source))] == ["a.parquet:0", "a.parquet:1", "b.jsonl:1"]


def test_folders_saved_by_datasets_are_read(tmp_path: Path) -> None:
    import datasets  # here: takes a second

    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_list([{"prompt": f"{i}+1=?", "answer": str(i + 1)} for i in range(10)])
    whole.filter(lambda row: row["answer"] != "3").save_to_disk(tmp_path / "saved", num_shards=2)
    source = open_file(tmp_path / "saved", shuffle=False)
    assert [source.row(i).answer for i in range(len(source))] == ["1", "2", "4", "5", "6", "7", "8", "9", "10"]
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(tmp_path / "dict")
    with pytest.raises(DataError, match="name one of them: test, train"):
        open_file(tmp_path / "dict")
    assert len(open_file(tmp_path / "dict" / "test")) == 10
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match="and missing"):
        open_file(tmp_path / "saved")


# -- made rows -----------------------------------------------------------------------------------------------------------------
def test_reasoning_gym_rows_can_be_scored_and_are_plain(tmp_path: Path) -> None:
    data = ReasoningGymDataConfig(task="chain_sum", size=5, options={"min_terms": 2, "max_terms": 2})
    source = open_prompts(data, seed=0)
    row = source.row(3)
    assert row.key == "chain_sum:0:3"
    assert json.loads(json.dumps(row.metadata)) == row.metadata
    assert row.metadata["entry"]["answer"] == row.answer
    # reasoning-gym makes row i from seed + i: neighbouring seeds must not be the same rows, moved by one.
    many = data.model_copy(update={"size": 40, "options": {"min_digits": 4, "max_digits": 4}})
    asked = [
        {str(open_prompts(many.model_copy(update={"seed": s}), seed=0).row(i).messages) for i in range(40)} for s in (0, 1, -1)
    ]
    assert len(set.union(*asked)) == 120


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "chain_sun"}, "did you mean chain_sum"),
        ({"task": "arithmetic"}, "basic_arithmetic"),
        ({"task": "zzzzz"}, "there are ab, acre"),
        ({"task": "game_of_life_halting"}, "gives 1.0 to any text"),
        ({"task": "chain_sum", "options": {"min_term": 2}}, "did you mean min_terms?"),
        ({"task": "chain_sum", "options": {"min_terms": -2}}, "chain_sum refuses them"),
    ],
)
def test_a_wrong_reasoning_gym_task_or_option_gives_the_right_one(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_prompts(ReasoningGymDataConfig(**changes), seed=0)
    assert words in str(caught.value)


def odd_rows(index: int, seed: int, *, good: int = 2) -> Any:
    if index % 3 == 1:
        raise ValueError("oh no")
    return {"prompt": "x" * (index + 1)} if index % 3 == 0 and index < 3 * good else {"prompt": 5}


def test_made_rows_are_checked_when_asked_for_and_a_bad_ones_place_is_taken_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relax.data.arithmetic.odd_rows", odd_rows, raising=False)
    config = GeneratorDataConfig(path="relax.data.arithmetic:odd_rows", size=12, shuffle=False)
    strict = open_prompts(config, seed=0)
    with pytest.raises(DataError, match=r"odd_rows', row 1: the function raised ValueError: oh no"):
        strict.row(1)
    lenient = open_prompts(config.model_copy(update={"on_bad_row": "skip"}), seed=0)
    assert [lenient.row(i).key[-1] for i in (0, 1, 2, 3, 4)] == ["0", "3", "3", "3", "0"]
    assert lenient.num_skipped == 10
    with pytest.raises(DataError, match="all 12 rows are bad"):
        open_prompts(config.model_copy(update={"on_bad_row": "skip", "options": {"good": 0}}), seed=0)
    with pytest.raises(ConfigError, match="does not fit"):
        open_prompts(config.model_copy(update={"options": {"bad": 0}}), seed=0)


# -- length --------------------------------------------------------------------------------------------------------------------
def test_a_prompt_that_is_too_long_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, *(json.dumps({"prompt": "x" * n}) for n in (5, 50, 6)))
    config = FileDataConfig(path=str(path), chat_template=False, shuffle=False)
    renderer = Renderer(byte_tokenizer(), config)
    assert len(check_lengths(open_file(path, chat_template=False), renderer, 50)) == 3
    with pytest.raises(DataError, match=r"train\.jsonl:2: the prompt has 50 tokens, and 49 are allowed"):
        check_lengths(open_file(path, chat_template=False), renderer, 49)
    kept = check_lengths(open_file(path, chat_template=False, on_bad_row="skip", shuffle=False), renderer, 49)
    assert (len(kept), kept.num_skipped, kept.prompt(1).text, kept.prompt(2).text) == (2, 1, "x" * 6, "x" * 5)
    with pytest.raises(DataError, match="no row is left"):
        check_lengths(open_file(path, chat_template=False, on_bad_row="skip"), renderer, 4)
    with pytest.raises(ConfigError, match="no room for a prompt"):
        check_lengths(open_file(path, chat_template=False), renderer, 0)
    monkeypatch.setattr("relax.data.arithmetic.odd_rows", odd_rows, raising=False)
    made = GeneratorDataConfig(path="relax.data.arithmetic:odd_rows", size=12, chat_template=False, on_bad_row="skip")
    lazily = check_lengths(open_prompts(made, seed=0), renderer, 2)
    assert {str(lazily.prompt(i).text) for i in range(12)} == {"x"}


# -- arithmetic, dotted paths --------------------------------------------------------------------------------------------------
@given(index=st.integers(0, 10**6), seed=st.integers(0, 10), low=st.integers(1, 5), more=st.integers(0, 3))
def test_addition_is_right_deterministic_and_of_the_asked_size(index: int, seed: int, low: int, more: int) -> None:
    row = addition(index, seed, min_digits=low, max_digits=low + more)
    assert row == addition(index, seed, min_digits=low, max_digits=low + more)
    left, right = (int(text) for text in row["prompt"].removesuffix("=?").split("+"))
    assert row["answer"] == str(left + right)
    assert low <= max(len(str(left)), len(str(right))) <= low + more
    columns, _, total = row["solution"].rpartition("=")
    assert total == row["answer"]
    carry = 0
    for place, column in enumerate(columns.split(";")):
        digits = left // 10**place % 10 + right // 10**place % 10 + carry
        carry = digits // 10
        assert column == f"{digits % 10}{carry}"


def test_addition_pads_and_refuses_an_empty_range() -> None:
    assert len(addition(0, 0, width=5, suffix="=")["prompt"]) == 12
    assert solution(437, 85) == "21;21;50=522"
    with pytest.raises(ValueError, match="min_digits"):
        addition(0, 0, min_digits=3, max_digits=2)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("relax.data.arithmetic", "did you mean 'relax.data:arithmetic'?"),
        ("my/rewards.py:score", "did you mean my.rewards:score?"),
        ("", "write it as package.module:function"),
        ("nothing.at.all:f", "there is no module 'nothing' in"),
        ("relax.data.arithmetic:additon", "did you mean addition"),
        ("relax.data.arithmetic:zzz", "it has Any, addition"),
        ("needs_what_is_missing:f", "needs a module that is missing: No module named 'not_there'"),
        ("fails:f", "importing fails failed: RuntimeError: on purpose"),
    ],
)
def test_a_wrong_dotted_path_says_what_would_be_right(
    path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_what_is_missing.py").write_text("import not_there\n")
    (tmp_path / "fails.py").write_text("raise RuntimeError('on purpose')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    with pytest.raises(ConfigError) as caught:
        load_object(path, "reward.path")
    assert f"reward.path = {path!r}: " in str(caught.value)
    assert words in str(caught.value)


def test_modules_of_the_working_directory_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "just_written.py").write_text("class A:\n    value = 5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    assert load_object("just_written:A.value", "data.path") == 5
