"""How images, audio clips and videos of rows are found and decoded."""

import re

from pydantic import Field, field_validator, model_validator

from relax.config.base import Section

MOST_PIXELS = 178_000_000  # what Pillow opens at all
PLACE = re.compile(r"\{(?::0(\d{1,2}))?\}")  # of a row's value in `file`


class ModalitySection(Section):
    """Settings that images, audio clips and videos share."""

    file: str = "{}"
    """How a row's value becomes a path, for rows with bare names or numbers: `"train2017/{}.jpg"`; with `{:012}`, zeros come
    before it up to 12 digits."""
    transforms: list[str] = []
    """Functions by dotted path, `package.module:function`; each takes what was decoded and returns another of its kind."""

    @field_validator("file")
    @classmethod
    def _has_a_place(cls, file: str) -> str:
        if len(PLACE.findall(file)) != 1:
            raise ValueError("must hold {} once (or {:012}, for 12 digits): the place of the row's value")
        return file

    def path_of(self, value: str) -> str:
        """The path of a row's value."""
        return PLACE.sub(lambda place: value.zfill(int(place[1] or 0)), self.file)


class ImageConfig(ModalitySection):
    """Images: uint8 RGB, transparency on white, turned upright as their EXIF data say, the first frame of animated ones."""

    max_pixels: int | None = Field(None, ge=1)
    """Larger images are scaled down to so many pixels. Default: as they are."""
    min_pixels: int | None = Field(None, ge=1, le=MOST_PIXELS)
    """Smaller images are scaled up to so many pixels. Default: as they are."""
    pixel_limit: int = Field(64_000_000, ge=1, le=MOST_PIXELS)
    """Images with more pixels are errors, before they are decoded."""

    @model_validator(mode="after")
    def _fits(self) -> "ImageConfig":
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels = {self.min_pixels} is more than max_pixels = {self.max_pixels}")
        return self


class AudioConfig(ModalitySection):
    """Audio: float32, one channel (the mean of all)."""

    sampling_rate: int = Field(16_000, ge=1_000, le=192_000)
    """Samples per second that every clip is brought to."""
    seconds_limit: float = Field(600.0, gt=0)
    """Longer clips are errors."""


class VideoConfig(ModalitySection):
    """Videos: uint8 RGB frames at even times, with the times at which they are shown."""

    fps: float = Field(2.0, ge=1e-3, le=1e4)
    """Frames taken per second."""
    max_frames: int = Field(64, ge=1)
    """Most frames of one video; longer ones give fewer per second."""
    max_pixels: int = Field(602_112, ge=1)
    """Larger frames are scaled down to so many pixels."""
    audio: bool = False
    """Let the model hear the audio track among the frames; a video without one is frames alone."""
    seconds_limit: float = Field(3_600.0, gt=0)
    """Longer videos are errors."""
    pixel_limit: int = Field(36_000_000, ge=1)
    """Videos with larger frames are errors, before they are decoded."""


class MediaConfig(Section):
    """Media beside the text of rows: which columns hold them, where files may lie, how they are decoded."""

    images: str = "images"
    """Column with a row's image, or the list of its images, in the order of the `<image>` places."""
    audios: str = "audios"
    """Column with a row's audio clips, likewise, for `<audio>`."""
    videos: str = "videos"
    """Column with a row's videos, likewise, for `<video>`."""
    roots: list[str] = []
    """Folders in which files may lie; paths in rows are relative to one of them. Default: the folder of the data file."""
    allow_http: bool = False
    """Fetch media that rows name by an http or https address."""
    max_items: int = Field(32, ge=1)
    """Most media of one row."""
    max_file_bytes: int = Field(512 << 20, ge=1)
    """Largest file, as it is stored."""
    max_prompt_bytes: int = Field(1 << 30, ge=1)
    """Largest size of all decoded media of one prompt."""
    time_limit_s: float = Field(60.0, gt=0)
    """Longest time that decoding one prompt's media may take; the process that does is then ended."""
    num_workers: int = Field(2, ge=1)
    """Processes that decode."""
    look_ahead: int = Field(8, ge=0)
    """Prompts whose media are decoded before they are asked for, at most."""
    image: ImageConfig = ImageConfig()
    """Images."""
    audio: AudioConfig = AudioConfig()
    """Audio clips."""
    video: VideoConfig = VideoConfig()
    """Videos."""

    @model_validator(mode="after")
    def _has_three_columns(self) -> "MediaConfig":
        if len({self.images, self.audios, self.videos}) < 3:
            raise ValueError("images, audios and videos must be three different columns")
        return self

    @property
    def columns(self) -> dict[str, str]:
        """Kind of media -> name of its column."""
        return {"image": self.images, "audio": self.audios, "video": self.videos}
