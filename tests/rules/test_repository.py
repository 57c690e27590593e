"""What the repository as a whole keeps to: shipped run files, generated pages, changelog, licence, no traces of a machine."""

import re
import tomllib
from pathlib import Path

import pytest

from relax.config import load_config
from relax.config.load import read_config_file, validate
from relax.config.reference import reference_markdown
from relax.config.run import RunConfig
from relax.config.schema import iter_fields
from relax.config.sft import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
RUN_FILES = sorted((ROOT / "examples").rglob("*.toml"))
# Split, so that this file passes its own test.
TRACES = tuple(
    "".join(parts) for parts in (("/wo", "rk/"), ("/ro", "ot/"), ("py", "pi.org"), ("python", "hosted"), ("../sha", "red"))
)
MOST_KEYS = 20


def _is_sft(path: Path) -> bool:
    """What `relax check` goes by as well: a run has no [output]."""
    return "output" in tomllib.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("path", RUN_FILES, ids=[str(p.relative_to(ROOT / "examples")) for p in RUN_FILES])
def test_every_shipped_run_file_loads(path):
    if _is_sft(path):
        validate(SFTConfig, read_config_file(path), source=str(path))
    else:
        load_config(path)


@pytest.mark.parametrize("path", [p for p in RUN_FILES if not _is_sft(p)], ids=lambda p: p.parent.name)
def test_a_run_needs_at_most_twenty_keys(path):
    def count(node) -> int:
        inner = [child for key, child in node.items() if key != "options"]  # a function's own arguments are no settings
        return sum(count(child) if isinstance(child, dict) else 1 for child in inner) + ("options" in node)

    needed = {name: section for name, section in tomllib.loads(path.read_text("utf-8")).items() if name != "eval"}
    assert count(needed) <= MOST_KEYS


@pytest.mark.parametrize("root", [RunConfig, SFTConfig])
def test_every_setting_is_documented(root):
    silent = [key for key, info, _ in iter_fields(root) if not (info.description or "").strip().endswith((".", ":", ")"))]
    assert not silent, f"needs a docstring of whole sentences: {silent}"


def test_the_configuration_page_is_up_to_date():
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert page == reference_markdown(), "run `make docs-reference`"


def test_no_trace_of_a_machine(own_files):
    found = []
    for path in own_files:
        data = path.read_bytes()
        found += [f"{path.relative_to(ROOT)}: {trace}" for trace in TRACES if trace.encode() in data]
    assert not found, "\n".join(found)


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings, "no release heading"
    assert headings[0] == "[Unreleased]"
    release = re.compile(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}$")
    assert all(release.match(heading) for heading in headings[1:])
    kinds = re.findall(r"^### (.+)$", text, re.M)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    sections = re.split(r"^### .+$", text, flags=re.M)[1:]
    assert all(re.search(r"^- \S", section, re.M) for section in sections), "a kind of change without an entry"


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_lock_pins_everything():
    lines = [line for line in (ROOT / "requirements" / "lock.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    lines += [
        line for line in (ROOT / "requirements" / "torch.txt").read_text("utf-8").splitlines() if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line) for line in lines)
    pinned = {line.partition("==")[0] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [text for group in (project["dependencies"], *project["optional-dependencies"].values()) for text in group]
    names = {re.split(r"[^A-Za-z0-9_.-]", text)[0].lower().replace("_", "-") for text in wanted}
    assert names <= pinned, f"run `make lock`: {sorted(names - pinned)}"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages == listed
