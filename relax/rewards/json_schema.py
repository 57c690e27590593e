"""Whether a response holds JSON that a schema allows."""

import json
import re
from collections.abc import Callable
from typing import Any

from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]
from jsonschema.protocols import Validator  # type: ignore[import-untyped]
from jsonschema.validators import validator_for  # type: ignore[import-untyped]
from referencing import Registry

from relax.config.reward import JsonSchemaRewardConfig
from relax.errors import ConfigError

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?:json|JSON)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 100  # of brackets: validators recurse


def make_json_schema(config: JsonSchemaRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], dict[str, float]]:
    """1.0 when the whole response, or its last fenced block, is JSON that the schema allows; else 0.0. The part `json` says
    whether it is JSON at all. Raises `ConfigError` for a schema that is none; a row with such a one is an error of its own.
    """
    shared = None
    if config.definition is not None:
        try:
            shared = _validator(config.definition)
        except ValueError as error:
            raise ConfigError(f"reward.definition: {error}") from error
    of_rows: dict[str, Validator] = {}

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> dict[str, float]:
        own = metadata.get(config.schema_key)
        validator = shared if own is None else _of_row(own, of_rows, config.schema_key)
        if validator is None:
            raise ValueError(f"the row has no schema in {config.schema_key!r}, and reward.definition is unset")
        try:
            document = document_of(response)
        except ValueError:
            return {"reward": 0.0, "json": 0.0}
        return {"reward": float(validator.is_valid(document)), "json": 1.0}

    return score


def document_of(response: str) -> Any:
    """The JSON of the text behind the last `</think>`. Raises `ValueError` when it is none by the standard: NaN, comments,
    two documents, the same key twice, more than a hundred brackets deep."""
    text = response.rpartition("</think>")[2].strip()
    blocks = _BLOCK.findall(text)
    text = blocks[-1] if blocks else text
    if len(text) > MAX_CHARACTERS or _depth(text) > MAX_DEPTH:
        raise ValueError("too large")
    return json.loads(text, parse_constant=_refuse, object_pairs_hook=_object)


def _depth(text: str) -> int:
    """Most brackets open at once, outside of texts. A bound that costs no recursion."""
    depth, deepest = 0, 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', text, re.DOTALL):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        deepest = max(deepest, depth)
    return deepest


def _of_row(raw: Any, known: dict[str, Validator], key: str) -> Validator:
    text = raw if isinstance(raw, str) else json.dumps(raw, sort_keys=True)
    if text not in known:
        if len(known) >= 64:
            known.clear()
        try:
            known[text] = _validator(json.loads(text))
        except ValueError as error:
            raise ValueError(f"the row's {key!r}: {error}") from error
    return known[text]


def _validator(schema: Any) -> Validator:
    """Raises `ValueError` for what is no schema. References reach no network: one to elsewhere fails when it is met."""
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a JSON schema is an object, not a {type(schema).__name__}")
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from error
    return kind(schema, registry=Registry())


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("the same key twice")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
