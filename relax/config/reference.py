"""The reference page of all settings, written from their own types, defaults and docstrings.

python -m relax.config.reference docs/configuration.md
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from relax.config.run import RunConfig
from relax.config.schema import Model, default_tag, entries, members, tag_of
from relax.config.sft import SFTConfig

_INTRODUCTION = """\
# Configuration

One run is one TOML file; each table below is a section of it. Any key can be set on the command line as well, after the
file: `relax train run.toml train.lr=1e-5 rollout.max_staleness=2`. What stands on the command line wins. An unknown key is
an error that names the nearest right one; `relax check run.toml` finds mistakes without starting anything, and
`relax explain run.toml` prints what the settings turn into. The run folder keeps the resolved configuration as `config.json`.

*Required* keys have no default. *Unset* keys may be left out, or unset on the command line with `key=none`. This page is
made from the settings' own docstrings by `make docs-reference`.
"""
_SFT_INTRODUCTION = """\
# `relax sft`

The file of `relax sft` has tables of its own.
"""
_MOST = 0.8  # of the kinds of a section; the others say what is different
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def reference_markdown() -> str:
    """The page, as Markdown: a table for each section, one more for each member of a union."""
    written: dict[tuple[Model, ...], str] = {}
    return "\n".join(
        [_INTRODUCTION, *_file(RunConfig, "", written), _SFT_INTRODUCTION, *_file(SFTConfig, " of `relax sft`", written)]
    )


def _file(root: Model, suffix: str, written: dict[tuple[Model, ...], str]) -> Iterator[str]:
    """All sections of one kind of file; `suffix` tells its headings from those of another kind."""
    plain = {name: info for name, info in root.model_fields.items() if not members(info.annotation)}
    if plain:
        yield _table(_rows("", plain, written))
    for name, info in root.model_fields.items():
        if name not in plain:
            yield f"## `[{name}]`{suffix}\n\n{_text(info.description)}\n"
            yield from _section(name, info, written)


def _section(key: str, info: FieldInfo, written: dict[tuple[Model, ...], str]) -> Iterator[str]:
    options = tuple(members(info.annotation))
    if options in written:
        yield f"`[{key}]` takes the same keys as [`[{written[options]}]`](#{written[options].replace('.', '')}).\n"
        return
    yield from _union(key, options, default_tag(info), written)


def _union(key: str, options: tuple[Model, ...], default: str | None, written: dict[tuple[Model, ...], str]) -> Iterator[str]:
    """What all kinds of a section share, then each of them."""
    written[options] = key
    common = _common_fields(options)
    rows = [*_type_row(key, default, options), *_rows(key, common, written)]
    if rows:
        yield _table(rows)
    yield from _subsections(key, common, written)
    for option in options if len(options) > 1 else ():
        own = {
            name: field
            for name, field in option.model_fields.items()
            if name != "type" and not (name in common and _is_same(field, common[name]))
        }
        yield f'### `{key}.type = "{tag_of(option)}"`\n\n{_text(option.__doc__)}\n'
        if rows := _rows(key, own, written):
            yield _table(rows)
        yield from _subsections(key, own, written)


def _common_fields(options: tuple[Model, ...]) -> Mapping[str, FieldInfo]:
    """The fields that all members share, with the same default and meaning in most of them."""
    first, *others = options
    if not others:
        return first.model_fields

    def is_shared(name: str, field: FieldInfo) -> bool:
        found = [model.model_fields[name] for model in others if name in model.model_fields]
        return len(found) == len(others) and sum(_is_same(field, other) for other in found) >= _MOST * len(others)

    return {name: field for name, field in first.model_fields.items() if name != "type" and is_shared(name, field)}


def _is_same(one: FieldInfo, other: FieldInfo) -> bool:
    return (one.annotation, one.default, one.description) == (other.annotation, other.default, other.description)


def _type_row(key: str, default: str | None, options: tuple[Model, ...]) -> list[tuple[str, str, str, str]]:
    if len(options) < 2:
        return []
    kinds = ", ".join(f'`"{tag_of(option)}"`' for option in options)
    return [(f"{key}.type", kinds, f'`"{default}"`' if default else "*required*", "Which of the kinds below.")]


def _rows(key: str, fields: Mapping[str, FieldInfo], written: dict[tuple[Model, ...], str]) -> list[tuple[str, str, str, str]]:
    """Plain keys, and those of sections inside this one; unions get tables of their own."""
    rows = []
    for name, field in fields.items():
        options = tuple(members(field.annotation))
        if not options:
            rows.append((f"{key}.{name}".lstrip("."), _kind(field), _default(field), _text(field.description)))
        elif len(options) == 1:
            rows += _rows(f"{key}.{name}", options[0].model_fields, written)
    return rows


def _subsections(key: str, fields: Mapping[str, FieldInfo], written: dict[tuple[Model, ...], str]) -> Iterator[str]:
    for name, field in fields.items():
        if len(members(field.annotation)) > 1:
            yield f"### `[{key}.{name}]`\n\n{_text(field.description)}\n"
            yield from _section(f"{key}.{name}", field, written)
        elif (inner := tuple(entries(field.annotation))) and inner not in written:
            yield f"### `[{key}.{name}.NAME]`\n\n{_text(field.description)}\n"
            yield from _union(f"{key}.{name}.NAME", inner, None, written)


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{key}` | {kind} | {default} | {meaning} |" for key, kind, default, meaning in rows]
    return "\n".join(lines) + "\n"


def _kind(field: FieldInfo) -> str:
    named = _name_of(field.annotation)
    bounds = [
        f"{sign} {getattr(rule, name)}" for rule in field.metadata for name, sign in _BOUNDS.items() if hasattr(rule, name)
    ]
    return ", ".join([named, *bounds])


def _name_of(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_name_of(get_args(annotation)[0])}s"
    if get_origin(annotation) is dict:
        return "table"
    if kinds := [kind for kind in get_args(annotation) if kind is not NoneType]:
        return " or ".join(_name_of(kind) for kind in kinds)
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=False)
    return "*unset*" if value is None else f"`{json.dumps(value)}`"


def _text(text: str | None) -> str:
    """One line, with what Markdown tables would take for a column escaped."""
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference_markdown(), "utf-8")
