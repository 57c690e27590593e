"""The tests of a row, in the forms that data sets have them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Test:
    """One run of the program: with `stdin`, which must print `stdout`; or followed by `check`, which must come to its end."""

    __test__ = False  # for pytest, which would take it for one of its own

    stdin: str = ""
    stdout: str | None = None
    check: str | None = None
    suffix: str = ""  # code behind the program's own


def read_tests(metadata: Mapping[str, Any], answer: Any, key: str) -> list[Test]:
    """The row's tests: from its column `key`, in human-eval's form from `test` and `entry_point`, or else from the answer.

    - asserts: a text or a list of texts of Python, as `["assert add(1, 2) == 3"]`
    - pairs: `[{"input": "1 2", "output": "3"}]` (or `stdin`, `stdout`), or `{"inputs": [...], "outputs": [...]}`
    - human-eval: `test` defines `check(candidate)`, which is called with what `entry_point` names

    Any of them may be JSON in a text. Raises `ValueError` when there are none that could fail: that is the data's fault.
    """
    raw = metadata.get(key)
    if raw is None and isinstance(metadata.get("test"), str) and isinstance(metadata.get("entry_point"), str):
        return [Test(check=f"{metadata['test']}\n\ncheck({metadata['entry_point']})\n")]
    tests = _read(_from_json(answer if raw is None else raw), key)
    if all(test.check is None and not (test.stdout or "").strip() for test in tests):
        raise ValueError(f"the row's {key} would be passed by a program that does nothing")
    return tests


def _read(raw: Any, key: str) -> list[Test]:
    if isinstance(raw, str) and _can_fail(raw):
        return [Test(check=raw)]
    if isinstance(raw, Mapping) and {"inputs", "outputs"} <= raw.keys():
        inputs, outputs = raw["inputs"], raw["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError(f"the row's {key} must have as many outputs as inputs, both as lists")
        return _read([{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)], key)
    if isinstance(raw, Sequence) and not isinstance(raw, str) and raw:
        return [_one(item, key) for item in raw]
    raise ValueError(f"the row has no tests in {key!r}: neither asserts nor pairs of input and output; see reward.tests_key")


def _one(item: Any, key: str) -> Test:
    if isinstance(item, str) and _can_fail(item):
        return Test(check=item)
    if isinstance(item, Mapping):
        given, wanted = item.get("input", item.get("stdin", "")), item.get("output", item.get("stdout"))
        if isinstance(wanted, str) and isinstance(given, str):
            return Test(stdin=given, stdout=wanted)
    raise ValueError(
        f"one of the row's {key} is neither an assert nor a pair of the texts 'input' and 'output': {str(item)[:80]}"
    )


def _can_fail(text: str) -> bool:
    """Whether a text of Python asserts or calls anything; `5`, an answer of another kind, does not."""
    return "assert" in text or "(" in text


def _from_json(raw: Any) -> Any:
    if isinstance(raw, str) and raw.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            return raw  # Python that begins with a bracket
    return raw
