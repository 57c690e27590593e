"""From a TOML file and dotted overrides to a `RunConfig`, with errors that name the key and what would be right."""

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from relax.config.run import RunConfig
from relax.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads `path` (TOML, or a run folder's `config.json`) and applies `section.key=value` overrides.

    Raises `ConfigError` for a missing or unreadable file, an unknown key, or a value that is not allowed.
    """
    return make_config(read_config_file(Path(path)), overrides, source=str(path))


def read_config_file(path: Path) -> dict[str, Any]:
    """The file's content as nested dicts."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; a run is one TOML file, see the examples folder")
    try:
        text = path.read_text("utf-8")
        return dict(json.loads(text)) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, OSError) as error:  # both decoders raise subclasses of ValueError
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def make_config(raw: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config") -> RunConfig:
    """Validates nested dicts with overrides on top."""
    merged = json.loads(json.dumps(dict(raw), default=str))
    for item in overrides:
        _apply_override(merged, item)
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        lines = "\n".join(f"  {line}" for line in _explain(error, merged))
        raise ConfigError(f"{source}: {error.error_count()} setting(s) cannot be used:\n{lines}") from None


def _apply_override(raw: dict[str, Any], item: str) -> None:
    key, separator, text = item.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"override {item!r}: write it as section.key=value, for example train.lr=1e-5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    node = raw
    for depth, part in enumerate(parts[:-1]):
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {item!r}: {'.'.join(parts[: depth + 1])} is a value, not a section")
        node = child
    if parts[-1] == "type" and node.get("type", value) != value:
        kept = _fields_at(parts[:-1], str(value))
        for name in [name for name in node if name not in kept]:
            del node[name]  # another type has other keys: what it does not know is left behind
    node[parts[-1]] = value


def _explain(error: ValidationError, raw: Mapping[str, Any]) -> Iterator[str]:
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        kind = item["type"]
        path = _drop_union_tags(location, raw)
        name = ".".join(path) or "the whole file"
        if kind == "extra_forbidden":
            known = _known_names(path[:-1], raw)
            near = difflib.get_close_matches(path[-1], known, 1, 0.5)
            elsewhere = [p for p in all_keys() if p.rsplit(".", 1)[-1] == path[-1]]
            hint = f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else ""
            hint = hint or (f"did you mean {elsewhere[0]}?" if elsewhere else f"known here: {', '.join(sorted(known))}")
            yield f"{name}: unknown key; {hint}"
        elif kind == "missing":
            yield f"{name}: missing, and there is no default"
        elif kind.startswith("union_tag"):
            allowed = (item.get("ctx") or {}).get("expected_tags", "")
            given = (item.get("ctx") or {}).get("tag")
            tag = f" = {given!r}" if given is not None else " is missing"
            near = difflib.get_close_matches(str(given), allowed.replace("'", "").split(", "), 1, 0.5)
            yield f"{name}.type{tag}: allowed are {allowed}" + (f"; did you mean {near[0]!r}?" if near else "")
        elif kind == "value_error":
            yield str(item["msg"]).removeprefix("Value error, ")
        else:
            yield f"{name} = {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _drop_union_tags(location: Sequence[str], raw: Mapping[str, Any]) -> list[str]:
    """pydantic puts the chosen union member's tag into the location; the user never wrote it."""
    path: list[str] = []
    node: Any = raw
    for index, part in enumerate(location):
        is_tag = isinstance(node, Mapping) and part not in node and (node.get("type") == part) and index > 0
        if is_tag and not (index == len(location) - 1 and part in _known_names(path, raw)):
            continue
        path.append(part)
        node = node.get(part) if isinstance(node, Mapping) else None
    return path


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return [model for arg in get_args(annotation) for model in _models_in(arg)]
    return []


def _model_at(parts: Sequence[str], tags: Sequence[str | None]) -> type[BaseModel] | None:
    model: type[BaseModel] = RunConfig
    for part, tag in zip(parts, tags, strict=True):
        if part not in model.model_fields:
            return None
        options = _models_in(model.model_fields[part].annotation)
        if not options:
            return None
        model = next((m for m in options if tag is not None and _tag_of(m) == tag), options[0])
    return model


def _tag_of(model: type[BaseModel]) -> str | None:
    return model.model_fields["type"].default if "type" in model.model_fields else None


def _known_names(parts: Sequence[str], raw: Mapping[str, Any]) -> list[str]:
    tags: list[str | None] = []
    node: Any = raw
    for part in parts:
        node = node.get(part) if isinstance(node, Mapping) else None
        tags.append(node.get("type") if isinstance(node, Mapping) else None)
    model = _model_at(parts, tags)
    return list(model.model_fields) if model else []


def _fields_at(parts: Sequence[str], tag: str) -> list[str]:
    model = _model_at(parts, [*[None] * (len(parts) - 1), tag])
    return list(model.model_fields) if model else []


def all_keys() -> list[str]:
    """Every dotted key that a run file may hold, in the order of the sections."""
    return [key for key, _, _ in iter_fields()]


def iter_fields() -> Iterator[tuple[str, Any, type[BaseModel]]]:
    """(dotted key, pydantic field, owning model) of every setting; members of a union follow one another."""

    def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any, type[BaseModel]]]:
        for name, info in model.model_fields.items():
            children = _models_in(info.annotation)
            if not children:
                yield f"{prefix}{name}", info, model
            for child in children:
                yield from walk(child, f"{prefix}{name}.")

    yield from walk(RunConfig, "")
