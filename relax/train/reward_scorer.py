"""A classifier of conversations at work: many responses in one packed pass, a prompt that they share computed once.

Its answers are those of transformers' own class on the conversation, rendered by the classifier's own tokenizer. Media of a
prompt stand in its places, as the classifier's own processor has prepared them.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax.config.data import DataSection
from relax.config.reward import RewardModelRewardConfig
from relax.data.media.cost import media_cost, row_costs
from relax.data.packing import MicroBatch, find_groups, pack, plan
from relax.data.render import Message, Renderer
from relax.data.tokenizer import load_tokenizer
from relax.errors import DataError, ModelError
from relax.models.device import pick_device
from relax.models.folder import read_model_folder
from relax.models.forward import make_forward
from relax.models.media_forward import reads_media
from relax.models.preparer import ReadyPrompt
from relax.train.attention import PackedAttention
from relax.train.backend import TrainBatch
from relax.train.lessons import to_batch
from relax.train.loading import load_model
from relax.train.omni import omni_hidden
from relax.train.preferences import read_last

Asked = tuple[str | Sequence[Message], str, ReadyPrompt | None]  # a prompt, a response to it, and what the prompt shows
_Readable = tuple[tuple[str, int], list[int], ReadyPrompt | None]  # what has the same prompt, its ids, and what these show


class RewardScorer:
    """The model of `config`, loaded. Its methods are blocking.

    Raises `ModelError` for a folder that is not a classifier of decoder kind, and a chat template that `renders_chat` needs
    and that is not there.
    """

    def __init__(self, config: RewardModelRewardConfig, *, renders_chat: bool) -> None:
        model, key = config.model, "reward.model.path"
        self._device, self._max_tokens = pick_device(config.device), config.max_tokens_per_pass
        torch.set_num_threads(config.num_threads)
        self._model = load_model(model, self._device, "sequence").eval()
        if not hasattr(self._model, "score"):
            raise ModelError(f"{key} = {model.path!r}: {type(self._model).__name__} is no decoder with a head called 'score'")
        self._forward = make_forward(self._model)
        tokenizer = load_tokenizer(model)
        if renders_chat and not getattr(tokenizer, "chat_template", None):
            raise ModelError(f"{key} = {model.path!r}: its tokenizer has no chat template, and the prompts are chat messages")
        self._renderer = Renderer(tokenizer, DataSection(chat_template=renders_chat))
        self._pad: int | None = self._model.config.get_text_config().pad_token_id
        self._context = model.max_context or read_model_folder(model).context or 1 << 30
        self._row_costs = row_costs(self._model.config.to_dict())
        self.num_labels = int(self._model.config.num_labels)

    def score(self, items: Sequence[Asked]) -> list[NDArray[np.float32] | str]:
        """The logits `[num_labels]` of each response to its prompt, or why there are none."""
        found: list[NDArray[np.float32] | str] = []
        readable: list[_Readable] = []
        for prompt, response, media in items:
            try:
                # in their places media look alike
                readable.append(((json.dumps(prompt), id(media)), self._ids(prompt, response, media), media))
                found.append("")
            except DataError as error:
                found.append(str(error))
        logits = iter(self._logits(readable) if readable else ())
        return [item or next(logits) for item in found]

    def _ids(self, prompt: str | Sequence[Message], response: str, media: ReadyPrompt | None) -> list[int]:
        """The whole conversation. Raises `DataError` for one that is longer than the context: it is never cut."""
        if isinstance(prompt, str):
            ids = self._renderer.whole_ids(prompt + response)
        else:
            shown = [m if media else {**m, "content": _text_of(m["content"])} for m in prompt]
            ids = self._renderer.whole_ids([*shown, {"role": "assistant", "content": response}])
        if media is not None:
            ids, _ = media.expand(ids, [0] * len(ids))
        if not ids:
            raise DataError("prompt and response are empty")
        if len(ids) > self._context:
            raise DataError(f"prompt and response have {len(ids)} tokens, and the reward model's context is {self._context}")
        return ids

    @torch.inference_mode()
    def _logits(self, conversations: Sequence[_Readable]) -> NDArray[np.float32]:
        """`[N, num_labels]` of conversations, which their prompts group."""
        groups: dict[tuple[str, int], int] = {}
        owner = [groups.setdefault(key, len(groups)) for key, _, _ in conversations]
        features = {group: media.features for group, (_, _, media) in zip(owner, conversations, strict=True) if media}
        batch = to_batch([(read_last(ids, self._pad),) for _, ids, _ in conversations])
        batch = replace(batch, group_ids=np.asarray(owner, np.int64), features=features)
        costs = {group: media_cost(seen, self._row_costs) for group, seen in features.items()}
        found = np.zeros((len(conversations), self.num_labels), np.float32)
        head = self._model.score
        for part in plan(find_groups(batch.tokens, batch.loss_mask, batch.group_ids, costs), self._max_tokens):
            micro = pack(batch.tokens, batch.loss_mask, part)
            last = self._hidden(batch, micro)[torch.from_numpy(micro.sources).to(self._device)]
            found[micro.rows] = head(last.to(head.weight.dtype)).float().cpu().numpy()
        return found

    def _hidden(self, batch: TrainBatch, micro: MicroBatch) -> Tensor:
        """`[T, d]`, after the final norm."""
        attention = PackedAttention(micro, self._device)
        if reads_media(self._forward):
            return omni_hidden(self._forward, batch, micro, attention, self._device)
        ids, positions = (torch.from_numpy(column).to(self._device) for column in (micro.ids, micro.positions))
        return self._forward.hidden(ids, positions, attention)


def _text_of(content: Any) -> Any:
    """What a model of text reads of a message with media: the text between them."""
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content
