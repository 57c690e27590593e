"""`relax sft`: from a TOML file to a fine-tuned model folder."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from relax.config.load import read_config_file, validate
from relax.config.sft import SFTConfig
from relax.errors import ConfigError

if TYPE_CHECKING:
    from relax.train.sft import SFTStep


def load_sft_config(run_file: Path, overrides: list[str]) -> SFTConfig:
    """Reads the file and applies `section.key=value` overrides. Raises `ConfigError` with a line for each mistake."""
    raw = read_config_file(run_file)
    strange = sorted({"rollout", "algorithm", "run"} & set(raw))
    if strange:
        raise ConfigError(
            f"{run_file}: has [{strange[0]}], so it is a run of relax train; relax sft takes [model], [data], [train], "
            "[output], [task] and, to stop in time, [eval] and [reward]"
        )
    return validate(SFTConfig, raw, overrides, str(run_file))


def sft(run_file: Path, overrides: list[str]) -> int:
    """Trains, shows how it goes, and returns the exit code. Raises `RelaxError` for what the user can mend."""
    config = load_sft_config(run_file, overrides)
    # here, since torch and transformers take seconds to import and a mistake in the file should show at once
    from transformers.utils import logging

    from relax.train.sft import run_sft

    logging.disable_progress_bar()  # of loading and saving, between lines that say more
    started = time.monotonic()

    def show(step: "SFTStep") -> None:
        if step.score or step.step % 20 == 0:
            held_out = f"  held-out {step.score}" if step.score else ""
            sys.stdout.write(f"step {step.step:5d}  loss {step.loss:.3f}{held_out}  {time.monotonic() - started:5.0f} s\n")
            sys.stdout.flush()

    result = run_sft(config, on_step=show)
    held_out = f", held-out {result.score}" if result.score else ""
    sys.stdout.write(f"wrote {result.path}: {result.step} steps{held_out}\n")
    if result.num_skipped:
        sys.stdout.write(f'{result.num_skipped} bad rows were left out (data.on_bad_row = "skip")\n')
    return 0
