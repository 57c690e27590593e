"""Fetches easy-VQA (MIT, Zhou 2019) and writes it as rows with pictures: `train.jsonl`, `test.jsonl` and their folders.

    python examples/easy_vqa/prepare.py [FOLDER]

The data set travels inside the Python package `easy-vqa`, so that any package index or mirror that pip is set up for will do.
The package is neither installed nor run: its pictures and questions are taken out, checked and laid out.
"""

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "easy-vqa==1.0"
SHA256 = "fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f"  # of the wheel
DEFAULT = Path(".cache/data/easy-vqa")
SPLITS = ("train", "test")  # of the set itself, by pictures
SHAPES = ("circle", "rectangle", "triangle")
Question = tuple[str, str, int]  # its text, the answer, the picture's number


def main(folder: Path) -> None:
    if folder.exists():
        sys.exit(f"{folder} is there already; remove it to fetch the data again")
    with tempfile.TemporaryDirectory() as name:
        print(f"fetching {PACKAGE} (3 MB)")
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", name]
        subprocess.run([*download, PACKAGE], check=True)
        wheel = next(Path(name).glob("easy_vqa-*.whl"))
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            sys.exit(f"{wheel.name}: sha256 {found} is not {SHA256}: this is not the file that was tested, nothing was written")
        made = folder.with_name(f"{folder.name}.partial")
        with zipfile.ZipFile(wheel) as archive:
            counts = convert(archive, made)
        made.rename(folder)  # complete or not there
    for split, kinds in counts.items():
        print(f"wrote {folder / split}.jsonl: {', '.join(f'{count} of {kind}' for kind, count in kinds.items())}")


def convert(archive: zipfile.ZipFile, folder: Path) -> dict[str, Counter[str]]:
    """Writes pictures and rows of the package's file into `folder`. Returns the number of rows by split and kind."""
    counts = {}
    for split in SPLITS:
        questions = balanced(json.loads(archive.read(f"easy_vqa/data/{split}/questions.json")))
        if split == "test":
            random.Random(0).shuffle(questions)  # since evaluations take the first ones
        rows = [
            {"prompt": f"<image>{text}", "answer": answer, "kind": kind_of(answer), "images": f"{split}/{picture}.png"}
            for text, answer, picture in questions
        ]
        (folder / split).mkdir(parents=True, exist_ok=True)
        for picture in {number for _, _, number in questions}:
            (folder / split / f"{picture}.png").write_bytes(archive.read(f"easy_vqa/data/{split}/images/{picture}.png"))
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        counts[split] = Counter(row["kind"] for row in rows)
    return counts


def balanced(questions: Sequence[Question]) -> list[Question]:
    """Leaves out questions about presence, until each text has yes as often as no, and the kinds are about as many.

    "Is there a blue shape?" has a no in seven of eight pictures: 83 % of such held-out questions can be answered without
    looking, and they are three quarters of the set. Together they would hide whether a model looks.
    """
    counts = Counter((text, answer) for text, answer, _ in questions)
    kept, seen = [], Counter[tuple[str, str]]()
    for text, answer, picture in questions:
        seen[text, answer] += 1
        if kind_of(answer) != "presence" or seen[text, answer] <= min(counts[text, "yes"], counts[text, "no"]) / 2:
            kept.append((text, answer, picture))
    return kept


def kind_of(answer: str) -> str:
    return "presence" if answer in ("yes", "no") else "shape" if answer in SHAPES else "colour"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
