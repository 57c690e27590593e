import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.errors import DataError
from relax.observe.jsonl import JsonLines, finite, read_rows, write_atomically


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
@settings(max_examples=30)
def test_any_value_becomes_json_that_every_reader_takes(value):
    json.loads(json.dumps(finite(value), allow_nan=False), parse_constant=lambda name: pytest.fail(name))


def test_numbers_that_are_not_finite_become_null_and_numpy_becomes_plain():
    value = {"a": float("nan"), "b": [np.float32(1.5), np.int64(2)], "c": np.array([1.0, np.inf]), "d": True}
    assert finite(value) == {"a": None, "b": [1.5, 2], "c": [1.0, None], "d": True}


@given(st.integers(0, 40))
def test_a_file_cut_off_anywhere_reads_as_its_complete_lines(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("torn") / "rows.jsonl"
    content = b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'[:cut]
    path.write_bytes(content)
    complete = content.count(b"\n")
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3][:complete]
    file = JsonLines(path)
    file.append({"step": 9})
    file.close()
    assert [row["step"] for row in read_rows(path)] == [*[1, 2, 3][:complete], 9]


def test_a_broken_line_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not a JSON object"):
        read_rows(path)
    path.write_text("[1]\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: not a JSON object but list"):
        read_rows(path)


def test_a_full_disk_leaves_complete_lines_and_writing_goes_on_when_there_is_room(tmp_path, monkeypatch):
    file = JsonLines(tmp_path / "rows.jsonl")
    file.append({"step": 1})
    real = os.write

    def write_half(fd, data):
        if len(data) < 8:
            raise OSError(28, "No space left on device")
        return real(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", write_half)
    with pytest.raises(OSError, match="No space"):
        file.append({"step": 2})
    monkeypatch.undo()
    file.append({"step": 3})
    file.close()
    assert read_rows(tmp_path / "rows.jsonl") == [{"step": 1}, {"step": 3}]


def test_an_atomic_write_replaces_and_leaves_no_temporary_file(tmp_path):
    write_atomically(tmp_path / "a.json", b"1")
    write_atomically(tmp_path / "a.json", b"2")
    assert (tmp_path / "a.json").read_bytes() == b"2"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
