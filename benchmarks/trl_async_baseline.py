"""The asynchronous peer: TRL's AsyncGRPOTrainer on a CPU, on the same work as `trl_baseline.py`. Runs in a Python that has TRL.

    PYTHON benchmarks/trl_async_baseline.py --model FOLDER --data prompts.jsonl --steps 20 --out async.json

Two of its parts need CUDA and are replaced here, both where TRL provides for it or by the same function on torch:
  - the attention kernel that it fetches from a hub -> scaled_dot_product_attention over the same variable-length interface
  - vLLM server and NCCL weight transfer -> a child process that generates with transformers and reads weights from shared
    memory (`rollout_worker=`, `weight_transfer=`)
One thread for the trainer, one for the generator.
"""

import argparse
import json
import os
import queue
import tempfile
import time
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_baseline import arguments, exact, read_rows, summary


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float | None = None,
    **ignored: Any,
) -> Tensor:
    """Causal attention over sequences laid end to end, `[T, H, D]`, right-aligned where keys are more than queries."""
    num_q, num_k = cu_q[1:] - cu_q[:-1], cu_k[1:] - cu_k[:-1]
    at_q, at_k = torch.arange(int(max_q)), torch.arange(int(max_k))
    has_q, has_k = at_q[None] < num_q[:, None], at_k[None] < num_k[:, None]
    padded_q = q.new_zeros(*has_q.shape, *q.shape[1:])
    padded_k = k.new_zeros(*has_k.shape, *k.shape[1:])
    padded_v = torch.zeros_like(padded_k)
    padded_q[has_q], padded_k[has_k], padded_v[has_k] = q, k, v
    seen = has_k[:, None, :] & (at_k[None, None] <= at_q[None, :, None] + (num_k - num_q)[:, None, None])
    seen = seen | (at_k == 0)[None, None]  # padding looks at something, to stay finite
    out = F.scaled_dot_product_attention(
        padded_q.transpose(1, 2),
        padded_k.transpose(1, 2),
        padded_v.transpose(1, 2),
        attn_mask=seen[:, None],
        scale=softmax_scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2)[has_q]


def generate_forever(args: argparse.Namespace, shared: dict[str, Tensor], version: Any, out: Any, stop: Any) -> None:
    """The child process: groups of samples with their advantages, always with the newest weights."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    parameters, rows = dict(model.named_parameters()), read_rows(args.data)
    held, first = -1, 0
    while not stop.is_set():
        newest = version.value
        if newest < 0 or out.qsize() > 2 * args.prompts * args.group:
            time.sleep(0.005)
            continue
        if newest != held:
            with torch.no_grad():
                for name, weight in shared.items():
                    parameters[name].copy_(weight)
            held = newest
        chosen = [rows[(first + index) % len(rows)] for index in range(args.prompts) for _ in range(args.group)]
        prompt = tokenizer([row["prompt"] for row in chosen], return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            made = model.generate(
                **prompt,
                max_new_tokens=args.max_new,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        width = prompt["input_ids"].size(1)
        new = made.sequences[:, width:]
        logprobs = torch.stack(
            [
                F.log_softmax(logits.float(), -1).gather(1, new[:, step : step + 1])[:, 0]
                for step, logits in enumerate(made.logits)
            ],
            1,
        )
        lengths = [[*ids.tolist(), tokenizer.eos_token_id].index(tokenizer.eos_token_id) + 1 for ids in new]
        lengths = [min(length, new.size(1)) for length in lengths]
        texts = [tokenizer.decode(ids[:length], skip_special_tokens=True) for ids, length in zip(new, lengths, strict=True)]
        rewards = torch.tensor(exact([], texts, [row["answer"] for row in chosen]))
        groups = rewards.view(-1, args.group)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        for index, length in enumerate(lengths):
            pad = int((prompt["attention_mask"][index] == 0).sum())
            size = width - pad
            out.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=torch.cat([prompt["input_ids"][index, pad:], new[index, :length]]).numpy(),
                    completion_mask=np.array([0] * size + [1] * length),
                    old_log_probs=np.concatenate([np.zeros(size, np.float32), logprobs[index, :length].numpy()]),
                    advantage=float(advantages[index]),
                    model_version=held,
                    group_id=first + index // args.group,
                    metrics={"reward": float(rewards[index])},
                    enqueued_at=time.time(),
                )
            )
        first += args.prompts


class Worker:
    """TRL's face of a rollout worker, over the child process."""

    def __init__(self, args: argparse.Namespace, shared: dict[str, Tensor]) -> None:
        context = mp.get_context("spawn")
        self.rollout_buffer, self.metrics_queue = context.Queue(), queue.Queue()  # type: ignore[var-annotated]
        self.version, self.stopping = context.Value("i", -1), context.Event()
        wanted = (args, shared, self.version, self.rollout_buffer, self.stopping)
        self.process = context.Process(target=generate_forever, args=wanted, daemon=True)

    def start(self) -> None:
        self.process.start()

    def stop(self) -> None:
        self.stopping.set()
        self.process.join(5)
        self.process.terminate()

    def update_model_version(self, version: int) -> None:
        self.version.value = version

    def check_health(self, seconds: float) -> None:
        if not self.process.is_alive():
            raise RuntimeError("the generating process died")


class SharedWeights:
    """TRL's face of a weight transfer, over shared memory."""

    def __init__(self, shared: dict[str, Tensor]) -> None:
        self.shared = shared

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...

    def send_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.shared[name].copy_(weight)


def main() -> None:
    parser = arguments(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro", type=int, default=64)
    parser.add_argument("--staleness", type=int, default=4)
    args = parser.parse_args()

    import trl
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    torch.set_num_threads(args.threads)
    async_grpo_trainer.get_peak_flops_per_device = lambda *a, **k: 1e12  # it would ask CUDA for the device's name
    kernel = type("Kernel", (), {"flash_attn_varlen_func": staticmethod(varlen_attention)})
    packing._flash_attn = lambda: kernel
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    shared = {name: weight.detach().clone().share_memory_() for name, weight in model.named_parameters()}
    batch = args.prompts * args.group
    worker = Worker(args, shared)
    steps: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        wall = cpu = 0.0

        def on_train_begin(self, a, state, control, **k):  # type: ignore[no-untyped-def]
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, a, state, control, **k):  # type: ignore[no-untyped-def]
            wall, cpu = time.perf_counter(), time.process_time()
            rewards = trainer._metrics["train"]["reward"][-(batch // args.micro) :]
            row = {"step": state.global_step, "reward": sum(rewards) / len(rewards)}
            row |= {"step_s": wall - self.wall, "cpu_s": cpu - self.cpu}
            self.wall, self.cpu = wall, cpu
            steps.append(row)
            print({key: round(value, 3) for key, value in row.items()}, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        config = AsyncGRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            seed=args.seed,
            per_device_train_batch_size=args.micro,
            gradient_accumulation_steps=batch // args.micro,
            num_generations=args.group,
            max_steps=args.steps,
            token_budget=0,
            max_completion_length=args.max_new,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            max_staleness=args.staleness,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            weight_decay=0.0,
            logging_steps=10,
            dataloader_pin_memory=False,
        )
        trainer = AsyncGRPOTrainer(
            model=args.model,
            args=config,
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
            callbacks=[Clock()],
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "made by the worker"}]}] * 64),
            rollout_worker=worker,
            weight_transfer=SharedWeights(shared),
        )
        try:
            trainer.train()
        finally:
            worker.stop()
    result = summary("TRL AsyncGRPO", trl.__version__, batch, steps, skip=3)
    if args.out:
        args.out.write_text(json.dumps(result), "utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "steps"}))


if __name__ == "__main__":
    main()
