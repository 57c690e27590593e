"""Rows that are made when they are asked for: by reasoning-gym, or by a function."""

import difflib
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from relax.config.data import GeneratorDataConfig, ReasoningGymDataConfig
from relax.data.dotted import load_function
from relax.data.rows import BadRow
from relax.errors import ConfigError

# Tasks whose verifier gives full marks to responses that are wrong: a policy learns to write those.
UNSOUND = {
    "game_of_life_halting": "its verifier gives 1.0 to any text",
    "coin_flip": 'its verifier gives 1.0 to "0"',
}
MakeRow = Callable[[int], dict[str, Any]]


def reasoning_gym_rows(data: ReasoningGymDataConfig) -> MakeRow:
    """Row `index` of the task: `prompt`, `answer`, and what its verifier needs (`task`, `options`, `entry`)."""
    import reasoning_gym  # heavy: takes a second
    from reasoning_gym.factory import DATASETS

    if data.task not in DATASETS:
        near = difflib.get_close_matches(data.task, list(DATASETS), 3, 0.5)
        near += [name for name in sorted(DATASETS) if data.task in name and name not in near][:3]
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"data.task = {data.task!r}: reasoning-gym has no such task; {hint}")
    if data.task in UNSOUND:
        raise ConfigError(f"data.task = {data.task!r}: cannot be trained on: {UNSOUND[data.task]}")
    _, config_class = DATASETS[data.task]
    fields = [name for name in inspect.signature(config_class).parameters if name not in ("seed", "size")]
    for name in data.options:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"{data.task} has {', '.join(fields)}"
            raise ConfigError(f"data.options.{name}: {data.task} has no such setting; {hint}")
    options = dict(data.options)
    try:
        dataset = reasoning_gym.create_dataset(data.task, size=data.size, seed=_spread(data.seed), **options)
    except Exception as error:  # settings are checked by assertions of each task
        raise ConfigError(f"data.options = {options}: {data.task} refuses them: {type(error).__name__}: {error}") from error

    def make(index: int) -> dict[str, Any]:
        try:
            entry = dataset[index]
        except Exception as error:  # a generator may fail for single seeds
            raise BadRow(f"{data.task} failed: {type(error).__name__}: {error}") from error
        entry = msgspec.json.decode(msgspec.json.encode(entry, enc_hook=_plain))  # kinds that travel: what is scored later
        return {"prompt": entry["question"], "answer": entry["answer"], "task": data.task, "options": options, "entry": entry}

    return make


def generator_rows(data: GeneratorDataConfig) -> MakeRow:
    """Row `index` as the user's function gives it."""
    function = load_function(data.path, "data.path")
    try:
        inspect.signature(function).bind(0, 0, **data.options)
    except TypeError as error:
        raise ConfigError(
            f"data.path = {data.path!r}: the function is called as f(index, seed, **options) with the options "
            f"{sorted(data.options)}, which does not fit: {error}"
        ) from error
    except ValueError:
        pass  # some built-in functions have no signature to look at

    def make(index: int) -> dict[str, Any]:
        try:
            row: dict[str, Any] = function(index, data.seed, **data.options)
        except Exception as error:  # the user's function, with the user's errors
            raise BadRow(f"the function raised {type(error).__name__}: {error}") from error
        return row

    return make


def _spread(seed: int) -> int:
    """A starting point for reasoning-gym, which makes row i from `seed + i`: with seeds as they are, data of seed 1 would be
    those of seed 0 moved by one row, and no seed would give held-out data."""
    digest = hashlib.sha256(f"reasoning_gym {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % (2**31 - 2**26)  # some tasks seed numpy, which takes 32 bits


def _plain(value: Any) -> Any:
    """numpy scalars and arrays as numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise BadRow(f"holds a {type(value).__name__}, which JSON cannot")
