"""The work that the benchmarks do: column addition, its tokenizer, a small Qwen3 and a short supervised warm start.

    '00437+00085=' -> '21;21;50=522'      9 to 22 tokens, end of text included

Built on the spot and kept under `BENCH_DIR` (default: a folder in the temporary directory), so that whatever is measured
against one another starts from the very same weights. Needs torch, tokenizers and transformers, and nothing of relax.
"""

import os
import random
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

FOLDER = Path(os.environ.get("BENCH_DIR") or Path(tempfile.gettempdir()) / "relax-bench")
VOCAB = 2048
SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
    },
    "25m": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1408,
    },
}
_LR = {"tiny": 2e-3, "25m": 6e-4}
_BATCH, _MOST_STEPS, _EVERY, _GOOD_ENOUGH, _NUM_HELD_OUT = 64, 4000, 20, 0.22, 256


class Task:
    """Sums of two numbers, the longer one of `min_digits` to `max_digits` digits, worked out column by column.

    A column is the digit and the carry, from the right; then the answer. The seed fixes the sequence of problems.
    """

    def __init__(self, seed: int = 0, min_digits: int = 2, max_digits: int = 5) -> None:
        self._rng, self._low, self._high = random.Random(seed), min_digits, max_digits

    def sample(self) -> tuple[int, int]:
        digits = self._rng.randint(self._low, self._high)
        a, b = self._rng.randrange(10 ** (digits - 1), 10**digits), self._rng.randrange(10**digits)
        return (a, b) if self._rng.random() < 0.5 else (b, a)

    def samples(self, count: int) -> list[tuple[int, int]]:
        return [self.sample() for _ in range(count)]

    @staticmethod
    def prompt(a: int, b: int) -> str:
        return f"{a:05d}+{b:05d}="

    @staticmethod
    def solution(a: int, b: int) -> str:
        columns, carry, x, y = [], 0, a, b
        while x or y or not columns:
            total = x % 10 + y % 10 + carry
            carry = total // 10
            columns.append(f"{total % 10}{carry}")
            x, y = x // 10, y // 10
        return ";".join(columns) + f"={a + b}"

    @staticmethod
    def reward(prompt: str, completion: str) -> float:
        """1.0 where the text after the last "=" is the sum."""
        a, b = prompt.rstrip("=").split("+")
        return float("=" in completion and completion.rsplit("=", 1)[-1].strip() == str(int(a) + int(b)))


def make_tokenizer(vocab_size: int = VOCAB) -> Any:
    """Byte-level BPE with single digits, trained on Python's own standard library and on the task's text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    texts = [file.read_text("utf-8", errors="ignore") for file in files]
    texts += [Task.prompt(*pair) + Task.solution(*pair) for pair in Task(1234).samples(2000)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=["<|pad|>", "<|eos|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|eos|>", padding_side="left")


def build_model(size: str, tokenizer: Any, seed: int = 0) -> Any:
    """A float32 Qwen3 of one of the `SIZES` with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SIZES[size],
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def encode_prompts(tokenizer: Any, pairs: list[tuple[int, int]]) -> Tensor:
    """`[B, P]` int64; prompts of this task all have one length."""
    return torch.tensor([encode(tokenizer, Task.prompt(*pair)) for pair in pairs])


def encode_solved(tokenizer: Any, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """`(ids, mask, labels)`, each `[B, T]`, padded on the right; labels are -100 on prompts and padding."""
    prompts = [encode(tokenizer, Task.prompt(*pair)) for pair in pairs]
    answers = [[*encode(tokenizer, Task.solution(*pair)), tokenizer.eos_token_id] for pair in pairs]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(pairs), longest), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), longest), -100)
    mask = torch.zeros((len(pairs), longest), dtype=torch.long)
    for row, (p, a) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(p) + len(a)] = torch.tensor(p + a)
        labels[row, len(p) : len(p) + len(a)] = torch.tensor(a)
        mask[row, : len(p) + len(a)] = 1
    return ids, mask, labels


def evaluate(model: Any, tokenizer: Any, pairs: list[tuple[int, int]], max_new: int = 24) -> float:
    """Mean reward of one sampled completion of each pair, by transformers' own generation."""
    ids = encode_prompts(tokenizer, pairs)
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    texts = tokenizer.batch_decode(out[:, ids.size(1) :], skip_special_tokens=True)
    return sum(Task.reward(Task.prompt(*p), text) for p, text in zip(pairs, texts, strict=True)) / len(pairs)


def warm_start(size: str, folder: Path, seed: int = 0) -> None:
    """Supervised training until the mean reward of sampled completions is at least 0.22; saves model and tokenizer."""
    tokenizer = make_tokenizer()
    model = build_model(size, tokenizer, seed)
    task, held_out = Task(seed + 1), Task(seed + 99).samples(_NUM_HELD_OUT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR[size], betas=(0.9, 0.95), weight_decay=0.01)
    start = time.monotonic()
    for step in range(1, _MOST_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = _LR[size] * min(1.0, step / 50)
        ids, mask, labels = encode_solved(tokenizer, task.samples(_BATCH))
        loss = model.train()(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % _EVERY == 0 and float(loss) < 0.45:
            reward = evaluate(model.eval(), tokenizer, held_out)
            took = time.monotonic() - start
            print(f"warm start: step {step}, loss {float(loss):.3f}, reward {reward:.3f}, {took:.0f} s", file=sys.stderr)
            if reward >= _GOOD_ENOUGH:
                break
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:  # another benchmark was quicker: its weights are as good
        if not (folder / "config.json").exists():
            raise


def warm_folder(size: str = "tiny") -> Path:
    """The folder of the warm-started model, made at the first call (one to three minutes for `tiny`)."""
    folder = FOLDER / "models" / size
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        warm_start(size, folder)
    return folder


def load_warm(size: str = "tiny") -> tuple[Any, Any]:
    """The warm-started transformers model (float32) and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = warm_folder(size)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def load_random(size: str = "tiny") -> tuple[Any, Any]:
    """The same model with random weights, and its tokenizer: for timings that do not depend on what the model says."""
    tokenizer = make_tokenizer()
    return build_model(size, tokenizer), tokenizer
