"""What requests to roles may show, and that it is prepared once for all texts in which it stands."""

import asyncio
import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from relax.config import make_config
from relax.config.model import ModelConfig
from relax.data.media.decoder import Decoder
from relax.errors import DataError
from relax.models.processor import KINDS, OmniProcessor, without_repeats
from relax.roles.shown_media import PreparedMedia, ShownMedia
from tests.made_media import clip, sound, tone


@pytest.fixture
def shown(tmp_path: Path) -> ShownMedia:
    """Of a run whose rows lie in `rows/`, and those of its evaluation in `held/`."""
    for folder, colour in (("rows", "red"), ("held", "blue"), ("secret", "green")):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (64, 64), colour).save(tmp_path / folder / "a.png")
    section = {"type": "file", "media": {"image": {"file": "images/{}.jpg"}, "num_workers": 1}}
    raw = {
        "model": {"path": "m"},
        "data": {**section, "path": str(tmp_path / "rows/rows.jsonl")},
        "eval": {"data": {**section, "path": str(tmp_path / "held/rows.jsonl")}},
        "reward": {"type": "exact"},
        "train": {"num_steps": 1},
    }
    found = ShownMedia.of(make_config(raw))
    assert found is not None
    return found


def asked(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": [{"type": "text", "text": "Is it <image>"}, *parts]}]


def test_only_what_rows_may_name_is_shown(shown: ShownMedia, tmp_path: Path) -> None:
    png = (tmp_path / "secret/a.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    parts = [{"type": "image", "path": str(tmp_path / folder / "a.png")} for folder in ("rows", "held")]
    messages, media = shown.read(asked(*parts, {"type": "image_url", "image_url": {"url": url}}), KINDS)
    assert [item.source for item in media][:2] == [part["path"] for part in parts]
    assert media[2].source == f"spool:0:{len(png)}"
    assert messages[0]["content"] == [{"type": "text", "text": "Is it <image>"}, *[{"type": "image"}] * 3]
    for path, why in (("secret/a.png", "lies outside of"), ("rows/b.png", "there is no file")):
        with pytest.raises(DataError, match=why):
            shown.read(asked({"type": "image", "path": str(tmp_path / path)}), KINDS)
    with pytest.raises(DataError, match=r"allow_http = false"):
        shown.read(asked({"type": "image", "url": "https://example.org/a.png"}), KINDS)
    assert shown.read(asked(*parts), ()) == ([{"role": "user", "content": "Is it <image>"}], ()), "nothing is looked for"


@pytest.mark.parametrize(
    ("family", "kinds"), [("qwen3_vl", ("image", "image")), ("qwen3_omni", ("audio", "image", "video", "audio"))]
)
@pytest.mark.usefixtures("media_here")
async def test_media_are_prepared_once_and_stand_in_any_text(
    shown: ShownMedia, tmp_path: Path, tiny_omni: Callable[[str], Path], family: str, kinds: tuple[str, ...]
) -> None:
    folder = tiny_omni(family)
    (tmp_path / "rows/a.wav").write_bytes(sound(tone(0.4, 16000), 16000))
    (tmp_path / "rows/a.mp4").write_bytes(clip([0, 500, 1000, 1500], (64, 64)))
    paths = {"image": "rows/a.png", "audio": "rows/a.wav", "video": "rows/a.mp4"}
    parts = [{"type": kind, "path": str(tmp_path / paths[kind])} for kind in kinds]
    parts[-1]["path"] = parts[-1]["path"].replace("rows/a.png", "held/a.png")
    prepared, processor = PreparedMedia(ModelConfig(path=str(folder)), shown), OmniProcessor(folder)
    messages, media = shown.read(asked(*parts), KINDS)
    ready, again = await asyncio.gather(prepared.of(media), prepared.of(media))
    assert ready is again
    assert prepared._pool.num_prepared == 1
    whole = processor.prepare(processor.render(messages), Decoder(shown.config, shown.spool.fd).decode("all", media))
    assert ready.expand(whole.unexpanded.tolist(), [1] * len(whole.unexpanded))[0] == whole.ids.tolist()
    features = without_repeats(whole.features, processor.frames_per_patch)
    assert all((ready.features[name] == array).all() for name, array in features.items())
    assert len((await prepared.of(media[:1])).ids) < len(ready.ids), "others are another set"


@pytest.mark.usefixtures("media_here")
def test_a_model_that_does_not_hear_sees_videos_without_their_sound(
    shown: ShownMedia, tiny_omni: Callable[[str], Path]
) -> None:
    heard = shown.config.model_copy(update={"video": shown.config.video.model_copy(update={"audio": True})})
    for family, hears in (("qwen3_vl", False), ("qwen3_omni", True)):
        prepared = PreparedMedia(ModelConfig(path=str(tiny_omni(family))), ShownMedia(heard))
        assert prepared._pool.config.video.audio is hears
