"""What an engine asks of a request before it takes it in hand: each refusal names the value and what would be right."""

from collections.abc import Sequence

import numpy as np

from relax.engines.engine import RequestError
from relax.types import Completion, GenerateRequest


def check_request(request: GenerateRequest, max_context: int, vocab_size: int, media_ids: Sequence[int] = ()) -> None:
    """Raises `RequestError` for a request that the embedded engine cannot serve."""
    name, sampling = request.request_id, request.sampling
    if (request.media or request.features) and not media_ids:
        what = f"{len(request.media)} media" if request.media else "features of media"
        raise RequestError(f"request {name!r} has {what}: the model of this engine reads text alone")
    if request.media and not request.features:
        raise RequestError(
            f"request {name!r} has {len(request.media)} media without features: the embedded engine decodes none"
        )
    if not len(request.prompt_ids):
        raise RequestError(f"request {name!r} has an empty prompt: there is nothing to continue")
    if len(request.prompt_ids) >= max_context:
        raise RequestError(
            f"request {name!r}: the prompt has {len(request.prompt_ids)} tokens and the context is {max_context}: "
            f"at most {max_context - 1} leave room for a response"
        )
    ids = np.asarray(request.prompt_ids)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise RequestError(
            f"request {name!r}: the prompt has token ids {int(ids.min())} to {int(ids.max())}, "
            f"the model's are 0 to {vocab_size - 1}"
        )
    if not request.features and np.isin(ids, media_ids).any():
        raise RequestError(f"request {name!r}: the prompt has tokens that stand for media, and no media")
    for what, value, is_right, wanted in (
        ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature, 0 <= sampling.temperature < float("inf"), "0 or more"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 (off) or more"),
        ("stop", sampling.stop, all(sampling.stop), "strings that are not empty"),
    ):
        if not is_right:
            raise RequestError(f"request {name!r}: {what} = {value!r}, wanted {wanted}")
    if request.partials and len(request.partials) != len(request.seeds):
        raise RequestError(
            f"request {name!r} has {len(request.partials)} partial completions for {len(request.seeds)} seeds: wanted one each"
        )
    for index, partial in enumerate(request.partials):
        _check_partial(f"request {name!r}: partial completion {index}", partial, vocab_size, media_ids)
        if len(request.prompt_ids) + len(partial.token_ids) > max_context:
            raise RequestError(
                f"request {name!r}: partial completion {index} has {len(partial.token_ids)} tokens after a prompt of "
                f"{len(request.prompt_ids)}, and the context is {max_context}"
            )


def _check_partial(what: str, partial: Completion, vocab_size: int, media_ids: Sequence[int]) -> None:
    num = len(partial.token_ids)
    if len(partial.logprobs) != num:
        raise RequestError(f"{what} has {len(partial.logprobs)} log-probs for {num} tokens")
    if not num:
        return
    starts = [segment.start for segment in partial.versions]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)):
        raise RequestError(f"{what} has version segments that begin at {starts}: wanted rising numbers from 0 on")
    if int(partial.token_ids.min()) < 0 or int(partial.token_ids.max()) >= vocab_size:
        raise RequestError(f"{what} has token ids outside of the model's, 0 to {vocab_size - 1}")
    if np.isin(partial.token_ids, media_ids).any():
        raise RequestError(f"{what} has tokens that stand for media, which no model writes")
