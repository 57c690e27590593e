"""How a command of this installation is typed: by its name alone where the shell finds it, else by its path.

`make demo` works without an activated environment, and what a run says at its end should work by copy and paste there too.
"""

import shlex
import shutil
import sys
from pathlib import Path


def typed(command: str, folder: Path = Path()) -> str:
    """`command` with its first word, a program beside this Python, as a shell in `folder` can run it."""
    program, _, arguments = command.partition(" ")
    beside = Path(sys.executable).with_name(program)
    if shutil.which(program) or not beside.exists():
        return command
    base = folder.absolute()
    shown = beside.relative_to(base) if beside.is_relative_to(base) else beside
    return f"{shlex.quote(str(shown))} {arguments}".rstrip()
