"""Fails unless the run in the given folder raised its reward: python reward_rose.py RUN [smallest rise]."""

import json
import sys
from pathlib import Path

EDGE = 3  # steps at either end over which the reward is averaged


def rise(rows: list[dict[str, float]]) -> tuple[float, float]:
    """Mean of `reward/mean` over the first and over the last steps."""
    rewards = [row["reward/mean"] for row in rows]
    return sum(rewards[:EDGE]) / EDGE, sum(rewards[-EDGE:]) / EDGE


def main() -> None:
    run = Path(sys.argv[1])
    smallest = float(sys.argv[2]) if len(sys.argv) > 2 else 0.03
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [row["step"] for row in rows]
    if len(rows) < 2 * EDGE or steps != sorted(set(steps)):
        sys.exit(f"{run}/metrics.jsonl: steps {steps}, wanted at least {2 * EDGE} in rising order, one line each")
    first, last = rise(rows)
    if not last >= first + smallest:
        sys.exit(f"the reward did not rise: {first:.3f} in the first {EDGE} steps, {last:.3f} in the last {EDGE}")
    print(f"reward {first:.3f} -> {last:.3f} in {len(rows)} steps")


if __name__ == "__main__":
    main()
