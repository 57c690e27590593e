"""What the configuration's own types say about its keys: the one place that looks inside pydantic's fields.

A dotted key (`algorithm.kl.coef`) walks from a root model through sections. A section that is a union is told apart by its
`type`; the walk needs that tag to know the member.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Model = type[BaseModel]


def members(annotation: Any) -> list[Model]:
    """The models that an annotation allows: none for a plain value, several for a union on `type`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return [model for arg in get_args(annotation) for model in members(arg)]
    return []


def entries(annotation: Any) -> list[Model]:
    """The models that a table by names of the user's holds; none for anything else."""
    return members(get_args(annotation)[1]) if get_origin(annotation) is dict else []


def tag_of(model: Model) -> str | None:
    """The `type` by which a union member is chosen."""
    return model.model_fields["type"].default if "type" in model.model_fields else None


def default_tag(info: FieldInfo) -> str | None:
    """The `type` that a union has when the user does not write it; none where it must be written."""
    options = members(info.annotation)
    if len(options) == 1:
        return tag_of(options[0])
    return getattr(info.get_default(call_default_factory=False), "type", None)


def allows_none(info: FieldInfo) -> bool:
    """Whether the setting can be left unset."""
    return NoneType in get_args(info.annotation)


def is_text(info: FieldInfo) -> bool:
    """Whether the setting takes free text and nothing else; a list of texts is none."""
    if get_origin(info.annotation) in (list, tuple, dict):
        return False
    kinds = {arg for arg in get_args(info.annotation) if arg is not NoneType} or {info.annotation}
    return kinds == {str}


def section_at(root: Model, path: Sequence[str], raw: Mapping[str, Any]) -> Model | None:
    """The model of the section `path`, by the tags that stand in `raw`; none when there is no such section."""
    model: Model = root
    node: Any = raw
    parts = list(path)
    while parts:
        part = parts.pop(0)
        if part not in model.model_fields:
            return None
        info, node = model.model_fields[part], _child(node, part)
        options = members(info.annotation)
        if not options and parts and (options := entries(info.annotation)):
            node = _child(node, parts.pop(0))
        if not options:
            return None
        tag = (node.get("type") if isinstance(node, Mapping) else None) or default_tag(info)
        model = next((option for option in options if tag_of(option) == tag), options[0])
    return model


def _child(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, Mapping) else None


def options_at(root: Model, path: Sequence[str], raw: Mapping[str, Any]) -> list[Model]:
    """The models that the section `path` may be."""
    for depth, find in ((1, members), (2, entries)):
        holder = section_at(root, path[:-depth], raw) if len(path) >= depth else None
        if holder is not None and path[-depth] in holder.model_fields:
            return find(holder.model_fields[path[-depth]].annotation)
    return []


def siblings_with(root: Model, path: Sequence[str], key: str, raw: Mapping[str, Any]) -> list[str]:
    """Tags of the union members at section `path` that know `key`."""
    options = options_at(root, path, raw)
    return [str(tag_of(option)) for option in options if key in option.model_fields and len(options) > 1]


def user_path(root: Model, location: Sequence[str | int]) -> list[str]:
    """A location of pydantic's as the user wrote it: without the tags of chosen union members."""
    path: list[str] = []
    model: Model | None = root
    parts = [str(part) for part in location]
    while parts:
        path.append(parts.pop(0))
        annotation = model.model_fields[path[-1]].annotation if model and path[-1] in model.model_fields else None
        options = members(annotation)
        if not options and parts and (options := entries(annotation)):
            path.append(parts.pop(0))
        model = options[0] if options else None
        if len(options) > 1 and parts:
            tag = parts.pop(0)
            model = next(option for option in options if tag_of(option) == tag)
    return path


def iter_fields(root: Model, prefix: str = "", above: tuple[Model, ...] = ()) -> Iterator[tuple[str, FieldInfo, Model]]:
    """(dotted key, field, owning model) of every setting; members of a union follow one another.

    What stands in a table by names of the user's is called `NAME`; a table that may hold what it is in is not entered again.
    """
    above = (*above, root)
    for name, info in root.model_fields.items():
        options, inner = members(info.annotation), entries(info.annotation)
        if not options:
            yield f"{prefix}{name}", info, root
        for option in options:
            yield from iter_fields(option, f"{prefix}{name}.", above)
        for option in inner if not set(inner) & set(above) else ():
            yield from iter_fields(option, f"{prefix}{name}.NAME.", above)
