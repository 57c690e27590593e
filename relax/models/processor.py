"""From a prompt with images, sounds and videos to token ids and the arrays that a model's encoders read.

    text with one placeholder a medium --tokenizer--> unexpanded ids       what engines behind a server are given
                                       --processor--> expanded ids         what trainer and embedded engine compute with
                                                      features             pixels, grids, spectrograms, by name

The model folder's own transformers processor does the work; what is here keeps both tracks of ids and says how they lie on one
another. All results are numpy arrays on the host.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax.config.data import DataSection
from relax.data.control_tokens import Rendered
from relax.data.media.decoded import Audio, Decoded, Image, Video
from relax.data.render import Renderer, has_ended
from relax.errors import DataError, ModelError

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")

# Said, since else it is guessed: an image of 3 rows would be taken for one of 3 channels.
_CHANNELS = {"input_data_format": "channels_last"}
_GRIDS: dict[Kind, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}
_NOT_ALL_HEARD = (
    "of its videos some have a sound and others none, and the model hears all of a prompt or none: leave one sort out, or set "
    "media.video.audio = false"
)
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
    `input_features [frames, mel bins]` without padding, `audio_lengths [sounds]` in such frames; `video_is_heard [videos]`
    where videos' sounds are among these; `audio_passes [turns]`, the number of sounds in each turn, where there are several.
    """

    ids: NDArray[np.int32]
    unexpanded: NDArray[np.int32]
    expansions: tuple[Expansion, ...]
    features: Mapping[str, NDArray[Any]]


class OmniProcessor:
    """The processor of the model at `folder`. `token_ids` are those that stand for media, by kind; `frames_per_patch`: of its
    images; `renderer` applies the folder's chat template.

    Raises `ModelError` for a folder without a processor or a chat template.
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
        self.frames_per_patch = int(getattr(getattr(self._processor, "image_processor", None), "temporal_patch_size", 1))
        self.tokenizer.chat_template = getattr(self._processor, "chat_template", None) or self.tokenizer.chat_template
        self.renderer = Renderer(self.tokenizer, DataSection())

    @property
    def hears_videos(self) -> bool:
        """Whether the sound of a video can lie among its frames."""
        known = getattr(getattr(self._processor, "valid_processor_kwargs", None), "__annotations__", {}).get("videos_kwargs")
        return "use_audio_in_video" in getattr(known, "__annotations__", {})

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Rendered:
        """Chat messages through the folder's template; parts of type image, audio and video become placeholders."""
        return self.renderer.rendered(messages)

    def prepare(self, text: Rendered, media: Sequence[Decoded]) -> PreparedPrompt:
        """`text` has one placeholder for each of `media`, in their order. A video with a sound is seen and heard at once.

        Raises `DataError` where they do not fit one another, and where a medium cannot be processed.
        """
        unexpanded = text.ids()
        by_token = {token: kind for kind, token in self.token_ids.items()}
        places = [place for place, token in enumerate(unexpanded) if token in by_token]
        found, given = [by_token[unexpanded[place]] for place in places], [_kind(medium) for medium in media]
        if found != given:
            raise DataError(
                f"the prompt has places for {_list(found)}, its media are {_list(given)}: wanted the same, in the same order "
                f"(a medium's place is {', '.join(repr(token) for token in self._tokens.values())})"
            )
        if not media:
            return _lay_out(unexpanded, [], [], {})
        # The processor is shown control tokens alone: nothing that messages say can be a place to it.
        marks = text.control.numbers | by_token.keys()
        bare = [token for token in unexpanded if token in marks]
        try:
            out = self._processor(
                text=["".join(self.tokenizer.convert_ids_to_tokens(bare))],
                text_kwargs={"add_special_tokens": False},
                **self._arguments(media),
                return_tensors="pt",
            )
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise DataError(f"media that the model's processor does not take: {error}") from error
        features = self._features(out, media)
        runs = list(self._runs(bare, out["input_ids"][0].tolist(), media, features))
        for place, run in zip(places, runs, strict=True):  # else its first and last token may depend on the text beside them
            _require(bool(marks & {run[0], *unexpanded[max(0, place - 1) : place]}))
            _require(bool(marks & {run[-1], *unexpanded[place + 1 : place + 2]}))
        return _lay_out(unexpanded, places, runs, features, kinds=found)

    def extend(
        self, prompt: PreparedPrompt, answer: Sequence[int], text: Rendered, media: Sequence[Decoded], max_tokens: int = 1 << 30
    ) -> PreparedPrompt:
        """The next turn's prompt: that of the turns so far, the `answer` as it was sampled, and `text`, which the renderer's
        `following` makes of the next messages, with a placeholder for each of `media`.

        Raises `DataError` as `prepare` does, and where there would be more than `max_tokens`: media are never cut.
        """
        turn, said = self.prepare(text, media), np.asarray(answer, np.int32)
        if np.isin(said, list(self.token_ids.values())).any():
            raise DataError("the answer has tokens that stand for media, which no model writes")
        begin = int(has_ended(answer, turn.ids.tolist()))
        ids = np.concatenate([prompt.ids, said, turn.ids[begin:]])
        if len(ids) > max_tokens:
            raise DataError(f"with its next turn the conversation has {len(ids)} tokens, and {max_tokens} fit")
        counts = Counter(run.kind for run in prompt.expansions)
        place, start = (len(track) + len(said) - begin for track in (prompt.unexpanded, prompt.ids))
        later = (
            replace(run, item=run.item + counts[run.kind], place=run.place + place, start=run.start + start)
            for run in turn.expansions
        )
        unexpanded = np.concatenate([prompt.unexpanded, said, turn.unexpanded[begin:]])
        return PreparedPrompt(ids, unexpanded, (*prompt.expansions, *later), _joined(prompt.features, turn.features))

    def _arguments(self, media: Sequence[Decoded]) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if images := [medium.pixels for medium in media if isinstance(medium, Image)]:
            arguments |= {"images": images, "images_kwargs": _CHANNELS}
        if videos := [medium for medium in media if isinstance(medium, Video)]:
            least = self._processor.video_processor.temporal_patch_size
            arguments["videos"] = [_frames(video, least) for video in videos]
            metadata = [_metadata(video, least) for video in videos]
            arguments["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": metadata, **_CHANNELS}
            if any(video.audio is not None for video in videos):
                self._check_heard(videos)
                arguments["videos_kwargs"] |= {"use_audio_in_video": True, "fps": videos[0].fps}
        if sounds := _sounds(media):
            self._check_rates(sounds)
            arguments["audio"] = [sound.samples for sound in sounds]
        return arguments

    def _check_rates(self, sounds: Sequence[Audio]) -> None:
        wanted = self._processor.feature_extractor.sampling_rate
        for sound in sounds:
            if sound.sampling_rate != wanted:
                raise DataError(f"a sound has {sound.sampling_rate} samples a second, the model hears {wanted}")

    def _check_heard(self, videos: Sequence[Video]) -> None:
        """Processors hear all videos of a prompt or none, and lay sounds beside frames by one rate."""
        if not self.hears_videos:
            raise DataError(
                "a video has its sound beside it, and the model does not hear videos: set media.video.audio = false"
            )
        if any(video.audio is None for video in videos):
            raise DataError(_NOT_ALL_HEARD)
        if len(rates := {video.fps for video in videos}) > 1:
            raise DataError(
                f"its videos with sound have {' and '.join(f'{rate:g}' for rate in sorted(rates))} frames a second, and the "
                "model's processor knows one rate for a prompt: raise media.video.max_frames, or give each a prompt of its own"
            )

    def _features(self, out: Mapping[str, Any], media: Sequence[Decoded]) -> dict[str, NDArray[Any]]:
        features = {name: out[name].numpy() for name in _FEATURES if name in out}
        if "feature_attention_mask" in out:
            mask = out["feature_attention_mask"].bool()
            features["input_features"] = out["input_features"].transpose(1, 2)[mask].numpy()
            features["audio_lengths"] = mask.sum(-1).numpy()
            self._check_whole(_sounds(media), features["audio_lengths"])
        # Which the processor computes from one frame rate for all videos of a prompt.
        if "video_second_per_grid" in out or "second_per_grid_ts" in out:
            patch = self._processor.video_processor.temporal_patch_size
            rates = [medium.fps for medium in media if isinstance(medium, Video)]
            features["video_second_per_grid"] = np.asarray([patch / rate for rate in rates], np.float32)
        if heard := sum(isinstance(medium, Video) and medium.audio is not None for medium in media):
            features["video_is_heard"] = np.ones(heard, np.uint8)
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

    def _runs(
        self, bare: list[int], expanded: list[int], media: Sequence[Decoded], features: Mapping[str, NDArray[Any]]
    ) -> Iterator[list[int]]:
        """What each place in `bare` became. Raises `ModelError` where what lies between places is not the same in both."""
        media_ids = set(self.token_ids.values())
        places = [place for place, token in enumerate(bare) if token in media_ids]
        grids = {kind: iter(features[name]) for kind, name in _GRIDS.items() if name in features}
        at = end = 0
        for place, medium, next_place in zip(places, media, [*places[1:], len(bare)], strict=True):
            start, kind, rest = end + place - at, _kind(medium), bare[place + 1 : next_place]
            _require(expanded[end:start] == bare[at:place])
            if kind in grids:
                left = int(next(grids[kind]).prod()) // getattr(self._processor, f"{kind}_processor").merge_size ** 2
            else:  # as many as follow one another, since sounds lie between marks
                left = len(list(itertools.takewhile(bare[place].__eq__, expanded[start:])))
            end, is_heard = start, left > 0
            while left:
                _require(end < len(expanded))
                left -= expanded[end] == bare[place]
                end += 1
            while expanded[end : end + len(rest)] != rest:
                _require(end < len(expanded))
                end += 1  # marks after the medium's last embedding, and what is heard after the last frame
            run = expanded[start:end]
            if not is_heard or (isinstance(medium, Video) and medium.audio and self.token_ids["audio"] not in run):
                [sound] = _sounds([medium])
                seconds = len(sound.samples) / sound.sampling_rate
                raise DataError(f"a sound of {seconds:.2f} s is too short: the model hears nothing of it")
            yield run
            at = place + 1
        _require(expanded[end:] == bare[at:])


def _lay_out(
    unexpanded: list[int],
    places: Sequence[int],
    runs: Sequence[list[int]],
    features: Mapping[str, NDArray[Any]],
    kinds: Sequence[Kind] = (),
) -> PreparedPrompt:
    """The prompt with a run of ids in each of `places`."""
    ids, at, items, expansions = list[int](), 0, dict.fromkeys(KINDS, 0), list[Expansion]()
    for place, run, kind in zip(places, runs, kinds, strict=True):
        ids += unexpanded[at:place]
        expansions.append(Expansion(kind, items[kind], place, len(ids), len(run)))
        ids += run
        items[kind] += 1
        at = place + 1
    ids += unexpanded[at:]
    return PreparedPrompt(np.asarray(ids, np.int32), np.asarray(unexpanded, np.int32), tuple(expansions), features)


def _joined(first: Mapping[str, NDArray[Any]], then: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Features of two turns. What is heard in one turn was heard without the other's sounds, and so it stays."""
    turns = [dict(features) for features in (first, then)]
    if all("audio_lengths" in features for features in turns):
        for features in turns:
            features.setdefault("audio_passes", np.asarray([len(features["audio_lengths"])]))
    names = dict.fromkeys(name for features in turns for name in features)
    joined = {name: np.concatenate([features[name] for features in turns if name in features]) for name in names}
    if "video_is_heard" in joined and len(joined["video_is_heard"]) != len(joined["video_grid_thw"]):
        raise DataError(_NOT_ALL_HEARD)
    return joined


def without_repeats(features: Mapping[str, NDArray[Any]], frames_per_patch: int) -> dict[str, NDArray[Any]]:
    """The features with one frame of each patch of still images, `[patches, 3, d / 3 / frames]`, which processors repeat for as
    many as a patch of a video has. `OmniForward` takes both forms."""
    found = dict(features)
    if frames_per_patch > 1 and (pixels := found.get("pixel_values")) is not None:
        patches = pixels.reshape(len(pixels), 3, frames_per_patch, -1)
        if (patches == patches[:, :, :1]).all():
            found["pixel_values"] = patches[:, :, 0]
    return found


def _sounds(media: Sequence[Decoded]) -> list[Audio]:
    """All that is heard, in the order of their places: a video's sound in that of the video."""
    found = [medium.audio if isinstance(medium, Video) else medium for medium in media]
    return [sound for sound in found if isinstance(sound, Audio)]


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
