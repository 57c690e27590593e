"""The configuration of `relax sft`: supervised training, for example as the warm start of a run's models."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax.config.base import Section
from relax.config.data import DataConfig, EvalConfig
from relax.config.reward import RewardConfig, leaves
from relax.config.train import BackendConfig, TorchBackendConfig


class PolicyTaskConfig(Section):
    """A language model learns to say what the assistant says."""

    type: Literal["policy"] = "policy"
    """Name of the task."""
    loss_on: Literal["assistant", "last"] = "assistant"
    """Which turns are learned: all of the assistant's, or the last one only. A message's own `"train"` (true, false) or
    `"weight"` (1, 0) comes before."""


class RewardModelTaskConfig(Section):
    """A sequence classifier with one label learns to score responses."""

    type: Literal["reward_model"] = "reward_model"
    """Name of the task."""
    loss: Literal["bradley_terry", "squared", "logistic"] = "bradley_terry"
    """`bradley_terry` learns from pairs that the better response has the higher reward; `squared` and `logistic` learn the
    number in the column `label_key`, as a reward or as the probability that the reward's sigmoid is."""
    chosen_key: str = "chosen"
    """Column of a pair with the better response: a text, or a list of chat messages that ends with it."""
    rejected_key: str = "rejected"
    """Column of a pair with the worse response, in the same form."""
    margin_key: str | None = None
    """Column with a number by which the better response's reward should be higher. Unset: 0."""
    label_key: str = "label"
    """Column with the number that `squared` and `logistic` learn; the response is in the answer column."""


class CriticTaskConfig(Section):
    """A token classifier with one label learns, before each token of a response, the reward that it came to."""

    type: Literal["critic"] = "critic"
    """Name of the task."""
    reward_key: str = "reward"
    """Column with the reward of the response."""


TaskConfig = Annotated[PolicyTaskConfig | RewardModelTaskConfig | CriticTaskConfig, Field(discriminator="type")]


class SFTModelConfig(Section):
    """Which weights are trained: those of a folder, or a model built on the spot."""

    path: str | None = None
    """Folder with a Hugging Face model. Not together with `model.build`."""
    build: Literal["tiny", "small", "tiny-vl", "tiny-omni", "tiny-whisper"] | None = None
    """A model with random weights and a tokenizer of its own, without a download. A Qwen3: `tiny`, about a million parameters;
    `small`, two million, with the same tokenizer. `tiny-vl`: a Qwen3-VL for images and videos; `tiny-omni`: a Qwen3-Omni, which
    hears as well; `tiny-whisper`: a Whisper that hears two seconds; all under a million."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights."""
    trust_remote_code: bool = False
    """Let the model folder bring its own Python code. Off, since that code runs with your rights."""


class SFTTrainConfig(Section):
    """Optimizer and batches."""

    num_steps: int = Field(ge=1)
    """Number of optimizer steps; fewer when `eval.stop_at` is reached."""
    batch_size: int = Field(32, ge=1)
    """Rows of one optimizer step."""
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, down to `min_lr_ratio` at `num_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Last learning rate over the peak one, for `linear` and `cosine`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averaging coefficients."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay, on matrices only."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest global norm of the gradient."""
    max_tokens_per_micro_batch: int = Field(8192, ge=1)
    """Budget of one forward and backward pass: tokens, and on top of them the work of encoding media, in tokens. A longer
    conversation makes a micro-batch of its own."""
    backend: BackendConfig = TorchBackendConfig()
    """The training back end."""


class SFTEvalConfig(EvalConfig):
    """Held-out evaluation. A policy answers prompts, and the mean reward counts; with a reward model the share of pairs that it
    gets right; where numbers are learned, their correlation with what the model says."""

    every: int = Field(50, ge=1)
    """Evaluate every so many steps, and after the last one."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 takes the most likely token."""
    max_new_tokens: int = Field(128, ge=1)
    """Longest response, in tokens."""
    stop_at: float | None = None
    """Stop as soon as the evaluation gives at least this. Default: train for `train.num_steps`."""


class SFTOutputConfig(Section):
    """Where the model goes."""

    path: str
    """Folder that the trained model is written to, complete or not at all."""
    overwrite: bool = False
    """Replace the folder if it is there."""


class SFTConfig(Section):
    """One supervised fine-tuning: a TOML file with a table for each section."""

    seed: int = 0
    """Seed of data order, of a built model's weights, and of sampling in evaluations."""
    model: SFTModelConfig
    """Where training starts."""
    data: DataConfig
    """Conversations. The answer column holds the response; a list of chat messages that ends with an assistant's turn is taken
    as it is."""
    task: TaskConfig = PolicyTaskConfig()
    """What is trained."""
    train: SFTTrainConfig
    """Optimizer and batches."""
    output: SFTOutputConfig
    """Where the model goes."""
    eval: SFTEvalConfig | None = None
    """Held-out evaluation; for a policy it needs `[reward]`."""
    reward: RewardConfig | None = None
    """How a policy's responses are scored in evaluations."""

    @model_validator(mode="after")
    def _refuse_what_does_not_fit(self) -> "SFTConfig":
        if (self.model.path is None) == (self.model.build is None):
            built = '"tiny", "small", "tiny-vl", "tiny-omni" or "tiny-whisper"'
            raise ValueError(f"give either model.path, a folder with a model, or model.build = {built}")
        if self.task.type == "policy":
            if self.eval is not None and self.reward is None:
                raise ValueError('[eval] scores responses: it needs a [reward] section, for example type = "exact"')
            asking = [one.type for one in leaves(self.reward) if one.type in ("genrm", "reward_model")] if self.reward else []
            if asking:
                raise ValueError(
                    f'reward.type = "{asking[0]}" asks a role of a run, and relax sft has none: use another reward'
                )
            return self
        what = f'task.type = "{self.task.type}" is evaluated on the rows of eval.data and generates nothing'
        if self.reward is not None:
            raise ValueError(f"{what}: leave [reward] out")
        if self.eval is not None and (of_sampling := _OF_SAMPLING & self.eval.model_fields_set):
            raise ValueError(f"{what}: leave eval.{min(of_sampling)} out")
        return self


_OF_SAMPLING = {"samples_per_prompt", "temperature", "max_new_tokens"}
