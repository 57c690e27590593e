"""Imports run one way, and the light parts stay light."""

import ast
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

# A package may import from its own layer and from those before it.
LAYERS = (
    ("types", "errors", "clock", "child", "shared_arrays", "torchvision_on_cpu"),
    ("config",),
    ("algorithms", "rewards", "envs", "data", "observe"),
    ("bus", "weights"),
    ("models", "train", "engines"),
    ("roles",),
    ("control",),
    ("cli", "dashboard", "plan"),
)
LEVEL = {part: level for level, layer in enumerate(LAYERS) for part in layer}
RAY_ONLY_IN = ("relax.roles.serve", "relax.control")
HELP_LIMIT_S = 0.5


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    """Absolute dotted names that an import statement names; `from a import b` gives `a.b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = package.split(".")
            base = ".".join(p for p in (*parts[: len(parts) - node.level + 1], base) if p)
        yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def _imports(module) -> list[tuple[str, int, bool]]:
    """(name, line, whether it stands at the top level and so runs at import) of every import in the file."""
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    top = {id(node) for node in module.tree.body}
    found = []
    for node in ast.walk(module.tree):
        found += [(name, node.lineno, id(node) in top) for name in _imported(node, package)]
    return found


def _part(name: str) -> str | None:
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 and pieces[0] == "relax" else None


def test_every_package_has_a_layer(modules):
    parts = {_part(m.name) for m in modules} - {None}
    assert parts <= set(LEVEL), f"give {sorted(parts - set(LEVEL))} a layer here and on the architecture page"


def test_imports_run_one_way(modules):
    wrong = [
        f"{m.shown}:{line}: {_part(m.name)} may not import {name}"
        for m in modules
        for name, line, _ in _imports(m)
        if _part(m.name) in LEVEL and LEVEL.get(_part(name) or "", -1) > LEVEL[_part(m.name)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_packages_import_each_other(modules):
    graph = defaultdict(set)
    for m in modules:
        for name, _, _ in _imports(m):
            if _part(m.name) and _part(name) in LEVEL and _part(name) != _part(m.name):
                graph[_part(m.name)].add(_part(name))
    _assert_no_cycle(graph)


def test_no_import_cycle_between_modules(modules):
    known = {m.name for m in modules}
    graph = defaultdict(set)
    for m in modules:
        for name, _, at_top in _imports(m):
            target = next((n for n in (name, name.rpartition(".")[0]) if n in known), None)
            if at_top and target and target != m.name:
                graph[m.name].add(target)
    _assert_no_cycle(graph)


def _assert_no_cycle(graph) -> None:
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail("imports in a circle: " + " -> ".join(reversed(error.args[1])))


def test_only_the_runtime_knows_ray(modules):
    wrong = [
        f"{m.shown}:{line}: imports {name}"
        for m in modules
        for name, line, _ in _imports(m)
        if name.split(".")[0] == "ray" and not m.name.startswith(RAY_ONLY_IN)
    ]
    assert not wrong, "\n".join(wrong)


def _run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("module", ["relax", "relax.types", "relax.config", "relax.config.reference", "relax.cli.main"])
def test_light_modules_import_neither_torch_nor_ray(module):
    code = f"import sys, {module}; print(*sorted({{'torch', 'ray', 'transformers', 'datasets'}} & set(sys.modules)))"
    done = _run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize("verb", ["check", "explain"])
def test_check_and_explain_load_neither_torch_nor_ray(verb, tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        '[model]\npath = "nowhere"\n[data]\ntype = "generator"\npath = "relax.data.arithmetic:addition"\n'
        '[reward]\ntype = "exact"\n[train]\nnum_steps = 1\n'
    )
    code = (
        "import sys\nfrom relax.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('loaded:', *sorted({'torch', 'ray'} & set(sys.modules)), file=sys.stderr)"
    )
    done = _run(code, verb, str(run_file))
    assert "loaded:" in done.stderr, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "loaded:", done.stderr
    assert "Traceback" not in done.stderr


def test_help_comes_at_once():
    """Processor time, so that other work on the machine does not count."""
    code = "from relax.cli.main import main; main()"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = _run(code, "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
    spent_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert spent_s < HELP_LIMIT_S, f"relax --help took {spent_s:.2f} s, at most {HELP_LIMIT_S} s are allowed"
