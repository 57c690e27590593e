"""What every source file of the package keeps to."""

import ast
import re

import pytest

CEILING = 400
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}


def _found(modules, pick) -> list[str]:
    return [f"{m.shown}:{node.lineno}" for m in modules for node in ast.walk(m.tree) if pick(node)]


def test_no_file_over_the_ceiling(own_files):
    long = [
        (path.name, n) for path in own_files if path.suffix == ".py" and (n := len(path.read_bytes().splitlines())) > CEILING
    ]
    assert not long, f"over {CEILING} lines, find the second noun in it: {long}"


def test_no_module_without_a_meaning(own_files):
    vague = [str(path) for path in own_files if path.suffix == ".py" and VAGUE & {path.stem, *path.parent.parts}]
    assert not vague, f"name what it holds: {vague}"


def test_no_print(modules):
    assert not _found(modules, lambda n: isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "print")


def test_nothing_is_left_unimplemented(modules):
    assert not _found(modules, lambda n: isinstance(n, ast.Name) and n.id == "NotImplementedError")
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert not [m.shown for m in modules if marks.search(m.text)]


def test_no_bare_except(modules):
    assert not _found(modules, lambda n: isinstance(n, ast.ExceptHandler) and n.type is None)


def test_no_broad_error_is_swallowed(modules):
    def swallows(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.ExceptHandler)
            and isinstance(node.type, ast.Name)
            and node.type.id in ("Exception", "BaseException")
            and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
        )

    assert not _found(modules, swallows)


def test_no_assignment_into_a_config(modules):
    def assigns(node: ast.AST) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        return any(re.match(r"(self\.)?_?config\.", ast.unparse(target)) for target in targets)

    assert not _found(modules, assigns)


def test_everything_public_says_what_it_is(modules):
    silent = []
    for m in modules:
        if not ast.get_docstring(m.tree):
            silent.append(m.shown)
        for node in m.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _is_silent(node):
                silent.append(f"{m.shown}:{node.lineno}: {node.name}")
    assert not silent, "without a docstring:\n" + "\n".join(silent)


def _is_silent(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return not node.name.startswith("_") and ast.get_docstring(node) is None


@pytest.mark.parametrize("name", ["py.typed", "__init__.py"])
def test_the_package_is_typed(modules, name):
    assert any((m.path.parent / name).is_file() for m in modules if m.name == "relax")
