"""`relax new`: files to start from, each with its test."""

import difflib
import importlib.util
import keyword
import re
import sys
from importlib.resources import files
from pathlib import Path

from relax.cli.command import typed
from relax.errors import ConfigError

# kind -> the files that are written: template, and the name of the file
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "reward": (("reward.py.jinja", "{name}.py"), ("test_reward.py.jinja", "test_{name}.py")),
    "data": (("data.py.jinja", "{name}.py"), ("test_data.py.jinja", "test_{name}.py")),
    "algorithm": (("algorithm.py.jinja", "{name}.py"), ("test_algorithm.py.jinja", "test_{name}.py")),
    "run": (("run.toml.jinja", "{name}.toml"),),
}
NEXT: dict[str, tuple[str, ...]] = {
    "reward": ("python -m pytest test_{name}.py", "relax train RUN.toml reward.type=function reward.path={name}:score"),
    "data": ("python -m pytest test_{name}.py", "relax train RUN.toml data.type=generator data.path={name}:problem"),
    "algorithm": (
        "python -m pytest test_{name}.py",
        "relax train RUN.toml algorithm.type=custom algorithm.path={name}:advantage",
    ),
    "run": ("relax check {name}.toml", "relax train {name}.toml"),
}


def new(kind: str, name: str, folder: Path = Path()) -> list[Path]:
    """Writes the files of `kind` ("reward", "data", "algorithm" or "run") for `name` into `folder`; returns their paths.

    Nothing is overwritten: raises `ConfigError` when a file is there already, for an unknown kind, and for a name that a
    module or a run cannot have. `next_steps` says what to type afterwards.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"relax new {kind}: there are {', '.join(KINDS)}{hint}")
    _check_name(kind, name, folder)
    wanted = {folder / target.format(name=name): template for template, target in KINDS[kind]}
    for path in wanted:
        if path.exists():
            raise ConfigError(f"{path}: is there already, and is not overwritten; take another name or another --folder")
    templates = files("relax.cli") / "templates"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in wanted.items():
            path.write_text((templates / template).read_text("utf-8").replace("{{ name }}", name), "utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from error
    return list(wanted)


def next_steps(kind: str, name: str, folder: Path = Path()) -> list[str]:
    """Commands to type after `new`, in order."""
    change = [] if folder.resolve() == Path.cwd() else [f"cd {folder}"]
    return change + [typed(command.format(name=name), folder) for command in NEXT[kind]]


def _check_name(kind: str, name: str, folder: Path) -> None:
    if kind == "run":
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.endswith(".toml"):
            raise ConfigError(f"{name!r} cannot name a run: letters, digits, '.', '_' and '-', without .toml")
        return
    if not name.isidentifier() or keyword.iskeyword(name):
        plain = re.sub(r"\W+", "_", name.removesuffix(".py")).strip("_").lower()
        hint = f"; did you mean {plain!r}?" if plain.isidentifier() and not keyword.iskeyword(plain) else ""
        raise ConfigError(f"{name!r} cannot name a Python module{hint}")
    if (folder / f"{name}.py").exists():
        return  # said better by the check for files
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"{name!r} is the name of an installed Python module, which would be imported instead; take another name"
        )
