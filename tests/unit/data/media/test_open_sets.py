"""Rows as open data sets have them are read by the names of their columns, and scored: VQA, LLaVA, audio-QA, NExT-QA."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_media import encoded, picture, sound, tone
from pydantic import ValidationError

from relax.config.data import FileDataConfig
from relax.config.media import ImageConfig, MediaConfig, VideoConfig
from relax.config.media_reward import OcrRewardConfig, VqaRewardConfig
from relax.config.reward import ExactRewardConfig, MultipleChoiceRewardConfig, RewardConfig
from relax.data.prompts import open_prompts
from relax.rewards.row_check import fault_of
from relax.rewards.table import make_scorer
from relax.types import Prompt

PNG = encoded(picture())
IMAGE, AUDIO, VIDEO = ({"type": kind} for kind in ("image", "audio", "video"))


def first(folder: Path, row: dict[str, Any], files: dict[str, bytes], **settings: Any) -> Prompt:
    """The prompt of a file with this row, jsonl, or parquet where it holds bytes, beside `files`."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    if any(isinstance(value, dict) for value in row.values()):
        path = folder / "rows.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path = folder / "rows.jsonl"
        path.write_text(json.dumps(row))
    return open_prompts(FileDataConfig(path=str(path), **settings), seed=0).row(0)


def reward(config: RewardConfig, response: str, prompt: Prompt) -> float:
    assert fault_of(config, prompt) is None
    raw = make_scorer(config).call("prompt", response, prompt.answer, dict(prompt.metadata))
    return float(raw["reward"] if isinstance(raw, dict) else raw)


def said(prompt: Prompt) -> list[dict[str, Any]]:
    return list(prompt.messages[-1]["content"])


# -- VQA -----------------------------------------------------------------------------------------------------------------------
ANNOTATORS = ["net"] * 7 + ["netting", "a net", "mesh"]
VQA_V2 = {
    "question_type": "what is this",
    "multiple_choice_answer": "net",
    "answers": [{"answer": text, "answer_confidence": "yes", "answer_id": number} for number, text in enumerate(ANNOTATORS, 1)],
    "image_id": 458752,
    "answer_type": "other",
    "question_id": 458752000,
    "question": "What is this photo taken looking through?",
}


def check_vqa(prompt: Prompt) -> None:
    assert said(prompt) == [IMAGE, {"type": "text", "text": VQA_V2["question"]}]
    assert prompt.metadata["question_type"] == "what is this"
    assert reward(VqaRewardConfig(), "A net.", prompt) == 1.0
    assert reward(VqaRewardConfig(), "mesh", prompt) == pytest.approx(0.3)
    assert reward(VqaRewardConfig(), "glass", prompt) == 0.0


def test_vqa_v2_with_the_numbers_of_coco_pictures(tmp_path: Path) -> None:
    media = MediaConfig(images="image_id", image=ImageConfig(file="val2014/COCO_val2014_{:012}.jpg"))
    files = {"val2014/COCO_val2014_000000458752.jpg": PNG}
    prompt = first(tmp_path, VQA_V2, files, media=media, prompt_key="question", answer_key="answers")
    check_vqa(prompt)
    assert Path(prompt.media[0].source).name == "COCO_val2014_000000458752.jpg"


def test_vqa_v2_with_pictures_inside_parquet(tmp_path: Path) -> None:
    row = VQA_V2 | {"image": {"bytes": PNG, "path": None}}
    check_vqa(first(tmp_path, row, {}, media=MediaConfig(images="image"), prompt_key="question", answer_key="answers"))


def test_vqa_with_one_answer_and_with_a_list_of_right_ones(tmp_path: Path) -> None:
    columns = {"media": MediaConfig(images="image"), "prompt_key": "question"}
    prompt = first(tmp_path, {"image": "1.png", "question": "<image>\nWhich?", "answer": "red"}, {"1.png": PNG}, **columns)
    assert said(prompt) == [IMAGE, {"type": "text", "text": "\nWhich?"}]
    assert reward(ExactRewardConfig(), "red", prompt) == 1.0
    row = {"questionId": 337, "question": "what is the date mentioned?", "image": "1.png", "answers": ["1/8/93", "8 Jan 93"]}
    prompt = first(tmp_path, row, {}, **columns, answer_key="answers")
    assert reward(OcrRewardConfig(), "8 jan 93", prompt) == 1.0
    assert reward(OcrRewardConfig(), "1994", prompt) == 0.0


@pytest.mark.parametrize("file", ["{}-{}.jpg", "{:012}{}", "no place", "{:12}.jpg", "{x}.jpg"])
def test_a_files_pattern_has_one_place(file: str) -> None:
    with pytest.raises(ValidationError, match=r"must hold \{\} once"):
        ImageConfig(file=file)


# -- LLaVA ---------------------------------------------------------------------------------------------------------------------
def test_llava_conversations_whose_image_comes_last(tmp_path: Path) -> None:
    row = {
        "id": "000000033471",
        "image": "coco/train2017/000000033471.jpg",
        "conversations": [
            {"from": "human", "value": "What are the colors of the bus?\n<image>"},
            {"from": "gpt", "value": "White and red."},
        ],
    }
    media = MediaConfig(images="image")
    prompt = first(tmp_path, row, {row["image"]: PNG}, media=media, layout="conversations", prompt_key="conversations")
    assert said(prompt) == [{"type": "text", "text": "What are the colors of the bus?\n"}, IMAGE]
    assert prompt.answer == "White and red."
    assert prompt.metadata == {"id": "000000033471"}


# -- audio-QA ------------------------------------------------------------------------------------------------------------------
def test_audio_questions_with_choices_and_the_text_of_the_right_one(tmp_path: Path) -> None:
    row = {
        "id": "3fe64f3d",
        "audio_id": "./audios/3fe64f3d.wav",
        "question": "What was heard last?",
        "choices": ["a dog", "a whistle", "rain", "a car"],
        "answer": "a whistle",
        "task": "sound",
    }
    files = {"audios/3fe64f3d.wav": sound(tone(0.05, 16_000), 16_000)}
    prompt = first(tmp_path, row, files, media=MediaConfig(audios="audio_id"), layout="choices", prompt_key="question")
    assert said(prompt) == [
        AUDIO,
        {"type": "text", "text": "What was heard last?\nA. a dog\nB. a whistle\nC. rain\nD. a car"},
    ]
    assert prompt.answer == "B"
    for response, expected in (("B", 1.0), ("a whistle", 1.0), ("Answer: C", 0.0)):
        assert reward(MultipleChoiceRewardConfig(), response, prompt) == expected


def test_audio_questions_with_clips_inside_parquet(tmp_path: Path) -> None:
    clip = sound(tone(0.05, 16_000), 16_000)
    row = {"audio": {"bytes": clip, "path": "x.wav"}, "question": "Is it raining?", "answer": "yes"}
    prompt = first(tmp_path, row, {}, media=MediaConfig(audios="audio"), prompt_key="question")
    assert said(prompt) == [AUDIO, {"type": "text", "text": "Is it raining?"}]
    assert (prompt.media[0].kind, prompt.media[0].metadata["name"]) == ("audio", "x.wav")
    assert reward(ExactRewardConfig(), "yes", prompt) == 1.0


# -- NExT-QA -------------------------------------------------------------------------------------------------------------------
def test_next_qa_with_a_column_for_each_choice_and_the_number_of_a_video(tmp_path: Path) -> None:
    choices = [f"a{number}" for number in range(5)]
    row = {
        "video": 4010069381,
        "frame_count": 369,
        "question": "how do the two man play the instrument",
        "answer": 2,
        "qid": 6,
        "type": "CH",
    } | dict(
        zip(choices, ("roll the handle", "tap their feet", "strum the string", "hit with sticks", "pat with hand"), strict=True)
    )
    media = MediaConfig(videos="video", video=VideoConfig(file="videos/{}.mp4"))
    prompt = first(
        tmp_path, row, {"videos/4010069381.mp4": b"x"}, media=media, layout="choices", prompt_key="question", choices=choices
    )
    part, question = said(prompt)
    assert part == VIDEO
    assert question["text"].endswith("\nC. strum the string\nD. hit with sticks\nE. pat with hand")
    assert prompt.answer == "C"
    for response, expected in (("C", 1.0), ("strum the string", 1.0), ("(D)", 0.0)):
        assert reward(MultipleChoiceRewardConfig(), response, prompt) == expected
