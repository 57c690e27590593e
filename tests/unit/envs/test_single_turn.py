"""One group, played with a scripted engine: alignment, outcomes, and nothing is encoded again."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.envs.single_turn import play_single_turn
from relax.errors import EngineError, RewardError
from relax.rewards.result import RewardResult
from relax.types import Completion, FinishReason, GenerateRequest, Outcome, Prompt, Sample, Sampling, VersionSegment

PROMPT = Prompt("train.jsonl:3", messages=({"role": "user", "content": "1+1=?"},), answer="2")
SAMPLING = Sampling(max_new_tokens=8, temperature=0.7)


def completion(
    ids: Sequence[int], finish: FinishReason = FinishReason.STOP, versions: Sequence[tuple[int, int]] = ((0, 4),)
) -> Completion:
    return Completion(
        np.array(ids, np.int32),
        -np.arange(1, len(ids) + 1, dtype=np.float32),
        tuple(VersionSegment(*segment) for segment in versions),
        finish,
    )


class Scripted:
    """An engine and a reward that say what they are told, and remember what they were asked."""

    def __init__(self, completions: list[Completion], results: list[RewardResult] | None = None) -> None:
        self.completions, self.results = completions, results
        self.requests: list[GenerateRequest] = []
        self.scored: list[str] = []

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.requests.append(request)
        return self.completions

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        assert prompt is PROMPT
        self.scored += responses
        return self.results if self.results is not None else [RewardResult(float(len(text))) for text in responses]

    async def play(self, prompt_ids: Sequence[int] = (1, 2, 3)) -> list[Sample]:
        return await play_single_turn(
            prompt=PROMPT,
            group_id=7,
            prompt_ids=prompt_ids,
            seeds=range(len(self.completions)),
            sampling=SAMPLING,
            generate=self.generate,
            score=self.score,
            to_text=lambda ids: "".join(map(chr, ids)),
        )


@given(
    prompt_length=st.integers(1, 9),
    response=st.lists(st.integers(32, 90), min_size=1, max_size=9),
    cut=st.integers(1, 8),
)
async def test_every_array_speaks_of_the_same_tokens(prompt_length: int, response: list[int], cut: int) -> None:
    versions = ((0, 4), (cut, 5)) if cut < len(response) else ((0, 4),)
    [sample] = await Scripted([completion(response, versions=versions)]).play(range(prompt_length))
    assert sample.tokens.tolist() == [*range(prompt_length), *response]
    assert sample.loss_mask.tolist() == [0] * prompt_length + [1] * len(response)
    assert sample.rollout_logprobs.tolist() == [0.0] * prompt_length + [-float(i + 1) for i in range(len(response))]
    assert (sample.tokens.dtype, sample.loss_mask.dtype, sample.rollout_logprobs.dtype) == (np.int32, np.uint8, np.float32)
    assert sample.versions == tuple(VersionSegment(start + prompt_length, version) for start, version in versions)
    assert sample.oldest_version == 4
    assert [(turn.role, turn.start, turn.end) for turn in sample.turns] == [
        ("user", 0, prompt_length),
        ("assistant", prompt_length, len(sample.tokens)),
    ]


async def test_the_engine_is_asked_once_for_the_whole_group() -> None:
    scripted = Scripted([completion([65]), completion([66])])
    samples = await scripted.play()
    assert scripted.requests == [GenerateRequest("7", (1, 2, 3), (0, 1), SAMPLING)]
    assert [(sample.group_id, sample.index) for sample in samples] == [(7, 0), (7, 1)]
    assert samples[1].metadata == {"prompt": "train.jsonl:3", "response": "B", "answer": "2"}


async def test_only_what_ended_by_itself_or_at_the_limit_is_scored() -> None:
    scripted = Scripted(
        [
            completion([65]),
            completion([66, 67], FinishReason.LENGTH),
            completion([68], FinishReason.ABORT),
            completion([], FinishReason.ABORT, ()),
            completion([], FinishReason.LENGTH, ()),
        ]
    )
    samples = await scripted.play()
    assert [sample.outcome for sample in samples] == [Outcome.OK, Outcome.TRUNCATED, *[Outcome.ABORTED] * 3]
    assert [sample.reward for sample in samples] == [1.0, 2.0, None, None, None]
    assert scripted.scored == ["A", "BC"]


async def test_a_response_that_cannot_be_scored_has_no_reward_and_says_why() -> None:
    scripted = Scripted([completion([65])] * 2, [RewardResult(0.5, {"form": 1.0}), RewardResult.failed("it hung")])
    good, bad = await scripted.play()
    assert (good.reward, good.reward_parts, good.outcome) == (0.5, {"form": 1.0}, Outcome.OK)
    assert (bad.reward, bad.outcome, bad.metadata["error"]) == (None, Outcome.REWARD_ERROR, "it hung")


async def test_what_does_not_fit_is_an_error_and_not_a_sample() -> None:
    short = completion([65, 66])
    short.logprobs = short.logprobs[:1]
    with pytest.raises(EngineError, match="1 log-probs for 2 tokens"):
        await Scripted([short]).play()
    with pytest.raises(EngineError, match="no policy version"):
        await Scripted([completion([65], versions=())]).play()
    with pytest.raises(RewardError, match="0 rewards came back for 1 responses"):
        await Scripted([completion([65])], []).play()

    async def broken(request: GenerateRequest) -> list[Completion]:
        raise EngineError("lost")

    scripted = Scripted([completion([65])])
    scripted.generate = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="lost"):
        await scripted.play()
