"""A tiny Qwen3 built on the spot: about a million parameters, a byte-level tokenizer, a ChatML chat template. No download.

The tokenizer is trained on Python's own standard library, which is on every machine, and on addition problems. The model has
random weights: `relax sft` gives it a warm start. What the folder holds is what any Qwen3 folder holds, so that everything
which works on it works on a real model.
"""

import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relax.data.arithmetic import addition
from relax.errors import ModelError

# The turns of a chat, Qwen's way; a tool's answer is a user's turn. The newline after a turn is not the assistant's own.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{ raise_exception('a message has role ' ~ message.role ~ '; known are system, user, assistant, tool') }}
{%- endif -%}
{{ '<|im_start|>' ~ ('user' if message.role == 'tool' else message.role) ~ '\\n' }}
{%- if message.role == 'tool' -%}
{{ '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
{%- else -%}
{{ message.content }}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (PAD, START, END)
_WORDS = "<|im_start|>system\nuser\nassistant\n<tool_response>\n"  # so that the template's words are whole tokens
_NUM_PROBLEMS = 500

# What `model.build` of relax sft names: arguments of `build_tiny_model`. They share a tokenizer, so one can teach another.
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {},
    "small": {"hidden_size": 192, "num_heads": 6, "num_kv_heads": 2, "intermediate_size": 576},
}


def build_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = 1024,
    num_layers: int = 4,
    hidden_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 384,
    max_context: int = 512,
) -> None:
    """Writes a Qwen3 with random float32 weights, fixed by `seed`, and its tokenizer to `folder`, for `from_pretrained`.

    The vocabulary has at most `vocab_size` tokens, digits are tokens of their own, and `<|im_end|>` ends a turn. Raises
    `ModelError` for sizes that do not fit one another.
    """
    if hidden_size % num_heads or num_heads % num_kv_heads or (hidden_size // num_heads) % 2:
        raise ModelError(
            f"tiny model: hidden_size {hidden_size} must be a multiple of num_heads {num_heads} with an even quotient, "
            f"and num_heads of num_kv_heads {num_kv_heads}"
        )
    if vocab_size < 256 + len(_SPECIAL):
        raise ModelError(f"tiny model: vocab_size {vocab_size} has no room for 256 bytes and {len(_SPECIAL)} special tokens")
    # here, since importing them takes seconds that a check or a help page need not spend
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(vocab_size, max_context)
    end, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state is not ours to change
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=end, pad_token_id=pad)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(
    vocab_size: int, max_context: int, named: Mapping[str, str] | None = None, chat_template: str = CHAT_TEMPLATE
) -> Any:
    """A byte-level BPE `PreTrainedTokenizerFast` with single digits and the chat template, the same at every call.

    `named` are special tokens besides, which the tokenizer gives by these names (`tokenizer.image_token`).
    """
    # here, for the same reason as above
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*_SPECIAL, *(named or {}).values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=chat_template,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": dict(named)} if named else {}),
    )


def _texts() -> Iterator[str]:
    """What the tokenizer is trained on. Each text counts as often as it is given."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-c]*.py")):
        yield file.read_text("utf-8", errors="ignore")
    for index in range(_NUM_PROBLEMS):
        row = addition(index, seed=0)
        yield f"{_WORDS}{row['prompt']}\n{row['solution']}\n"


if __name__ == "__main__":
    build_tiny_model(Path(sys.argv[1]))
