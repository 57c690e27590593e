"""What the rules look at: the repository's own files, and the package's modules as syntax trees."""

import ast
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Module:
    """One Python file of the package: `name` is dotted (`relax.config.load`; a package's `__init__` has the package's name)."""

    path: Path
    name: str

    @cached_property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def shown(self) -> str:
        return str(self.path.relative_to(ROOT))


def _module(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return Module(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts))


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    """Every module of the package."""
    found = [_module(path) for path in sorted((ROOT / "relax").rglob("*.py"))]
    assert len(found) > 10, "the package was not found"
    return found


@pytest.fixture(scope="session")
def own_files() -> list[Path]:
    """Every file that is, or would be, part of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=False
    )
    if listed.returncode == 0:
        names = listed.stdout.decode().split("\0")
        return [ROOT / name for name in names if name and (ROOT / name).is_file()]
    hidden = {".git", ".venv", "runs", "site", ".cache"}  # an unpacked archive has no git
    return [path for path in ROOT.rglob("*") if path.is_file() and not hidden & set(path.relative_to(ROOT).parts)]
