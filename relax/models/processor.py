"""From a prompt with images, sounds and videos to token ids and the arrays that a model's encoders read.

    text with one placeholder a medium --tokenizer--> unexpanded ids       what engines behind a server are given
                                       --processor--> expanded ids         what trainer and embedded engine compute with
                                                      features             pixels, grids, spectrograms, by name

The model folder's own transformers processor does the work; what is here keeps both tracks of ids and says how they lie on one
another. All results are numpy arrays on the host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax.data.media.decoded import Audio, Decoded, Image, Video
from relax.errors import DataError, ModelError

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")

# Said, since else it is guessed: an image of 3 rows would be taken for one of 3 channels.
_CHANNELS = {"input_data_format": "channels_last"}
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_FEATURES = (
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "video_second_per_grid",
    "input_features",
    "audio_lengths",
)


@dataclass(frozen=True, slots=True)
class Expansion:
    """The `item`-th medium of its kind: the unexpanded id at `place` became the expanded ids `[start, start + length)`."""

    kind: Kind
    item: int
    place: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as models read it. `ids [P]` int32 with a media id for each embedding of a medium; `unexpanded [Q]` int32 with
    one id for each medium; `expansions` in order, between which the two are equal.

    `features` by name, concatenated along the first axis over the media of a kind: `pixel_values [patches, d]`,
    `image_grid_thw [images, 3]`, `pixel_values_videos`, `video_grid_thw`, `video_second_per_grid [videos]`,
    `input_features [frames, mel bins]` without padding, `audio_lengths [sounds]` in such frames.
    """

    ids: NDArray[np.int32]
    unexpanded: NDArray[np.int32]
    expansions: tuple[Expansion, ...]
    features: Mapping[str, NDArray[Any]]


class OmniProcessor:
    """The processor of the model at `folder`. `token_ids` are those that stand for media, by kind.

    Raises `ModelError` for a folder without a processor.
    """

    def __init__(self, folder: str | Path, *, trust_remote_code: bool = False) -> None:
        # here, since importing transformers takes seconds that a check or a help page need not spend
        from transformers import AutoProcessor

        try:
            self._processor: Any = AutoProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, ImportError, TypeError) as error:
            raise ModelError(f"{folder}: its processor cannot be loaded: {error}") from error
        self.tokenizer: Any = getattr(self._processor, "tokenizer", None)
        names: dict[Kind, str | None] = {kind: getattr(self._processor, f"{kind}_token", None) for kind in KINDS}
        if self.tokenizer is None or not any(names.values()):
            raise ModelError(f"{folder}: its processor is {type(self._processor).__name__}, which knows no images or sounds")
        self._tokens: dict[Kind, str] = {kind: token for kind, token in names.items() if token is not None}
        self.token_ids: dict[Kind, int] = {
            kind: int(self.tokenizer.convert_tokens_to_ids(token)) for kind, token in self._tokens.items()
        }

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Chat messages through the folder's template; parts of type image, audio and video become placeholders."""
        text: str = self._processor.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    def prepare(self, text: str, media: Sequence[Decoded]) -> PreparedPrompt:
        """`text` has one placeholder for each of `media`, in their order.

        Raises `DataError` where they do not fit one another, and where a medium cannot be processed.
        """
        unexpanded: list[int] = self.tokenizer(text).input_ids
        kinds = {token: kind for kind, token in self.token_ids.items()}
        places = [place for place, token in enumerate(unexpanded) if token in kinds]
        found, given = [kinds[unexpanded[place]] for place in places], [_kind(medium) for medium in media]
        if found != given:
            raise DataError(
                f"the prompt has places for {_list(found)}, its media are {_list(given)}: wanted the same, in the same order "
                f"(a medium's place is {', '.join(repr(token) for token in self._tokens.values())} and may not be in the text)"
            )
        if not media:
            ids = np.asarray(unexpanded, np.int32)
            return PreparedPrompt(ids, ids, (), {})
        try:
            out = self._processor(text=[text], **self._arguments(media), return_tensors="pt")
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise DataError(f"media that the model's processor does not take: {error}") from error
        expanded = out["input_ids"][0].numpy()
        features = self._features(out, media)
        counts = iter(self._counts(features, found, expanded))
        expansions = tuple(_expansions(unexpanded, expanded.tolist(), places, found, counts))
        return PreparedPrompt(expanded.astype(np.int32), np.asarray(unexpanded, np.int32), expansions, features)

    def _arguments(self, media: Sequence[Decoded]) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if images := [medium.pixels for medium in media if isinstance(medium, Image)]:
            arguments |= {"images": images, "images_kwargs": _CHANNELS}
        if sounds := [medium for medium in media if isinstance(medium, Audio)]:
            self._check_rates(sounds)
            arguments["audio"] = [sound.samples for sound in sounds]
        if videos := [medium for medium in media if isinstance(medium, Video)]:
            if any(video.audio is not None for video in videos):
                raise DataError("a video has its sound beside it, and models are given frames alone: set video.audio = false")
            least = self._processor.video_processor.temporal_patch_size
            arguments["videos"] = [_frames(video, least) for video in videos]
            metadata = [_metadata(video, least) for video in videos]
            arguments["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": metadata, **_CHANNELS}
        return arguments

    def _check_rates(self, sounds: Sequence[Audio]) -> None:
        wanted = self._processor.feature_extractor.sampling_rate
        for sound in sounds:
            if sound.sampling_rate != wanted:
                raise DataError(f"a sound has {sound.sampling_rate} samples a second, the model hears {wanted}")

    def _features(self, out: Mapping[str, Any], media: Sequence[Decoded]) -> dict[str, NDArray[Any]]:
        features = {name: out[name].numpy() for name in _FEATURES if name in out}
        if "feature_attention_mask" in out:
            mask = out["feature_attention_mask"].bool()
            features["input_features"] = out["input_features"].transpose(1, 2)[mask].numpy()
            features["audio_lengths"] = mask.sum(-1).numpy()
            self._check_whole([medium for medium in media if isinstance(medium, Audio)], features["audio_lengths"])
        # Which the processor computes from one frame rate for all videos of a prompt.
        if "video_second_per_grid" in out or "second_per_grid_ts" in out:
            patch = self._processor.video_processor.temporal_patch_size
            rates = [medium.fps for medium in media if isinstance(medium, Video)]
            features["video_second_per_grid"] = np.asarray([patch / rate for rate in rates], np.float32)
        return features

    def _check_whole(self, sounds: Sequence[Audio], lengths: NDArray[np.int64]) -> None:
        """Some feature extractors cut what is longer than they were made for, and say nothing."""
        hop = self._processor.feature_extractor.hop_length
        for sound, length in zip(sounds, lengths.tolist(), strict=True):
            if len(sound.samples) >= (length + 1) * hop:
                whole, heard = (samples / sound.sampling_rate for samples in (len(sound.samples), length * hop))
                raise DataError(
                    f"a sound lasts {whole:.1f} s, of which the model's processor takes {heard:.1f} s: give shorter ones"
                )

    def _counts(self, features: Mapping[str, Any], kinds: Sequence[Kind], ids: NDArray[np.int64]) -> list[int]:
        """How many media ids each medium has; a sound has as many as follow one another, as sounds lie between marks."""
        by_kind: dict[Kind, Iterator[int]] = {}
        for kind in KINDS:
            if kind in _GRIDS and _GRIDS[kind] in features:
                merge = getattr(self._processor, f"{kind}_processor").merge_size ** 2
                by_kind[kind] = iter((features[_GRIDS[kind]].prod(-1) // merge).tolist())
            elif kind in kinds:
                edges = np.diff((ids == self.token_ids[kind]).astype(np.int8), prepend=0, append=0)
                runs = (np.flatnonzero(edges < 0) - np.flatnonzero(edges > 0)).tolist()
                if len(runs) != kinds.count(kind):
                    raise DataError(f"of {kinds.count(kind)} sounds the model hears {len(runs)}: the others are too short")
                by_kind[kind] = iter(runs)
        return [next(by_kind[kind], 0) for kind in kinds]


def _expansions(
    unexpanded: list[int], expanded: list[int], places: Sequence[int], kinds: Sequence[Kind], counts: Iterator[int]
) -> Iterator[Expansion]:
    """Where each place went. Raises `ModelError` where what lies between places is not the same in both."""
    items = dict.fromkeys(KINDS, 0)
    at = end = 0
    for place, kind, next_place in zip(places, kinds, [*places[1:], len(unexpanded)], strict=True):
        start, left = end + place - at, next(counts)
        _require(expanded[end:start] == unexpanded[at:place])
        end = start
        while left:
            _require(end < len(expanded))
            left -= expanded[end] == unexpanded[place]
            end += 1
        rest = unexpanded[place + 1 : next_place]
        while expanded[end : end + len(rest)] != rest:
            _require(end < len(expanded))
            end += 1  # marks after the medium's last embedding
        yield Expansion(kind, items[kind], place, start, end - start)
        items[kind] += 1
        at = place + 1


def _require(agrees: bool) -> None:
    if not agrees:
        raise ModelError("the processor's token ids are not those of the text with its places expanded")


def _frames(video: Video, least: int) -> NDArray[np.uint8]:
    """A video's frames, the last one again where there are fewer than a patch in time takes, as all processors fill them up."""
    missing = max(0, least - len(video.frames))
    return np.concatenate((video.frames, video.frames[-1:].repeat(missing, 0))) if missing else video.frames


def _metadata(video: Video, least: int) -> dict[str, Any]:
    """What a processor is told of frames that were chosen already: frame `k` stands at `k / fps` seconds."""
    frames, height, width, _ = video.frames.shape
    return {
        "total_num_frames": max(frames, least),
        "fps": video.fps,
        "duration": frames / video.fps,
        "frames_indices": [*range(frames), *[frames - 1] * (least - frames)],
        "height": height,
        "width": width,
    }


def _kind(medium: Decoded) -> Kind:
    return "image" if isinstance(medium, Image) else "video" if isinstance(medium, Video) else "audio"


def _list(kinds: Sequence[str]) -> str:
    return ", ".join(kinds) or "none"
