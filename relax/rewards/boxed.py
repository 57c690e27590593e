r"""Boxes in LaTeX: `\boxed{...}`, in which models are taught to put their last answer."""

import re

BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
MAX_BOXES = 20  # that are never closed, before looking further is given up
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` that is closed; None without one."""
    for match in list(BOXED.finditer(text))[: -MAX_BOXES - 1 : -1]:
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0) if text[position - 1] != "\\" else 0
            if depth == 0:
                return text[match.end() : position].strip()
    return None


def without_text_commands(text: str) -> str:
    r"""`\text{A}` as `A`, and so on, also inside one another."""
    for _ in range(5):
        text, count = _TEXT_COMMAND.subn(r"\1", text)
        if not count:
            break
    return text
