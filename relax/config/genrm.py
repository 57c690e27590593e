"""`[genrm]`: judges, language models that say how good a response is, for `reward.type = "genrm"`."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from relax.config.base import Section
from relax.config.mistakes import nearest
from relax.config.model import ModelConfig
from relax.config.reward import GenRMRewardConfig
from relax.config.rollout import EngineConfig, LocalEngineConfig

_ROUTE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class JudgeSection(Section):
    """Settings that every judge shares."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature where the request names none; 0 takes the most likely token."""
    max_new_tokens: int = Field(512, ge=1)
    """Longest reply where the request names none, in tokens. A reply that it cuts off holds no verdict."""
    max_requests: int = Field(64, ge=1)
    """Requests at once; others wait."""
    request_time_limit_s: float = Field(60.0, gt=0)
    """Longest time of one request to the judge, in seconds."""
    media: bool | None = None
    """Show it the images, audio clips and videos of prompts. Default: a model of your own is shown what it reads, a server
    nothing."""


class LocalJudgeConfig(JudgeSection):
    """A model of your own, on engines that this run starts."""

    type: Literal["local"] = "local"
    """Kind of judge."""
    model: ModelConfig
    """The judge's weights, tokenizer and chat template."""
    template_options: dict[str, Any] = {}
    """Passed to the chat template, for example `enable_thinking = false`."""
    num_engines: int = Field(1, ge=1)
    """How many engines answer. They are beside those of the policy, in every mode."""
    engine: EngineConfig = LocalEngineConfig()
    """The engine."""

    def kinds_of(self, of_model: tuple[str, ...]) -> tuple[str, ...]:
        """The kinds of media that it is shown, given those that its model reads."""
        return () if self.media is False else of_model

    def fault_of_media(self, of_model: tuple[str, ...]) -> str | None:
        """What is wrong with `media` for a model that reads these kinds, if anything."""
        if self.media and not of_model:
            return f"media = true, and the model in {self.model.path} reads text alone: use one that sees, or leave media out"
        return None


class OpenAIJudgeConfig(JudgeSection):
    """A server that speaks OpenAI's chat protocol, as vLLM, SGLang and hosted models do."""

    type: Literal["openai"] = "openai"
    """Kind of judge."""
    url: str = Field(pattern=r"^https?://[^\s]+$")
    """Base of the API: `/chat/completions` follows, as in `http://127.0.0.1:8000/v1`."""
    model: str
    """Name of the model there."""
    api_key_env: str | None = None
    """Environment variable with a key, sent as `Authorization: Bearer`."""
    headers: dict[str, str] = {}
    """Sent with each request."""
    retries: int = Field(3, ge=0)
    """How often a request is sent again: no connection, no answer in time, status 408, 425, 429 or 5xx."""
    backoff_s: float = Field(0.5, gt=0)
    """Pause before the first repetition, in seconds; it doubles each time, unless the server says when."""
    max_media_bytes: int = Field(20 << 20, ge=1)
    """Most bytes of media in one request, as the files are stored; with more there is no reward."""


JudgeConfig = Annotated[LocalJudgeConfig | OpenAIJudgeConfig, Field(discriminator="type")]


class GenRMConfig(Section):
    """Judges by name, and what they have said already."""

    judges: dict[str, JudgeConfig] = Field(min_length=1)
    """Judges by routes, which are names of yours; rewards ask for one by `route`."""
    cache_entries: int = Field(10_000, ge=0)
    """Replies that are kept, the most recently used ones: those at temperature 0, and those with a seed. 0: none."""

    @field_validator("judges")
    @classmethod
    def _name_plainly(cls, judges: dict[str, JudgeConfig]) -> dict[str, JudgeConfig]:
        for route in judges:
            if not _ROUTE.fullmatch(route):
                raise ValueError(f"genrm.judges: {route!r} is no name of a judge: use letters, digits, - and _")
        return judges


def fault_of_route(reward: GenRMRewardConfig, genrm: GenRMConfig | None) -> str | None:
    """What is wrong with the judge that a reward asks, and what would be right; none when nothing is."""
    if genrm is None:
        return f'type = "genrm" asks a judge: add [genrm.judges.{reward.route}] with type = "local" or "openai"'
    judge = genrm.judges.get(reward.route)
    if judge is None:
        near = nearest(reward.route, genrm.judges)
        hint = f"; did you mean {near!r}?" if near else ""
        return f"route = {reward.route!r}: genrm.judges has {', '.join(genrm.judges)}{hint}"
    if reward.num_votes > 1 and reward.temperature is None and judge.temperature == 0:
        return (
            f"num_votes = {reward.num_votes}: all votes are the same at temperature 0: set reward.temperature, or "
            f"genrm.judges.{reward.route}.temperature, above 0"
        )
    return None
