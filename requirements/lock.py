"""Writes `requirements/lock.txt`: the installed version of every package that pyproject.toml asks for, directly or not.

    .venv/bin/python requirements/lock.py

Runs inside the environment that is to be pinned. What is installed there but needed by nothing is left out, and local
version labels (`+cpu`) are cut off, so that the lock fits any build of the same version.
"""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
BUILD_TOOLS = ("setuptools",)  # `pip install -e . --no-build-isolation` uses the installed one
HEADER = """\
# Every version that relax is tested with. Made by `make lock`; do not edit. torch is installed first, from torch.txt.
"""


def wanted() -> list[Requirement]:
    """The requirements of pyproject.toml, with all extras, and the build tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values(), BUILD_TOOLS]
    return [Requirement(text) for group in groups for text in group]


def pins() -> dict[str, str]:
    """Canonical name -> installed version of `wanted()` and of all that it needs on this platform."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(requirement, "") for requirement in wanted()]
    while todo:
        requirement, extra_of_parent = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra_of_parent}):
            continue
        name = canonicalize_name(requirement.name)
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"{requirement} is not installed here: install it, then lock again") from None
        if not requirement.specifier.contains(installed.version, prereleases=True):
            raise SystemExit(f"{requirement} is wanted, but {installed.version} is installed")
        found[name] = installed.version.partition("+")[0]
        for extra in ["", *requirement.extras]:
            if (name, extra) not in seen:
                seen.add((name, extra))
                todo += [(Requirement(text), extra) for text in installed.requires or ()]
    return found


def main() -> None:
    found = pins()
    torch = found.pop("torch")
    (ROOT / "requirements" / "torch.txt").write_text(
        f"# Installed first and alone, so that nothing else decides which build of it is taken.\ntorch=={torch}\n", "utf-8"
    )
    lines = [f"{name}=={version}\n" for name, version in sorted(found.items())]
    (ROOT / "requirements" / "lock.txt").write_text(HEADER + "".join(lines), "utf-8")


if __name__ == "__main__":
    main()
