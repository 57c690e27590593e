"""`MediaConfig` refuses what cannot be meant."""

import pytest

from relax.config.load import validate
from relax.config.media import MediaConfig
from relax.errors import ConfigError


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"images": "media", "videos": "media"}, "three different columns"),
        ({"image": {"file": "train"}}, "must hold {} once"),
        ({"image": {"min_pixels": 9, "max_pixels": 4}}, "min_pixels = 9 is more than max_pixels = 4"),
        ({"image": {"pixel_limit": 10**9}}, "pixel_limit"),
        ({"audio": {"sampling_rat": 8000}}, "sampling_rate"),
    ],
)
def test_what_cannot_be_meant_is_refused(raw: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(MediaConfig, raw)


def test_a_config_survives_its_way_to_a_worker() -> None:
    config = validate(MediaConfig, {"images": "image", "video": {"fps": 1, "audio": True}, "image": {"transforms": ["a:b"]}})
    assert MediaConfig(**config.model_dump(mode="json")) == config
    assert config.columns == {"image": "image", "audio": "audios", "video": "videos"}
