"""`[teacher]`: the model that a policy is distilled from, loaded here or behind a server."""

from typing import Literal

from pydantic import Field, model_validator

from relax.config.base import Section
from relax.config.model import ModelConfig


class TeacherServerConfig(Section):
    """A teacher that an inference server holds. It is asked about the tokens of each sample, one request a sample."""

    url: str = Field(pattern=r"^https?://[^\s]+$")
    """Address of the server, without the protocol's own path: `http://10.0.0.7:8000`."""
    protocol: Literal["vllm", "sglang", "openai"] = "vllm"
    """`vllm`: `/v1/completions` with `prompt_logprobs`. `sglang`: `/generate` with `return_logprob`. `openai`:
    `/v1/completions` with `echo`, of any server that takes token ids for a prompt; not for `opd_full`, since it names other
    tokens by their text."""
    model: str | None = None
    """The model's name on the server. Unset: none is sent, which a server with one model accepts."""
    api_key_env: str | None = None
    """Environment variable with a key, sent as `Authorization: Bearer`."""
    headers: dict[str, str] = {}
    """Sent with each request."""
    max_requests: int = Field(16, ge=1)
    """Requests at once."""
    request_time_limit_s: float = Field(20.0, gt=0)
    """Longest time of one request, in seconds."""
    retries: int = Field(6, ge=0)
    """How often a request is sent again: no connection, no answer in time, status 408, 425, 429 or 5xx."""
    backoff_s: float = Field(0.5, gt=0)
    """Pause before the first repetition, in seconds; it doubles each time, unless the server says when."""
    time_limit_s: float = Field(60.0, gt=0)
    """Longest time for all requests about one sample, in seconds. Then it is left out of training."""
    max_failed_in_a_row: int = Field(100, ge=1)
    """The run stops when so many samples in a row got no answer."""


class TeacherConfig(Section):
    """The teacher of on-policy distillation. It scores what the policy wrote and never learns. Its tokenizer has to be that of
    the policy."""

    model: ModelConfig | None = None
    """Weights of the teacher. Not together with `teacher.server`."""
    server: TeacherServerConfig | None = None
    """The server that holds it."""

    @model_validator(mode="after")
    def _one_teacher(self) -> "TeacherConfig":
        if (self.model is None) == (self.server is None):
            raise ValueError("give either teacher.model.path, a folder with a model, or teacher.server.url")
        return self
