"""From pydantic's errors to lines for the person who wrote the file: key, value, what is allowed, the nearest right name."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from relax.config.schema import Model, iter_fields, options_at, section_at, siblings_with, user_path

_LONGEST_VALUE = 80


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that was most likely meant; `cutoff` is the least likeness, from 0 to 1."""
    found = difflib.get_close_matches(name, list(known), 1, cutoff)
    return found[0] if found else None


def explain(error: ValidationError, root: Model, raw: Mapping[str, Any]) -> Iterator[str]:
    """One line for each wrong setting."""
    for item in error.errors():
        path = user_path(root, item["loc"])
        name = ".".join(path) or "the whole file"
        context: Mapping[str, Any] = item.get("ctx") or {}
        match item["type"]:
            case "extra_forbidden":
                yield f"{name}: unknown key; {_hint(root, path, raw)}"
            case "missing":
                yield _missing(root, path, raw)
            case "union_tag_invalid":
                tag, allowed = str(context["tag"]), str(context["expected_tags"]).replace("'", "").split(", ")
                yield f"{name}.type = {_shown(tag)}: allowed are {_listed(allowed)}{_meant(tag, allowed)}"
            case "union_tag_not_found":
                tags = [str(model.model_fields["type"].default) for model in options_at(root, path, raw)]
                yield f"{name}.type is missing: allowed are {_listed(tags)}"
            case "model_type" | "model_attributes_type" if path and path[-1].isdigit():
                yield f"{name} = {_shown(item['input'])}: each of {name.rpartition('.')[0]} is a table, {{key = value, ...}}"
            case "model_type" | "model_attributes_type" | "dict_type":
                yield f"{name} = {_shown(item['input'])}: this is a section; write [{name}] and its keys under it"
            case "literal_error":
                allowed = [str(value) for value in _literals(root, path, raw)]
                yield f"{name} = {_shown(item['input'])}: allowed are {_listed(allowed)}{_meant(str(item['input']), allowed)}"
            case "tuple_type" | "list_type" if isinstance(item["input"], Mapping):
                yield f"{name} = {_shown(item['input'])}: this is a list; write [[{name}]] for each, or {name} = [{{...}}]"
            case "tuple_type" | "list_type":
                yield f"{name} = {_shown(item['input'])}: this is a list; write it in brackets, [{_shown(item['input'])}]"
            case "value_error":
                yield str(item["msg"]).removeprefix("Value error, ")
            case _:
                yield f"{name} = {_shown(item['input'])}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _hint(root: Model, path: Sequence[str], raw: Mapping[str, Any]) -> str:
    section, key = path[:-1], path[-1]
    model = section_at(root, section, raw)
    known = list(model.model_fields) if model else []
    if others := siblings_with(root, section, key, raw):
        return f"it belongs to {'.'.join(section)}.type = {_listed(others)}"
    keys = [dotted for dotted, _, _ in iter_fields(root)]
    same_elsewhere = next((dotted for dotted in keys if dotted.rsplit(".", 1)[-1] == key), None)
    if (near := nearest(key, known, 0.8)) or (near := None if same_elsewhere else nearest(key, known)):
        return f"did you mean {'.'.join([*section, near])}?"
    if same_elsewhere:
        return f"did you mean {same_elsewhere}?"
    return f"known here: {', '.join(sorted(known))}"


def _missing(root: Model, path: Sequence[str], raw: Mapping[str, Any]) -> str:
    name = ".".join(path)
    options = options_at(root, path, raw)
    if not options:
        return f"{name}: missing, and there is no default"
    if len(options) > 1:
        tags = _listed([str(model.model_fields["type"].default) for model in options])
        return f"[{name}]: this section is missing, and there is no default; {name}.type is one of {tags}"
    needed = [f"{name}.{key}" for key, info in options[0].model_fields.items() if info.is_required()]
    return f"[{name}]: this section is missing, and there is no default; it needs {', '.join(needed)}"


def _literals(root: Model, path: Sequence[str], raw: Mapping[str, Any]) -> Sequence[Any]:
    parent = section_at(root, path[:-1], raw)
    assert parent is not None, "pydantic checked a key that is not there"
    return getattr(parent.model_fields[path[-1]].annotation, "__args__", ())


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _meant(given: str, allowed: Sequence[str]) -> str:
    near = nearest(given, allowed)
    return f"; did you mean {near!r}?" if near else ""
