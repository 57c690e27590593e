"""Rows with media: where the items go, which words are places, and where files may lie."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_media import encoded, picture

from relax.config.data import FileDataConfig
from relax.config.media import ImageConfig, MediaConfig, VideoConfig
from relax.data.media.rows import MediaRows
from relax.data.media.source import Finder, Spool, open_source
from relax.data.prompts import PromptSource, open_prompts
from relax.data.rows import BadRow, RowReader
from relax.errors import DataError
from relax.types import Prompt

PNG = encoded(picture())
IMAGE, AUDIO, VIDEO = ({"type": kind} for kind in ("image", "audio", "video"))


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name in ("a.png", "b.png", "c.wav", "d.mp4", "7.mp4"):
        (tmp_path / "data" / name).write_bytes(PNG + name.encode())
    (tmp_path / "secret.png").write_bytes(PNG)
    return tmp_path / "data"


def read(folder: Path, row: dict[str, Any], config: MediaConfig | None = None) -> Prompt:
    config = config or MediaConfig()
    media = MediaRows(config, Finder(config, str(folder), Spool()))
    return RowReader("prompt", "answer", True, media).read(row, "rows.jsonl:1")


def names(prompt: Prompt) -> list[str]:
    return [Path(item.source).name for item in prompt.media]


def open_rows(folder: Path, *rows: dict[str, Any], config: MediaConfig | None = None, **changes: Any) -> PromptSource:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = FileDataConfig(path=str(folder / "rows.jsonl"), media=config or MediaConfig(), **changes)
    return open_prompts(data, seed=0)


# -- places --------------------------------------------------------------------------------------------------------------------
def test_words_for_media_become_parts_in_their_order(folder: Path) -> None:
    row = {
        "prompt": "<image>Is it in <video> or <image>?<audio>",
        "images": ["a.png", "b.png"],
        "audios": "c.wav",
        "videos": ["d.mp4"],
        "answer": "no",
        "level": 3,
    }
    prompt = read(folder, row)
    content = [IMAGE, text("Is it in "), VIDEO, text(" or "), IMAGE, text("?"), AUDIO]
    assert prompt.messages == ({"role": "user", "content": content},)
    assert names(prompt) == ["a.png", "d.mp4", "b.png", "c.wav"]
    assert [item.kind for item in prompt.media] == ["image", "video", "image", "audio"]
    assert prompt.metadata == {"level": 3}
    assert prompt.answer == "no"


def test_media_without_a_place_come_first_in_the_users_first_message(folder: Path) -> None:
    row = {"prompt": "What <audio> is it?", "images": ["a.png", "b.png"], "audios": ["c.wav"]}
    prompt = read(folder, row)
    assert prompt.messages[0]["content"] == [IMAGE, IMAGE, text("What "), AUDIO, text(" is it?")]
    assert names(prompt) == ["a.png", "b.png", "c.wav"]
    chat = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Well?"}]
    prompt = read(folder, {"prompt": chat, "videos": "d.mp4"})
    assert prompt.messages == (chat[0], {"role": "user", "content": [VIDEO, text("Well?")]})


@given(
    words=st.lists(st.sampled_from(["<image>", "<audio>", "<video>", "<img>", "a ", "<", "image>"]), min_size=1, max_size=12)
)
def test_in_rows_without_media_such_words_are_text(words: list[str]) -> None:
    said = "x" + "".join(words)
    for row in ({"prompt": said}, {"prompt": said, "images": [], "audios": None, "videos": ""}):
        assert read(Path(), row) == Prompt("rows.jsonl:1", messages=({"role": "user", "content": said},))
    parts = {"prompt": [{"role": "user", "content": [{"type": "text", "text": said}]}]}
    assert read(Path(), parts).messages[0]["content"] == said


def test_words_for_media_that_the_row_does_not_have_stay_text(folder: Path) -> None:
    prompt = read(folder, {"prompt": "<image> or <video>?", "images": "a.png"})
    assert prompt.messages[0]["content"] == [IMAGE, text(" or <video>?")]


def test_what_assistants_and_systems_say_has_no_places(folder: Path) -> None:
    chat = [
        {"role": "system", "content": "<image> is a picture."},
        {"role": "user", "content": "<image>What?"},
        {"role": "assistant", "content": "An <image>."},
        {"role": "tool", "content": "seen: <image>"},
    ]
    prompt = read(folder, {"prompt": chat, "images": ["a.png", "b.png"]})
    assert [message["content"] for message in prompt.messages] == [
        chat[0]["content"], [IMAGE, text("What?")], chat[2]["content"], [text("seen: "), IMAGE]
    ]  # fmt: skip


def test_parts_are_places_and_then_all_texts_are_literal(folder: Path) -> None:
    content = [{"type": "image", "text": None}, {"type": "text", "text": "Why is <image> written here?"}]
    prompt = read(folder, {"prompt": [{"role": "user", "content": content}], "images": ["a.png"]})
    assert prompt.messages[0]["content"] == [IMAGE, text("Why is <image> written here?")]
    assert names(prompt) == ["a.png"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "b.png"},
        {"type": "image", "path": "b.png"},
        {"type": "image_url", "image_url": {"url": "b.png"}},
        {"type": "image", "image": {"bytes": None, "path": "b.png"}},
    ],
)
def test_parts_may_say_themselves_what_they_show(folder: Path, part: dict[str, Any]) -> None:
    chat = [{"role": "user", "content": [part, {"type": "image"}, {"type": "text", "text": "?"}]}]
    prompt = read(folder, {"prompt": chat, "images": ["a.png"]})
    assert names(prompt) == ["b.png", "a.png"]
    assert prompt.messages[0]["content"] == [IMAGE, IMAGE, text("?")]


def test_counts_that_differ_are_named_with_the_row(folder: Path) -> None:
    good = {"prompt": "<image>?", "images": ["a.png"]}
    for prompt, images, words in (
        ("<image>?", ["a.png", "b.png"], "1 places for image .*'images' has 2"),
        ("<image> <image>?", ["a.png"], "2 places for image .*'images' has 1"),
        ([{"role": "user", "content": [IMAGE, text("?")]}], [], "1 places for image .*'images' has 0"),
        ("<image>" * 33, ["a.png"] * 33, "33 media, and 32 are allowed"),
        (
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": [IMAGE]}],
            ["a.png"],
            "message 2 is the assistant's",
        ),
        ([{"role": "user", "content": [IMAGE, {"type": "smell"}]}], ["a.png"], "'smell'"),
        ([{"role": "system", "content": "?"}, {"role": "tool", "content": "x"}], ["a.png"], "0 places for image"),
    ):
        with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: .*{words}"):
            open_rows(folder, good, {"prompt": prompt, "images": images})
    skipping = open_rows(folder, good, {"prompt": "<image><image>", "images": ["a.png"]}, on_bad_row="skip")
    assert (len(skipping), skipping.num_skipped) == (1, 1)


# -- sources -------------------------------------------------------------------------------------------------------------------
def content_of(prompt: Prompt, spool: Spool, config: MediaConfig) -> list[bytes]:
    found = []
    for item in prompt.media:
        with open_source(item, config, spool.fd) as file:
            found.append(file.read())
    return found


def test_all_ways_to_give_bytes_give_the_same(folder: Path) -> None:
    coded = base64.b64encode(PNG).decode()
    config, spool = MediaConfig(), Spool()
    media = MediaRows(config, Finder(config, str(folder), spool))
    (folder / "same.png").write_bytes(PNG)
    given = [
        PNG, {"bytes": PNG, "path": "gone.png"}, {"bytes": None, "path": "same.png"}, f"data:image/png;base64,{coded}", coded,
        {"base64": coded}, "same.png", str(folder / "same.png"), {"url": f"data:image/png;base64,{coded}"},
    ]  # fmt: skip
    prompt = RowReader("prompt", None, True, media).read({"prompt": "?", "images": given}, "key")
    assert content_of(prompt, spool, config) == [PNG] * len(given)
    assert len({item.source for item in prompt.media}) == 2  # the file, and the bytes once
    part = {"type": "input_audio", "input_audio": {"data": coded, "format": "wav"}}
    prompt = RowReader("prompt", None, True, media).read({"prompt": [{"role": "user", "content": [part]}]}, "key")
    assert content_of(prompt, spool, config) == [PNG]


def test_files_outside_of_the_roots_are_refused_whatever_leads_there(folder: Path) -> None:
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "inside").symlink_to(folder)
    (folder.parent / "data-more").mkdir()
    (folder.parent / "data-more" / "e.png").write_bytes(PNG)
    for path in (
        "../secret.png",
        str(folder.parent / "secret.png"),
        "link.png",
        "inside/../secret.png",
        "../data-more/e.png",
    ):
        with pytest.raises(BadRow, match=r"lies outside of .*data \(media\.roots\)"):
            read(folder, {"prompt": "?", "images": path})
    assert names(read(folder, {"prompt": "?", "images": "inside/a.png"})) == ["a.png"]
    roots = MediaConfig(roots=[str(folder), str(folder.parent)])
    assert names(read(folder, {"prompt": "?", "images": ["a.png", "secret.png", "link.png"]}, roots)) == [
        "a.png", "secret.png", "secret.png"
    ]  # fmt: skip


def test_what_is_no_usable_source_is_named_with_its_item(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")
    (folder / "empty.png").touch()
    for raw, words in (
        ("gone.png", "there is no file 'gone.png' in .*data"),
        ("pipe.png", "is not a file"),
        ("inside", "there is no file"),
        (".", "is not a file"),
        ("empty.png", "it is empty"),
        ("a\0b", "there is no file"),
        ("x" * 5000, "there is no file"),
        ("https://example.org/a.png", "media.allow_http = false"),
        ("data:image/png,abc", "must be data:TYPE;base64"),
        ("data:image/png;base64,a*b=", "not base64"),
        (b"", "it is empty"),
        ({"array": [0.0]}, r"bytes, path, url or base64 is needed, and it has \['array'\]"),
        (3.5, "float '3.5'"),
        (None, "NoneType"),
        (True, "bool"),
        (bytes(1001), "1001 bytes, and 1000 are allowed"),
    ):
        config = MediaConfig(max_file_bytes=1000)
        with pytest.raises(BadRow, match=rf"^image, item 2 of 2: .*{words}"):
            read(folder, {"prompt": "<image><image>?", "images": ["a.png", raw]}, config)


def test_addresses_are_media_where_the_run_allows_them(folder: Path) -> None:
    prompt = read(folder, {"prompt": "?", "images": "https://example.org/a.png"}, MediaConfig(allow_http=True))
    assert prompt.media[0].source == "https://example.org/a.png"


def test_bare_names_become_paths(folder: Path) -> None:
    config = MediaConfig(videos="video", video=VideoConfig(file="{}.mp4"))
    assert names(read(folder, {"prompt": "?", "video": 7}, config)) == ["7.mp4"]
    assert names(read(folder, {"prompt": "?", "video": "d"}, config)) == ["d.mp4"]
    with pytest.raises(BadRow, match="outside"):
        read(folder, {"prompt": "?", "images": "/secret"}, MediaConfig(image=ImageConfig(file="../{}.png")))


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=90) | st.binary(max_size=20)
KEYS = st.sampled_from(["bytes", "path", "url", "type", "x"])
ANYTHING = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=6)
PARTS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]


@settings(max_examples=60, deadline=None)
@given(ANYTHING, st.sampled_from(["<image>?", "no place", PARTS]))
def test_whatever_a_column_holds_gives_media_inside_the_roots_or_a_bad_row(raw: Any, prompt: Any) -> None:
    try:
        found = read(Path(__file__).parent, {"prompt": prompt, "images": raw})
    except BadRow:
        return
    assert all(item.source.startswith(("spool:", str(Path(__file__).parent))) for item in found.media)


# -- files of rows -------------------------------------------------------------------------------------------------------------
def test_images_inside_parquet_files_are_kept_out_of_memory_and_metadata(folder: Path) -> None:
    rows = [{"question": f"<image>{n}?", "image": {"bytes": PNG + bytes([n]), "path": None}, "raw": b"\xff"} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    data = FileDataConfig(
        path=str(folder / "rows.parquet"), prompt_key="question", shuffle=False, media=MediaConfig(images="image")
    )
    source = open_prompts(data, seed=0)
    assert source.spool is not None
    for number in range(3):
        prompt = source.row(number)
        assert content_of(prompt, source.spool, MediaConfig()) == [PNG + bytes([number])]
        assert prompt.metadata == {"raw": "/w=="}
        assert prompt.messages[0]["content"] == [IMAGE, text(f"{number}?")]


def test_media_columns_that_no_row_has_are_a_mistake(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no row has media in 'images', 'audios', 'videos' or in its messages; .*'image'"):
        open_rows(folder, {"prompt": "<image>?", "image": "a.png"})


def test_media_need_a_chat_template(folder: Path) -> None:
    with pytest.raises(DataError, match=r"it has media, which need data\.chat_template = true"):
        open_rows(folder, {"prompt": "<image>?", "images": "a.png"}, chat_template=False)


def test_llava_rows_are_read_by_their_layout(folder: Path) -> None:
    row = {
        "id": 1,
        "image": "a.png",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat is it?"},
            {"from": "gpt", "value": "A cat."},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "Yes."},
        ],
    }
    config = MediaConfig(images="image")
    prompt = open_rows(folder, row, config=config, layout="conversations", prompt_key="conversations").row(0)
    assert prompt.messages == (
        {"role": "user", "content": [IMAGE, text("\nWhat is it?")]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    )
    assert prompt.answer == "Yes."


def test_next_qa_rows_are_read_by_their_layout(folder: Path) -> None:
    row = {"video": 7, "question": "why did he run", "answer": 2} | {f"a{n}": f"choice {n}" for n in range(5)}
    config = MediaConfig(videos="video", video=VideoConfig(file="{}.mp4"))
    choices = [f"a{n}" for n in range(5)]
    prompt = open_rows(folder, row, config=config, layout="choices", prompt_key="question", choices=choices).row(0)
    listed = "why did he run\nA. choice 0\nB. choice 1\nC. choice 2\nD. choice 3\nE. choice 4"
    assert prompt.messages[0]["content"] == [VIDEO, text(listed)]
    assert prompt.answer == "C"
    assert names(prompt) == ["7.mp4"]


def test_a_part_of_no_kind_is_a_bad_row(folder: Path) -> None:
    for kind in (["image"], {"a": 1}, None, 3):
        with pytest.raises(BadRow, match="only text can be rendered"):
            read(folder, {"prompt": [{"role": "user", "content": [{"type": kind, "path": "a.png"}]}]})
