"""The peer: TRL's GRPOTrainer on a CPU, on the work that `step_vs_trl.py` writes down. Runs in a Python that has TRL.

    PYTHON benchmarks/trl_baseline.py --model FOLDER --data prompts.jsonl --steps 20 --out sync.json

`prompts.jsonl` holds one `{"prompt", "answer"}` a line; the answer is what follows the last "=" of a response. Nothing of relax
is imported. Times are seconds of wall clock, and of CPU of this process with all its threads, for each optimizer step.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options that both TRL trainers share."""
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--data", required=True, help="jsonl with prompt and answer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--max-new", type=int, default=24)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser


def read_rows(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def exact(prompts: list[str], completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1.0 where the text after the last "=" is the answer."""
    given = [text.rpartition("=")[2].strip() if "=" in text else None for text in completions]
    return [float(a == b) for a, b in zip(given, answer, strict=True)]


def summary(name: str, version: str, samples: int, steps: list[dict[str, float]], skip: int) -> dict[str, object]:
    """Medians over the steps after `skip`; the reward curve is whole."""
    timed = steps[skip:] or steps
    return {
        "name": name,
        "version": version,
        "samples_a_step": samples,
        "step_s": statistics.median(step["step_s"] for step in timed),
        "cpu_s": statistics.median(step["cpu_s"] for step in timed),
        "steps": steps,
    }


def main() -> None:
    parser = arguments(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro", type=int, default=256, help="samples of one forward and backward pass")
    args = parser.parse_args()

    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    batch = args.prompts * args.group
    phases: dict[str, float] = defaultdict(float)
    steps: list[dict[str, float]] = []

    @contextmanager
    def timed(phase: str):  # type: ignore[no-untyped-def]
        started = time.perf_counter()
        yield
        phases[phase] += time.perf_counter() - started

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *a, **k):  # type: ignore[no-untyped-def]
            with timed("generation_s"):
                return super()._generate_single_turn(*a, **k)

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **k):  # type: ignore[no-untyped-def]
            phases.clear()
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, args, state, control, **k):  # type: ignore[no-untyped-def]
            wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
            metrics = trainer._metrics["train"]
            row = {"step": state.global_step, "reward": metrics["reward"][-1], "step_s": wall, "cpu_s": cpu, **phases}
            row["length"] = metrics["completions/mean_length"][-1]
            steps.append(row)
            print({key: round(value, 3) for key, value in row.items()}, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            fp16=False,
            seed=args.seed,
            per_device_train_batch_size=args.micro,
            gradient_accumulation_steps=batch // args.micro,
            num_generations=args.group,
            max_steps=args.steps,
            max_completion_length=args.max_new,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="dapo",
            scale_rewards="group",
            gradient_checkpointing=False,
            logging_steps=10,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
            args=config,
            reward_funcs=exact,
            train_dataset=Dataset.from_list(read_rows(args.data)),
            callbacks=[Clock()],
        )
        trainer.train()
    result = summary("TRL GRPO", trl.__version__, batch, steps, skip=2)
    if args.out:
        args.out.write_text(json.dumps(result), "utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "steps"}))


if __name__ == "__main__":
    main()
