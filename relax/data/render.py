"""Messages to tokens, and tokens to text.

The policy's own tokens are never made here: a prompt is rendered once, and a response stays the ids that the engine returned.
What messages say is text: the tokens that a chat template writes are made of nothing else (`data/control_tokens.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from relax.config.data import DataSection
from relax.data.control_tokens import ControlTokens, Rendered
from relax.errors import DataError, ModelError
from relax.types import Prompt

Message = Mapping[str, Any]
_ANSWER = "\uf8ff"  # in the place of what was said: a character that means nothing to anybody


class Renderer:
    """Renders prompts as `[data]` asks: `chat_template`, `system_prompt`, `template_options`.

    Raises `ModelError` when chat prompts are asked for and the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, data: DataSection) -> None:
        self.tokenizer, self._data = tokenizer, data
        self.control = ControlTokens(tokenizer, self._render)
        if data.chat_template and not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                "data.chat_template = true, and the tokenizer has no chat template: use a chat model's tokenizer, or set "
                "data.chat_template = false to give prompts as plain text"
            )
        if not data.chat_template and data.system_prompt is not None:
            raise ModelError("data.system_prompt is part of a chat template: leave it out, or set data.chat_template = true")

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids that a response continues. Raises `DataError` when the chat template refuses the messages."""
        if prompt.text is not None:
            ids = Rendered(self.control, prompt.text).ids(add_special_tokens=True)
            eos = self.tokenizer.eos_token_id
            return ids[:-1] if len(ids) > 1 and eos is not None and ids[-1] == eos else ids
        return self._ids(self.rendered(prompt.messages, prompt.key, add_generation_prompt=True), prompt.key)

    def rendered(
        self, messages: Sequence[Message], key: str = "conversation", *, add_generation_prompt: bool | None = None
    ) -> Rendered:
        """The chat messages as a text, to be continued by a response: by default, unless they end with the assistant's turn.

        Raises `DataError` when the chat template refuses them.
        """
        is_asked = messages[-1].get("role") != "assistant" if add_generation_prompt is None else add_generation_prompt
        shown, hidden = self.control.hide(self._complete(messages))
        return Rendered(self.control, self._render(shown, key, add_generation_prompt=is_asked), hidden)

    def following(self, messages: Sequence[Message], key: str = "conversation") -> Rendered:
        """What stands between an answer and the next one: the end of the assistant's turn, `messages`, and the beginning of the
        next answer. The answer's own ids are left as they are.

        Raises `DataError` when the chat template refuses the messages there.
        """
        shown, hidden = self.control.hide(messages)
        before = self._complete([{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}])
        whole = Rendered(self.control, self._render([*before, *shown], key, add_generation_prompt=True), hidden)
        if (at := whole.text.find(_ANSWER)) < 0:
            raise DataError(f"{key}: the chat template leaves out what the assistant said before")
        return whole.part(at + len(_ANSWER))

    def extend(
        self, ids: Sequence[int], answer: Sequence[int], messages: Sequence[Message], key: str = "conversation"
    ) -> list[int]:
        """The ids of the next turn's prompt: those of the turns so far, the `answer` as it was sampled, and `messages`."""
        after = self._ids(self.following(messages, key), key)
        return [*ids, *answer, *after[has_ended(answer, after) :]]

    def text(self, ids: Sequence[int]) -> str:
        """The ids as text, special tokens left out."""
        decoded = self.tokenizer.decode(
            [int(token) for token in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(decoded)

    def whole_ids(self, conversation: str | Sequence[Message], key: str = "conversation") -> list[int]:
        """All of a text, or of chat messages without a generation prompt, as transformers' classifiers are given it.

        Raises `DataError` when the chat template refuses the messages.
        """
        if isinstance(conversation, str):
            return Rendered(self.control, conversation).ids(add_special_tokens=True)
        return self._ids(self.rendered(conversation, key, add_generation_prompt=False), key)

    def render_chat(self, messages: Sequence[Message], key: str = "conversation") -> tuple[list[int], list[int]]:
        """A whole conversation for supervised training: token ids `[T]` and loss mask `[T]`.

        The mask is 1 on what the assistant says: everything after the generation prompt, its end-of-turn token included, the
        template's white space behind that not. Each assistant turn begins where `prompt_ids` of the messages before it ends. A
        turn with `"train": False` is only context, and a template may do with it what it likes. Raises `DataError` when nothing
        is learned, or the template does not render a conversation as an extension of its beginning, so that what belongs to a
        turn cannot be told.
        """
        messages, hidden = self.control.hide(self._complete(messages))
        rendered = Rendered(self.control, self._render(messages, key), hidden)
        whole = rendered.text
        ids: list[int] = []
        mask: list[int] = []
        done = 0
        for index, message in enumerate(messages):
            if message.get("role") != "assistant" or not message.get("train", True):
                continue
            before = self._render(messages[:index], key, add_generation_prompt=True)
            after = whole if index == len(messages) - 1 else self._render(messages[: index + 1], key)
            if not (after.startswith(before) and whole.startswith(after) and len(before) >= done):
                raise DataError(
                    f"{key}: the chat template does not render message {index + 1} as an extension of the messages before it "
                    "(some templates drop or rewrite earlier turns), so its loss mask cannot be told: use one row for each "
                    "assistant turn, or another template"
                )
            context = self._ids(rendered.part(done, len(before)), key)
            turn = self._ids(rendered.part(len(before), len(after)), key)
            trained = self._num_trained(turn)
            ids += context + turn
            mask += [0] * len(context) + [1] * trained + [0] * (len(turn) - trained)
            done = len(after)
        if not any(mask):
            raise DataError(f"{key}: the conversation has no assistant message to learn from")
        rest = self._ids(rendered.part(done), key)
        return ids + rest, mask + [0] * len(rest)

    def _num_trained(self, turn: Sequence[int]) -> int:
        """Length of an assistant turn up to its end-of-turn token, without the template's white space after it."""
        special = set(self.tokenizer.all_special_ids) | set(getattr(self.tokenizer, "added_tokens_decoder", {}))
        for position in range(len(turn) - 1, -1, -1):
            if turn[position] in special:
                return position + 1
            if self.tokenizer.decode([turn[position]], clean_up_tokenization_spaces=False).strip():
                break
        return len(turn)

    def _complete(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        plain = [dict(message) for message in messages]
        if self._data.system_prompt is not None and not any(message.get("role") == "system" for message in plain):
            plain.insert(0, {"role": "system", "content": self._data.system_prompt})
        return plain

    def _render(self, messages: Sequence[dict[str, Any]], key: str, *, add_generation_prompt: bool = False) -> str:
        if not self._data.chat_template:
            raise DataError(
                f"{key}: chat messages cannot be rendered with data.chat_template = false; give the prompt as a text"
            )
        shown = [{name: value for name, value in message.items() if name != "train"} for message in messages]
        try:
            rendered = self.tokenizer.apply_chat_template(
                shown, tokenize=False, add_generation_prompt=add_generation_prompt, **self._data.template_options
            )
        except Exception as error:  # templates are programs: jinja's own errors, and whatever else one raises
            raise DataError(f"{key}: the chat template refuses these messages: {type(error).__name__}: {error}") from error
        return str(rendered)

    def _ids(self, rendered: Rendered, key: str) -> list[int]:
        try:
            return rendered.ids()
        except DataError as error:
            raise DataError(f"{key}: {error}") from error


def has_ended(answer: Sequence[int], following: Sequence[int]) -> bool:
    """Whether an answer's last token is the end of its turn, with which `following` begins: one that was cut off has none."""
    return len(answer) > 0 and len(following) > 0 and answer[-1] == following[0]
