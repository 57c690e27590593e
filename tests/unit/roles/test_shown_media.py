"""What requests to roles may show, and that it is prepared once for all texts in which it stands."""

import asyncio
import base64
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from relax.config import make_config
from relax.config.model import ModelConfig
from relax.data.media.decoded import Image as Decoded
from relax.errors import DataError
from relax.models.processor import OmniProcessor
from relax.roles.shown_media import PreparedMedia, ShownMedia

KINDS = ("image", "video")


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


@pytest.mark.usefixtures("media_here")
async def test_media_are_prepared_once_and_stand_in_any_text(
    shown: ShownMedia, tmp_path: Path, tiny_omni: Callable[[str], Path]
) -> None:
    folder = tiny_omni("qwen3_vl")
    prepared, processor = PreparedMedia(ModelConfig(path=str(folder)), shown), OmniProcessor(folder)
    paths = [str(tmp_path / name / "a.png") for name in ("rows", "held")]
    messages, media = shown.read(asked(*({"type": "image", "path": path} for path in paths)), KINDS)
    await prepared.start()
    try:
        ready, again = await asyncio.gather(prepared.of(media), prepared.of(media))
        assert ready is again
        assert prepared._pool.num_prepared == 1
        whole = processor.prepare(processor.render(messages), [_decoded(path) for path in paths])
        assert ready.expand(whole.unexpanded.tolist(), [1] * len(whole.unexpanded))[0] == whole.ids.tolist()
        assert all((ready.features[name] == array).all() for name, array in whole.features.items())
        assert (await prepared.of(media[:1])).features["pixel_values"].shape != ready.features["pixel_values"].shape
    finally:
        await prepared.close()


def _decoded(path: str) -> Decoded:
    with Image.open(path) as image:
        return Decoded(np.array(image.convert("RGB")))
