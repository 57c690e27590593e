"""A tiny Whisper, built on the spot: random weights, a window of two seconds, a token for each byte. No download."""

from pathlib import Path

from relax.data.transcripts import transcript_template

END = "<|endoftext|>"
_SPECIAL = ("startoftranscript", "en", "translate", "transcribe", "startofprev", "notimestamps")
_WINDOW_S, _TIMES, _BINS = 2, 101, 20


def build_tiny_whisper(folder: str | Path, *, seed: int = 0) -> None:
    """Writes a model with random float32 weights, fixed by `seed`, and its processor to `folder`."""
    # here, since importing them takes seconds that a check or a help page need not spend
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    names = [f"<|{name}|>" for name in _SPECIAL]
    vocabulary = {token: number for number, token in enumerate([*sorted(ByteLevel.alphabet()), END])}
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[], pad_token=END, extra_special_tokens=names)
    end, start, *_, before, no_times = tokenizer.convert_tokens_to_ids([END, *names])
    config = WhisperConfig(
        vocab_size=len(tokenizer) + _TIMES,
        d_model=64,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=_BINS,
        max_source_positions=50 * _WINDOW_S,
        max_target_positions=128,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        init_std=0.1,  # so that what it hears makes a difference before it has learned anything
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state is not ours to change
        torch.manual_seed(seed)
        model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        prev_sot_token_id=before,
        no_timestamps_token_id=no_times,
        suppress_tokens=list(range(end + 1, config.vocab_size)),
        is_multilingual=False,
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.chat_template = transcript_template(Path(folder))
    WhisperProcessor(WhisperFeatureExtractor(_BINS, chunk_length=_WINDOW_S), tokenizer).save_pretrained(folder)
