"""Python programs, run against the row's tests in a sandbox.

    response -> its last block of code -> one run for each test, in the box of this worker -> how many passed

A program that fails, hangs or takes too much is wrong: 0.0. A box that fails, a row without tests, or tests that together
need more time than `reward.time_limit_s` are errors, of which nothing can be said about the program.
"""

import ast
import re
import time
from collections.abc import Sequence
from typing import Any

from relax.config.reward import CodeRewardConfig
from relax.errors import ConfigError
from relax.rewards.code_tests import Test, read_tests
from relax.rewards.sandbox.box import DESCRIPTIONS, Box, SandboxError, open_box
from relax.rewards.sandbox.jobs import Job, Limits
from relax.rewards.table import Scorer

FENCE = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
IMPORT = re.compile(r"^(?:import|from)\s[^\n(]*\n", re.MULTILINE)
PYTHON = ("python", "python3", "py", "")
SHARE = 0.8  # of `reward.time_limit_s` that tests may take; the rest is for the box, so that its worker is not killed
MAX_CHARACTERS = 200_000


def make_code(config: CodeRewardConfig) -> Scorer:
    """1.0 when all tests of the row pass (with `partial`: the share that does), else 0.0; the part `passed` is the share.

    Raises `ConfigError` when this machine has no sandbox of the wanted kind, or the time limits do not fit together.
    """
    longest_s, total_s = config.test_time_limit_s * 2, config.time_limit_s * SHARE
    if longest_s > total_s:
        raise ConfigError(
            f"reward.test_time_limit_s = {config.test_time_limit_s:g}: one test may last twice as long, which must fit into "
            f"four fifths of reward.time_limit_s = {config.time_limit_s:g}"
        )
    try:
        box = open_box(config.isolation, site_packages=config.site_packages)
    except SandboxError as error:
        raise ConfigError(f"reward.isolation = {config.isolation!r}: this machine has no such sandbox: {error}") from error
    limits = Limits(
        cpu_s=config.test_time_limit_s,
        wall_s=longest_s,
        memory_mib=config.memory_mib,
        disk_mib=config.disk_mib,
        max_processes=config.max_processes,
        max_output_bytes=config.max_output_kib << 10,
    )

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> dict[str, float]:
        tests = read_tests(metadata, answer, config.tests_key)
        source = program_of(response, prompt, metadata)
        if not source or len(source) > MAX_CHARACTERS or not _compiles(source):
            return {"reward": 0.0, "passed": 0.0}
        passed = _count_passed(box, source, tests, limits, total_s, to_the_end=config.partial)
        share = passed / len(tests)
        return {"reward": share if config.partial else float(passed == len(tests)), "passed": share}

    return Scorer(score, note=f"programs run in a sandbox of {DESCRIPTIONS[box.level]}")


def _count_passed(box: Box, source: str, tests: Sequence[Test], limits: Limits, total_s: float, *, to_the_end: bool) -> int:
    """Tests that pass; without `to_the_end` those before the first that does not. Raises `TimeoutError` when there is too
    little time for tests that are all in time."""
    until, passed, was_late = time.monotonic() + total_s, 0, False
    for number, test in enumerate(tests):
        left_s = until - time.monotonic()
        if left_s < limits.wall_s:
            if was_late:
                return passed  # it is this program that took the time
            raise TimeoutError(
                f"{number} of {len(tests)} tests took {total_s - left_s:.1f} s, and the next one may need {limits.wall_s:g} s "
                "more: raise reward.time_limit_s, or lower reward.test_time_limit_s"
            )
        ran = box.run(Job(source + test.suffix, test.stdin, test.check, limits))
        is_right = ran.ok and (test.stdout is None or lines_of(ran.stdout) == lines_of(test.stdout))
        passed, was_late = passed + is_right, was_late or ran.is_late
        if not is_right and not to_the_end:
            break
    return passed


def program_of(response: str, prompt: Any, metadata: dict[str, Any]) -> str:
    """The last block of Python behind the last `</think>`, closed or not; without a block the whole text.

    A row may have a header: its column `code_prefix`, or else a prompt that is a plain text. A program that lacks the row's
    `entry_point` continues the header; one that has it may use the header's imports.
    """
    text = response.rpartition("</think>")[2]
    blocks = [body for language, body in FENCE.findall(text) if language.lower() in PYTHON]
    code = blocks[-1] if blocks else text
    entry_point, header = metadata.get("entry_point"), metadata.get("code_prefix", prompt)
    if not code.strip() or not isinstance(entry_point, str) or not isinstance(header, str):
        return code if code.strip() else ""
    if re.search(rf"^(?:async\s+)?(?:def|class)\s+{re.escape(entry_point)}\b", code, re.MULTILINE):
        imports = "" if "__future__" in code else "".join(IMPORT.findall(header))  # which has to come first
        return imports + code
    return header + code


def lines_of(output: str) -> list[str]:
    """Lines without white space at their ends, and without empty ones at the end: what two outputs are compared by."""
    lines = [line.rstrip() for line in output.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _compiles(source: str) -> bool:
    """Whether it is Python and does anything: a text of comments and names of values is no program."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant | ast.Name) for node in tree.body)
