"""The simplest interaction: one prompt, one response each, one reward each.

prompt ids -> generate (all seeds at once) -> Completion ids -> text -> score -> Samples
                                                   |
                                                   +-> Sample.tokens: the ids as they came, never encoded again
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.errors import EngineError, RewardError
from relax.rewards.result import RewardResult
from relax.types import Completion, FinishReason, GenerateRequest, Outcome, Prompt, Sample, Sampling, Turn, VersionSegment

Generate = Callable[[GenerateRequest], Awaitable[list[Completion]]]
Score = Callable[[Prompt, Sequence[str]], Awaitable[list[RewardResult]]]
ToText = Callable[[Sequence[int]], str]

OUTCOMES = {
    FinishReason.STOP: Outcome.OK,
    FinishReason.LENGTH: Outcome.TRUNCATED,
    FinishReason.ABORT: Outcome.ABORTED,
}


async def play_single_turn(
    *,
    prompt: Prompt,
    group_id: int,
    prompt_ids: Sequence[int],
    seeds: Sequence[int],
    sampling: Sampling,
    generate: Generate,
    score: Score,
    to_text: ToText,
    features: Mapping[str, NDArray[Any]] | None = None,
) -> list[Sample]:
    """One group: a sample for each seed, in their order. `features`: of the prompt's media, whose tokens `prompt_ids` hold.

    Aborted responses and empty ones are not scored. A response that cannot be scored keeps its tokens and has the outcome
    `REWARD_ERROR`, with the reason in `metadata["error"]`. Raises `EngineError` when generation fails, `RewardError` when
    rewards as a whole are unavailable.
    """
    request = GenerateRequest(str(group_id), tuple(prompt_ids), tuple(seeds), sampling, prompt.media, features=features or {})
    completions = await generate(request)
    if len(completions) != len(seeds):
        raise EngineError(f"group {group_id}: the engine returned {len(completions)} completions for {len(seeds)} seeds")
    samples = [
        to_sample(prompt, group_id, index, prompt_ids, completion, to_text) for index, completion in enumerate(completions)
    ]
    scored = [sample for sample in samples if sample.outcome.is_trainable]
    if scored:
        results = await score(prompt, [sample.metadata["response"] for sample in scored])
        if len(results) != len(scored):
            raise RewardError(f"group {group_id}: {len(results)} rewards came back for {len(scored)} responses")
        for sample, result in zip(scored, results, strict=True):
            take_reward(sample, result)
    return samples


def to_sample(
    prompt: Prompt, group_id: int, index: int, prompt_ids: Sequence[int], completion: Completion, to_text: ToText
) -> Sample:
    """The completion behind its prompt, not yet scored. Raises `EngineError` when its arrays do not fit each other."""
    start, length = len(prompt_ids), len(completion.token_ids)
    if len(completion.logprobs) != length:
        raise EngineError(f"group {group_id}: {len(completion.logprobs)} log-probs for {length} tokens")
    if length and (not completion.versions or completion.versions[0].start != 0):
        raise EngineError(f"group {group_id}: the first token has no policy version")
    outcome = OUTCOMES[completion.finish]
    if length == 0:
        outcome = Outcome.ABORTED  # nothing was sampled, so there is nothing to score or to train
    tokens = np.concatenate([np.asarray(prompt_ids, np.int32), np.asarray(completion.token_ids, np.int32)])
    mask = np.zeros(start + length, np.uint8)
    mask[start:] = 1
    logprobs = np.zeros(start + length, np.float32)
    logprobs[start:] = completion.logprobs
    role = prompt.messages[-1].get("role", "user") if prompt.messages else "user"
    return Sample(
        group_id=group_id,
        index=index,
        tokens=tokens,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        versions=tuple(VersionSegment(segment.start + start, segment.version) for segment in completion.versions),
        outcome=outcome,
        turns=(Turn(str(role), 0, start), Turn("assistant", start, start + length)),
        media=prompt.media,
        metadata={"prompt": prompt.key, "response": to_text(completion.token_ids.tolist()), "answer": prompt.answer},
    )


def take_reward(sample: Sample, result: RewardResult) -> None:
    """Puts a reward, or the reason why there is none, into the sample."""
    if result.outcome is Outcome.OK:
        sample.reward, sample.reward_parts = result.value, result.parts
    else:
        sample.outcome, sample.metadata = result.outcome, {**sample.metadata, "error": result.error}
