"""`relax check` on rows with media: how many there are, and whether the model reads them."""

import json
import shutil

import pytest
from PIL import Image

from relax.cli.check import check, check_config
from relax.cli.explain import explain
from relax.cli.findings import Level, ok
from relax.config import load_config


@pytest.fixture
def with_images(small_run, monkeypatch, tmp_path):
    """Overrides that give the run three rows, of which two have an image."""
    monkeypatch.setattr("relax.cli.check.reward_findings", lambda *_: [ok("reward", "was not tried")])
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    rows = [{"prompt": "What?", "answer": "a", "images": images} for images in ("a.png", ["a.png", "a.png"], None)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"data.path={tmp_path}/rows.jsonl", "data.answer_key=answer", "data.media.num_workers=1"]


def said(report, level):
    return [finding.text for finding in report.findings if finding.about == "data.media" and finding.level is level]


def test_a_model_of_text_reads_no_images(small_run, with_images):
    (fault,) = said(check_config(load_config(small_run, with_images)), Level.ERROR)
    assert fault.startswith("the rows have images, and ")
    assert fault.endswith("reads text")


def test_images_that_a_model_of_text_is_not_shown_are_told(small_run, with_images):
    report = check_config(load_config(small_run, [*with_images, "data.media=none"]))
    (told,) = said(report, Level.WARNING)
    assert told.startswith("is not set: ")
    assert told.endswith("does not read 'images' of the rows")


def test_media_are_counted(small_run, with_images, fake_model):
    fake_model(vision_config={"depth": 1})
    config = load_config(small_run, with_images)
    assert said(check_config(config), Level.OK) == ["3 images in 3 rows"]
    critic = load_config(small_run, [*with_images, "algorithm.type=ppo"])
    assert not said(check_config(critic), Level.ERROR), "it reads what the policy reads"
    assert "images in 'images'" in explain(config)
    assert "1 process(es) decode them" in explain(config)


def test_the_sound_of_videos_is_for_models_that_hear(small_run, with_images, fake_model):
    fake_model(vision_config={"depth": 1})
    report = check_config(load_config(small_run, [*with_images, "data.media.video.audio=true"]))
    (fault,) = (finding for finding in report.findings if finding.level is Level.ERROR)
    assert fault.about == "data.media.video.audio"
    assert fault.text.endswith("does not hear: leave it out")
    fake_model(vision_config={"depth": 1}, audio_config={"d_model": 1})
    report = check_config(load_config(small_run, [*with_images, "data.media.video.audio=true"]))
    assert not [finding for finding in report.findings if finding.level is Level.ERROR]


def test_a_critic_of_another_model_has_to_see_as_well(small_run, with_images, fake_model, tmp_path):
    shutil.copytree(fake_model(), tmp_path / "critic")
    fake_model(vision_config={"depth": 1})
    words = [*with_images, "algorithm.type=ppo", f"critic.model.path={tmp_path}/critic"]
    report = check_config(load_config(small_run, words))
    (fault,) = [f.text for f in report.findings if f.about == "critic.model.path" and f.level is Level.ERROR]
    assert fault.endswith("reads text, and the rows have media: use one of the policy's family")


def test_media_that_are_forgotten_are_an_error_where_the_model_could_read_them(small_run, with_images, fake_model):
    without = [override for override in with_images if not override.startswith("data.media")]
    assert not said(check_config(load_config(small_run, without)), Level.ERROR), "a model of text has no use for them"
    fake_model(vision_config={"depth": 1})
    (fault,) = said(check_config(load_config(small_run, without)), Level.ERROR)
    assert "the images in the column 'images' would not be shown to a model that reads images: set media = {}" in fault


@pytest.mark.parametrize(
    ("media", "level", "text"),
    [
        (None, Level.WARNING, "the server is shown prompts without their images: set media = true"),
        ("true", Level.OK, "the server is sent the images of prompts"),
        ("false", Level.OK, "false: the judge is shown prompts without their images"),
    ],
)
def test_what_a_server_is_shown_is_said(small_run, with_images, fake_model, media, level, text):
    fake_model(vision_config={"depth": 1})
    judge = ["reward.type=genrm", "genrm.judges.default.type=openai", "genrm.judges.default.model=m"]
    judge += ["genrm.judges.default.url=http://127.0.0.1:9/v1", *([f"genrm.judges.default.media={media}"] if media else [])]
    assert text in _of_judge(check_config(load_config(small_run, [*with_images, *judge])), level)
    without = [override for override in with_images if "media" not in override]
    assert not _of_judge(check_config(load_config(small_run, [*without, *judge])), level), "rows are of text"


@pytest.mark.parametrize(
    ("reads", "media", "level", "text"),
    [
        ({"vision_config": {}}, None, Level.WARNING, "reads no images, so the judge is shown prompts without them"),
        ({"vision_config": {}}, "true", Level.ERROR, "reads no images"),
        ({"vision_config": {"depth": 1}}, None, Level.OK, "the judge is shown the images of prompts"),
    ],
)
def test_a_judge_of_ones_own_is_shown_what_its_model_reads(
    small_run, with_images, fake_model, tmp_path, reads, media, level, text
):
    shutil.copytree(fake_model(**reads), tmp_path / "judge")
    fake_model(vision_config={"depth": 1})
    judge = ["reward.type=genrm", "genrm.judges.default.type=local", f"genrm.judges.default.model.path={tmp_path}/judge"]
    judge += [f"genrm.judges.default.media={media}"] if media else []
    assert text in _of_judge(check_config(load_config(small_run, [*with_images, *judge])), level)


def _of_judge(report, level):
    about = "genrm.judges.default.media"
    return "".join(finding.text for finding in report.findings if finding.about == about and finding.level is level)


def test_a_reward_model_of_text_is_said_to_be_shown_no_media(small_run, with_images, fake_model, tmp_path):
    shutil.copytree(fake_model(), tmp_path / "judge")
    fake_model(vision_config={"depth": 1})
    words = [*with_images, f"reward={{type='reward_model', model={{path='{tmp_path}/judge'}}}}"]
    assert said(check_config(load_config(small_run, words)), Level.WARNING) == [
        "the reward model reads text: it is shown prompts without their media"
    ]
    (tmp_path / "judge/config.json").write_text((tmp_path / "model/config.json").read_text())
    assert not said(check_config(load_config(small_run, words)), Level.WARNING)


@pytest.mark.slow
def test_the_media_of_a_few_rows_are_decoded_or_those_of_all(small_run, tiny_omni, tmp_path):
    Image.new("RGB", (64, 64), (200, 0, 0)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    names = ["bad.png" if number in (10, 13) else "good.png" for number in range(14)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": "What?", "answer": "a", "images": n}) for n in names))
    words = [f"model.path={tiny_omni('qwen3_vl')}", f"data.path={tmp_path}/rows.jsonl", "data.answer_key=answer"]
    few = check(small_run, [*words, "data.media={}"])
    assert not said(few, Level.WARNING)
    assert said(few, Level.OK)[1].startswith("8 prompts decoded: ")
    every = check(small_run, [*words, "data.media={}"], all_media=True)
    assert said(every, Level.OK)[1].startswith("12 prompts decoded: ")
    first, second = said(every, Level.WARNING)
    assert first.startswith("2 of the first 14 prompts with media cannot be read, as ")
    assert "rows.jsonl:11" in first
    assert second.startswith("rows.jsonl:14: image, item 1 of 1")
