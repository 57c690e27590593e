"""reasoning-gym's own verifiers, for rows that `data.type = "reasoning_gym"` made."""

from collections.abc import Callable
from typing import Any

import reasoning_gym

from relax.config.reward import ReasoningGymRewardConfig
from relax.rewards.table import text_after

COMPARE_TUPLES = frozenset({"arc_agi", "rearc"})  # their verifiers compare grids as tuples, which JSON turns into lists


def make_reasoning_gym(config: ReasoningGymRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], float]:
    """The verifier's score, from 0.0 to 1.0, of the text after the last marker; 0.0 without text.

    Some verifiers raise on a text that is not of the expected kind. When the same verifier takes the row's own answer,
    such a response is wrong (0.0); otherwise the error is passed on.
    """
    datasets: dict[str, Any] = {}

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> float:
        if "entry" not in metadata or "task" not in metadata:
            raise ValueError('the row was not made by data.type = "reasoning_gym", so it has no verifier')
        given = text_after(response, config.marker)
        if not given:
            return 0.0
        task, options, entry = metadata["task"], metadata.get("options", {}), metadata["entry"]
        name = f"{task} {options}"
        if name not in datasets:
            datasets[name] = reasoning_gym.create_dataset(task, size=1, seed=0, **options)
        if task in COMPARE_TUPLES:
            entry = _with_tuples(entry)
        try:
            return float(datasets[name].score_answer(given, entry))
        except Exception:  # noqa: BLE001 - verifiers raise anything; what is not the response's fault is raised below
            datasets[name].score_answer(entry["answer"], entry)
            return 0.0

    return score


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value
