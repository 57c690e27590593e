"""The whole idea in one file: a tiny language model learns to add by reinforcement learning.

    sample a group of responses to each prompt -> score them -> compare within the group -> train -> load the new weights
      ^                                                                                                        |
      +--------------------------------------------------------------------------------------------------------+

This is the loop that `relax train` runs, on the same public pieces, without Ray and one thing after the other. What
`relax train` adds is that nobody waits for anybody: engines generate while the trainer trains (see docs/staleness.md).

    relax sft examples/arithmetic/sft.toml        # once: builds the model and teaches it what a sum looks like
    python examples/one_file_grpo.py              # settings come from arithmetic/run.toml, section.key=value overrides them
    python examples/one_file_grpo.py train.num_steps=5 rollout.prompts_per_step=8
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers.utils import logging

from relax.algorithms.advantages import advantages
from relax.bus.core import Core
from relax.bus.transfer_queue import QueueLimits
from relax.config import RunConfig, load_config
from relax.data.prompts import open_prompts
from relax.data.render import Renderer
from relax.data.tokenizer import load_tokenizer
from relax.engines.local import LocalEngine
from relax.rewards.table import make_scorer
from relax.train.backend import TrainBatch
from relax.train.torch_backend import TorchBackend
from relax.types import Completion, GenerateRequest, Prompt, Ragged, Sampling
from relax.weights.publisher import WeightPublisher

RUN_FILE = Path(__file__).parent / "arithmetic" / "run.toml"


@dataclass(slots=True)
class Group:
    """The responses to one prompt, and what each was worth."""

    number: int
    prompt: Prompt
    prompt_ids: list[int]
    completions: list[Completion]
    rewards: list[float]


class Policy:
    """The model, twice: the trainer's weights, which change, and the engine's, which generate and follow."""

    def __init__(self, config: RunConfig) -> None:
        self.trainer = TorchBackend(config)
        self.engine = LocalEngine(config.model, config.rollout.engine, name="engine")
        # Weights travel as they do between machines: announced on the queue, verified by digest and by a canary's log-probs.
        self.queue = Core(QueueLimits(prompts_per_step=config.rollout.prompts_per_step, max_staleness=0, num_steps=1))
        self.publisher = WeightPublisher(self.queue, run_id="one-file")
        self.version = -1

    async def sync(self) -> None:
        """Puts the trainer's weights into the engine. Until this is called once, the engine refuses to generate."""
        if self.version < 0:
            await self.queue.subscribe("engine")
        snapshot = self.publisher.snapshot(self.version + 1, self.trainer.weights(), self.trainer.canary())
        await self.publisher.publish(snapshot)
        manifest = await self.queue.next_manifest("engine", wait_s=60.0)
        assert manifest is not None, "nobody recalls the weights here"
        await self.engine.load_weights(manifest)  # raises if a single bit is wrong
        await self.queue.acknowledge("engine", manifest.version)
        self.version = manifest.version

    async def close(self) -> None:
        await self.engine.close()
        await self.publisher.close()
        await self.queue.close()


async def sample(config: RunConfig, policy: Policy, renderer: Renderer, number: int, prompt: Prompt) -> Group:
    """`group_size` responses to one prompt. A seed fixes each response, whatever else the engine is generating."""
    rollout = config.rollout
    prompt_ids = renderer.prompt_ids(prompt)
    request = GenerateRequest(
        request_id=str(number),
        prompt_ids=prompt_ids,
        seeds=[number * rollout.group_size + index for index in range(rollout.group_size)],
        sampling=Sampling(rollout.max_new_tokens, rollout.temperature),
    )
    completions = await policy.engine.generate(request)
    score = make_scorer(config.reward).call
    messages = [dict(message) for message in prompt.messages]
    rewards = [score(messages, renderer.text(c.token_ids), prompt.answer, dict(prompt.metadata)) for c in completions]
    return Group(number, prompt, prompt_ids, completions, rewards)


def to_batch(config: RunConfig, groups: Sequence[Group]) -> TrainBatch:
    """Samples as the trainer reads them: tokens, which of them the policy chose, how likely they were, how good they were.

    Every per-token column has the length of its sample; entry `t` speaks of token `t`. The tokens are those that the engine
    returned, never text encoded again.
    """
    tokens, masks, logprobs = [], [], []
    for group in groups:
        start = len(group.prompt_ids)
        for completion in group.completions:
            tokens.append(np.concatenate([np.asarray(group.prompt_ids, np.int32), completion.token_ids]))
            masks.append(np.concatenate([np.zeros(start, np.uint8), np.ones(len(completion.token_ids), np.uint8)]))
            logprobs.append(np.concatenate([np.zeros(start, np.float32), completion.logprobs]))
    group_ids = np.repeat([group.number for group in groups], [len(group.completions) for group in groups])
    loss_mask = Ragged.pack(masks)
    # The heart of GRPO: a response is as good as it beats its siblings, (reward - group mean) / group deviation. Where all of a
    # group are right, or all wrong, nothing can be learned, and the advantage is 0.
    rewards = np.array([reward for group in groups for reward in group.rewards], np.float64)
    made = advantages(
        config.algorithm,
        {"reward": rewards, "loss_mask": loss_mask},
        group_ids=group_ids,
        length_budget=config.rollout.max_new_tokens,
    )
    return TrainBatch(
        tokens=Ragged.pack(tokens),
        loss_mask=loss_mask,
        group_ids=group_ids,
        rollout_logprobs=Ragged.pack(logprobs),
        advantages=made["advantages"],
    )


async def train(config: RunConfig) -> list[float]:
    """The loop; returns the mean reward of every step."""
    renderer = Renderer(load_tokenizer(config.model), config.data)
    prompts = open_prompts(config.data, seed=config.run.seed)
    policy = Policy(config)
    per_step = config.rollout.prompts_per_step
    curve: list[float] = []
    try:
        for step in range(config.train.num_steps):
            started = time.perf_counter()
            await policy.sync()

            # The n-th prompt of a run depends on n and the seed alone. All groups are generated together: the engine takes as
            # many sequences at once as it has slots, and fills a slot again as soon as its sequence ends.
            numbers = range(step * per_step, (step + 1) * per_step)
            groups = await asyncio.gather(
                *(sample(config, policy, renderer, number, prompts.prompt(number)) for number in numbers)
            )
            generated = time.perf_counter()

            # One optimizer step. `forward_backward` may be called for parts of the batch, in any split: gradients are sums, and
            # `finish_step` divides them by the number of tokens in all of them.
            sums = policy.trainer.forward_backward(to_batch(config, groups))
            finished = policy.trainer.finish_step()

            rewards = [reward for group in groups for reward in group.rewards]
            lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
            curve.append(float(np.mean(rewards)))
            print(
                f"step {step + 1:3d}  reward {curve[-1]:.3f}  length {np.mean(lengths):4.1f}  "
                f"loss {sums.values()['loss']:+.4f}  gradient {finished['grad_norm']:.2f}  "
                f"generate {generated - started:.2f} s  train {time.perf_counter() - generated:.2f} s",
                flush=True,
            )
        shown = renderer.text(groups[0].completions[0].token_ids)
        print(f"for example: {groups[0].prompt.messages[-1]['content']!r} -> {shown!r}")
    finally:
        await policy.close()
    return curve


if __name__ == "__main__":
    logging.disable_progress_bar()  # of loading the model
    asyncio.run(train(load_config(RUN_FILE, sys.argv[1:])))
