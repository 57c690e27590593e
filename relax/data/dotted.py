"""From a dotted path in a run file to the Python object that it names."""

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from relax.errors import ConfigError


def load_object(path: str, what: str) -> Any:
    """The object at `package.module:name` (or `name.attribute`); `what` names the setting in errors, as in "reward.path".

    Modules of the working directory can be imported. Raises `ConfigError` when the path is malformed, the module is missing
    or fails while it is imported, or has no such name; the message holds the nearest right names.
    """
    module_name, separator, attribute = path.partition(":")
    if (
        module_name.endswith(".py")
        or not separator
        or not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")])
    ):
        hint = ""
        if module_name.endswith(".py") or "/" in module_name:
            hint = f"; did you mean {module_name.removesuffix('.py').strip('./').replace('/', '.')}:{attribute or 'function'}?"
        elif not separator and "." in module_name:
            hint = f"; did you mean {':'.join(module_name.rsplit('.', 1))!r}?"
        raise ConfigError(f"{what} = {path!r}: write it as package.module:function{hint}")
    found: Any = _import(module_name, path, what)
    for name in attribute.split("."):
        if not hasattr(found, name):
            public = [other for other in dir(found) if not other.startswith("_")]
            near = difflib.get_close_matches(name, public, 3, 0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(public[:20]) or 'nothing public'}"
            where = getattr(sys.modules[module_name], "__file__", None) or module_name
            raise ConfigError(f"{what} = {path!r}: {where} has no {name!r}; {hint}")
        found = getattr(found, name)
    return found


def load_function(path: str, what: str) -> Any:
    """Like `load_object`, and what it names can be called."""
    found = load_object(path, what)
    if not callable(found):
        raise ConfigError(f"{what} = {path!r}: is a {type(found).__name__}, not a function")
    return found


def _import(module_name: str, path: str, what: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that a file here never hides an installed package
    importlib.invalidate_caches()  # the module may have been written a moment ago
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{what} = {path!r}: there is no module {error.name!r} in {here} or among the installed packages"
            ) from error
        raise ConfigError(f"{what} = {path!r}: {module_name} needs a module that is missing: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises while it is imported is the user's to see
        raise ConfigError(f"{what} = {path!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error
