"""Recorded samples: `samples/step_000012.jsonl` holds some of the samples that step 12 was trained on, as text."""

import re
from collections.abc import Iterator
from pathlib import Path

from relax.errors import ConfigError
from relax.observe.jsonl import Row, read_rows
from relax.types import Media, Outcome, Prompt, Sample


def sample_row(sample: Sample, prompt: Prompt) -> Row:
    """A sample for people to read. `media`: what its prompt shows, where it shows something; of what came inside a row, the
    kind alone."""
    shown = [{"kind": item.kind} | _source(item) for item in prompt.media]
    return {
        "group": sample.group_id,
        "index": sample.index,
        "prompt": prompt.key,
        "input": prompt.messages if prompt.text is None else prompt.text,
        **({"media": shown} if shown else {}),
        "response": sample.metadata.get("response"),
        "answer": sample.metadata.get("answer"),
        "reward": sample.reward,
        "parts": dict(sample.reward_parts),
        "outcome": str(Outcome(sample.outcome)),
        "version": sample.oldest_version,
        "tokens": len(sample.tokens),
    }


def _source(item: Media) -> Row:
    return {} if item.source.startswith("spool:") else {"source": item.source}


def samples_file(run_dir: Path, step: int) -> Path:
    """Where the samples of `step` are recorded."""
    return run_dir / "samples" / f"step_{step:06d}.jsonl"


def sampled_steps(run_dir: Path) -> list[int]:
    """The steps that have recorded samples, in order."""
    found = (re.fullmatch(r"step_(\d+)\.jsonl", path.name) for path in (run_dir / "samples").glob("step_*.jsonl"))
    return sorted(int(match[1]) for match in found if match)


def read_samples(run_dir: Path, step: int | None = None) -> list[Row]:
    """The samples of `step`, by default of the newest step that has any.

    Keys: those of `sample_row`. Raises `ConfigError`, with
    the steps that there are, when there are none of this one.
    """
    steps = sampled_steps(run_dir)
    if not steps or (step is not None and step not in steps):
        wanted = "samples" if step is None else f"samples of step {step}"
        there = f"; there are some of steps {steps[0]} to {steps[-1]}" if steps else " (observe.samples_per_step, first step)"
        raise ConfigError(f"{run_dir} has no {wanted}{there}")
    return read_rows(samples_file(run_dir, steps[-1] if step is None else step))


def best_and_worst(samples: list[Row]) -> Iterator[Row]:
    """The samples of highest and of lowest reward, as far as they differ; what a person looks at first."""
    scored = sorted((sample for sample in samples if sample.get("reward") is not None), key=lambda row: float(row["reward"]))
    if scored:
        yield scored[-1]
        if scored[0]["reward"] != scored[-1]["reward"]:
            yield scored[0]
