"""The reward model: a classifier that scores responses for the reward workers.

    consumes: POST /reward_model/score {"items": [{"prompt": "1+1=" or messages, "response": "2"}, ...]}     waits for: nobody
    produces: {"rewards": [0.7, {"error": "too long"}, ...]}, in the form of `reward.type = "remote"`    unblocks:  rollout

Requests that come while it computes wait, and are computed together. Media of prompts are parts of the messages, as judges are
sent them; a model that reads them is shown them, prepared by its own processor.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relax.bus.transfer_queue import TransferQueue
from relax.config.reward import reward_model_of
from relax.config.run import RunConfig
from relax.data.render import Message
from relax.errors import DataError, ModelError, RoleError
from relax.models.folder import read_model_folder
from relax.models.preparer import ReadyPrompt
from relax.roles.role import Reply, Role
from relax.roles.shown_media import PreparedMedia, ShownMedia

if TYPE_CHECKING:
    from relax.train.reward_scorer import RewardScorer

_Item = tuple[str | Sequence[Message], str]  # a prompt, and a response to it
_Asked = tuple[str | Sequence[Message], str, ReadyPrompt | None]  # and what the prompt shows
_Scored = NDArray[np.float32] | str  # the labels' logits, or why there are none
_Open = tuple[_Asked, asyncio.Future[_Scored]]

_BATCHES = 4  # requests that are computed together
_SCALES = ("logit", "probability")
_ENDED = "reward_model: ended before it had scored this"
_PAGES = "POST /reward_model/score/LABEL/SCALE, where SCALE is logit or probability; GET /reward_model/status"


class RewardModel(Role):
    """Answers as long as the run lasts."""

    def __init__(self, config: RunConfig, bus: TransferQueue) -> None:
        super().__init__("reward_model", config, bus)
        settings = reward_model_of(config.rewards.values())
        assert settings is not None, "no reward asks a reward model"
        self._settings = settings
        self._scorer: RewardScorer | None = None
        self._shown, self._kinds = ShownMedia.of(config), tuple[str, ...]()
        self._media: PreparedMedia | None = None
        self._waiting: list[_Open] = []
        self._wake = asyncio.Event()

    async def start(self) -> None:
        # here, since torch and transformers take seconds to import and belong to the process that computes with them
        from relax.train.reward_scorer import RewardScorer

        settings, config = self._settings, self.config
        is_chat = config.data.chat_template or (config.eval is not None and config.eval.data.chat_template)
        scorer = await asyncio.to_thread(RewardScorer, settings, renders_chat=is_chat)
        if settings.label >= scorer.num_labels:
            labels = f"{scorer.num_labels} label(s), counted from 0"
            raise ModelError(f"reward.label = {settings.label}: {settings.model.path} has {labels}")
        if self._shown is not None:
            await self._show(self._shown)
        self._scorer = scorer  # from here on it answers: not before, or what it sees would be scored unseen

    async def _show(self, shown: ShownMedia) -> None:
        self._kinds = read_model_folder(self._settings.model).media
        if self._kinds:
            self._media = PreparedMedia(self._settings.model, shown)
            await self._media.start()
        else:
            text = f"the reward model {self._settings.model.path} reads text: it is shown prompts without their media"
            await self.bus.emit({"kind": "warning", "role": self.name, "text": text})

    async def run(self) -> None:
        while True:
            self.activity = "waiting for responses"
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                size = _BATCHES * self._settings.batch_size
                batch, self._waiting = self._waiting[:size], self._waiting[size:]
                await self._compute([item for item in batch if not item[1].done()])

    async def _compute(self, batch: Sequence[_Open]) -> None:
        assert self._scorer is not None
        self.activity = f"scoring {len(batch)} responses"
        try:
            found = await asyncio.to_thread(self._scorer.score, [item for item, _ in batch])
        except BaseException:
            _give_up(batch)
            raise
        for scored, (_, future) in zip(found, batch, strict=True):
            if not future.done():  # whoever asked may be gone
                future.set_result(scored)
        self.progress += 1

    async def stop(self) -> None:
        self._scorer = None
        _give_up(self._waiting)
        self._waiting = []
        if self._media is not None:
            await self._media.close()

    async def answer(self, method: str, page: str, body: bytes) -> Reply:
        name, *rest = page.split("/")
        label, scale, *unknown = [*rest, *("0", "logit")[len(rest) :]]
        if self._scorer is None:
            return 503, {"error": "the reward model is being loaded"}
        if method != "POST" or name != "score" or unknown or not label.isdecimal() or scale not in _SCALES:
            return 404, {"error": f"no such page: {_PAGES}"}
        if int(label) >= self._scorer.num_labels:
            return 404, {"error": f"label {label}: the model has {self._scorer.num_labels}, counted from 0"}
        try:
            items = [_read(item) for item in json.loads(body)["items"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            wanted = '{"items": [{"prompt": a text or chat messages, "response": a text}, ...]}'
            return 400, {"error": f"wanted {wanted}: {type(error).__name__}: {error}"}
        scored = await asyncio.gather(*(self._score(item) for item in items))
        return 200, {"rewards": [{"error": s} if isinstance(s, str) else to_reward(s, int(label), scale) for s in scored]}

    async def _score(self, item: _Item) -> _Scored:
        asked: _Asked | str
        try:
            asked = await self._asked(*item)
        except DataError as error:
            asked = str(error)
        if self._scorer is None:  # perhaps for want of the media workers, which end first
            raise RoleError(_ENDED)
        if isinstance(asked, str):
            return asked
        future: asyncio.Future[_Scored] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, future))
        self._wake.set()
        return await future

    async def _asked(self, prompt: str | Sequence[Message], response: str) -> _Asked:
        """Raises `DataError` for media that cannot be shown."""
        if isinstance(prompt, str) or self._shown is None or self._media is None:
            return prompt, response, None
        messages, media = self._shown.read(prompt, self._kinds)
        return messages, response, await self._media.of(media) if media else None


def _give_up(batch: Sequence[_Open]) -> None:
    """Whoever waits is told, and may ask again when the role is back."""
    for _, future in batch:
        if not future.done():
            future.set_exception(RoleError(_ENDED))


def _read(item: Any) -> _Item:
    prompt, response = item["prompt"], item["response"]
    is_chat = isinstance(prompt, list) and all(map(_is_message, prompt))
    if not isinstance(response, str) or not (isinstance(prompt, str) or is_chat):
        raise TypeError("prompt must be a text or chat messages, and response a text")
    return prompt, response


def _is_message(message: Any) -> bool:
    """Whether it has a text as content, or parts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    return all(isinstance(part, Mapping) and isinstance(part.get("text", ""), str) for part in parts)


def to_reward(logits: NDArray[np.float32], label: int, scale: str) -> float:
    """One label's logit, or its probability among the labels (that of a single one: its sigmoid)."""
    if scale == "logit":
        return float(logits[label])
    others = logits if len(logits) > 1 else np.append(logits, 0.0)
    return float(1 / np.exp(others.astype(np.float64) - float(logits[label])).sum())
