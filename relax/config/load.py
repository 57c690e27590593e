"""From a TOML file and dotted overrides to a typed configuration, with errors that name the key and what would be right."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from relax.config.mistakes import explain, nearest
from relax.config.run import RunConfig
from relax.config.schema import Model, allows_none, default_tag, is_text, iter_fields, members, section_at
from relax.errors import ConfigError

Config = TypeVar("Config", bound=BaseModel)
_UNSET = ("none", "null")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads `path` (TOML, or a run folder's `config.json`) and applies `section.key=value` overrides.

    Raises `ConfigError` for a missing or unreadable file, an unknown key, or a value that is not allowed.
    """
    return make_config(read_config_file(Path(path)), overrides, source=str(path))


def make_config(raw: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config") -> RunConfig:
    """Validates nested dicts with overrides on top."""
    return validate(RunConfig, raw, overrides, source)


def validate(root: type[Config], raw: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config") -> Config:
    """Nested dicts with overrides on top, as a `root`. Raises `ConfigError` with a line for each mistake."""
    merged: dict[str, Any] = json.loads(json.dumps(dict(raw), default=str))
    for item in overrides:
        _apply_override(root, merged, item)
    _fill_default_types(root, merged)
    try:
        return root.model_validate(merged)
    except ValidationError as error:
        lines = "\n".join(f"  {line}" for line in explain(error, root, merged))
        raise ConfigError(f"{source}: {error.error_count()} setting(s) cannot be used:\n{lines}") from None


def read_config_file(path: Path) -> dict[str, Any]:
    """The file's content as nested dicts. Raises `ConfigError` when there is no such file, or it is not TOML (or JSON)."""
    if path.is_dir():
        inside = sorted(name.name for name in path.glob("*.toml")) or [name.name for name in path.glob("config.json")]
        hint = f"did you mean {path / inside[0]}?" if inside else "a run is one TOML file, see the examples folder"
        raise ConfigError(f"{path}: a folder, not a file; {hint}")
    if not path.is_file():
        near = nearest(path.name, (other.name for other in path.parent.glob("*.toml")))
        hint = f"did you mean {path.parent / near}?" if near else "a run is one TOML file, see the examples folder"
        raise ConfigError(f"{path}: no such file; {hint}")
    try:
        text = path.read_text("utf-8-sig")  # some editors put a byte order mark in front
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:  # of which both decoders' errors are kinds
        raise ConfigError(f"{path}: cannot be read: {error}{_line_of(error, text)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds {type(content).__name__}, wanted an object with a section for each key")
    return content


def _line_of(error: Exception, text: str) -> str:
    """The line that a decoder stumbled over; its message has only the number."""
    number = getattr(error, "lineno", None)
    if number is None:
        _, found, rest = str(error).partition("at line ")
        digits = rest.partition(",")[0]
        number = int(digits) if found and digits.isdigit() else None
    lines = text.splitlines()
    return f"\n  {number}: {lines[number - 1]}" if number and number <= len(lines) else ""


def _apply_override(root: Model, raw: dict[str, Any], item: str) -> None:
    key, separator, text = item.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not separator or not all(parts):
        raise ConfigError(f"override {item!r}: write it as section.key=value, for example train.lr=1e-5")
    node = raw
    for depth, part in enumerate(parts[:-1]):
        child = node.get(part)
        if child is None:  # absent, or unset in a saved config.json
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {item!r}: {'.'.join(parts[: depth + 1])} is a value, not a section")
        node = child
    value = _override_value(root, raw, parts, text.strip())
    if parts[-1] == "type":
        _switch_type(root, raw, parts[:-1], node, str(value))
    node[parts[-1]] = value


def _override_value(root: Model, raw: Mapping[str, Any], parts: Sequence[str], text: str) -> Any:
    model = section_at(root, parts[:-1], raw)
    info = model.model_fields.get(parts[-1]) if model else None
    if info is not None and allows_none(info) and text in _UNSET:
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string
    return text if info is not None and is_text(info) and not isinstance(value, str) else value  # run.name=2024


def _switch_type(root: Model, raw: Mapping[str, Any], section: Sequence[str], node: dict[str, Any], value: str) -> None:
    """Another type has other keys: what it does not know is left behind."""
    parent = section_at(root, section[:-1], raw) if section else None
    if parent is None or section[-1] not in parent.model_fields:
        return
    if (node.get("type") or default_tag(parent.model_fields[section[-1]])) == value:
        return
    node["type"] = value
    chosen = section_at(root, section, raw)
    for name in [name for name in node if chosen is not None and name not in chosen.model_fields]:
        del node[name]


def _fill_default_types(root: Model, raw: dict[str, Any]) -> None:
    """A section that has a default type needs no `type` for its other keys: `algorithm.kl.coef=0.01` is enough."""
    for name, info in root.model_fields.items():
        node = raw.get(name)
        if isinstance(node, dict) and members(info.annotation):
            if (tag := default_tag(info)) is not None:
                node.setdefault("type", tag)
            section = section_at(root, [name], raw)
            if section is not None:
                _fill_default_types(section, node)


def all_keys() -> list[str]:
    """Every dotted key that a run file may hold, in the order of the sections."""
    return list(dict.fromkeys(key for key, _, _ in iter_fields(RunConfig)))
