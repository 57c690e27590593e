"""Reward functions that misbehave, run in real workers by `test_pool.py`."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

CHILD_NOTE = "RELAX_TEST_CHILD_NOTE"


def act(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> Any:
    """Does what the response says."""
    name, _, argument = response.partition(" ")
    if name == "number":
        return float(argument)
    if name == "loop":
        while True:
            pass
    if name == "sleep":
        time.sleep(float(argument))
        return 1.0
    if name == "regex":  # never lets go of the interpreter lock
        return float(re.fullmatch("(a|a)*b", "a" * 40) is not None)
    if name == "exit":
        os._exit(int(argument))
    if name == "sys.exit":
        sys.exit("bye")
    if name == "raise":
        raise ValueError(argument)
    if name == "print":
        print("junk\0" * 10_000, flush=True)  # noqa: T201 - what is tested
        os.write(1, b"\xff" * 1000)
        return 0.25
    if name == "thread":
        return float(threading.current_thread() is threading.main_thread())
    if name == "child":
        child = subprocess.Popen(["sleep", "60"])
        with open(os.environ[CHILD_NOTE], "w") as file:  # noqa: PTH123 - plain on purpose
            file.write(str(child.pid))
        time.sleep(60)
    if name == "modules":
        return {"reward": 1.0, "torch": "torch" in sys.modules, "ray": "ray" in sys.modules}
    return {
        "text": "great",
        "none": None,
        "nan": float("nan"),
        "inf": float("-inf"),
        "true": True,
        "int": 3,
        "numpy": np.float32(0.5),
        "array": np.array(0.5),
        "vector": np.zeros(3),
        "complex": 1j,
        "parts": {"reward": 1, "format": np.int64(1), "answer": 0.5},
        "no reward": {"format": 1.0},
        "bad part": {"reward": 1.0, "format": "yes"},
        "huge": 10**400,
        "echo": len(str(prompt)) + len(str(answer)) + len(metadata),
    }[response]


async def act_later(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> Any:
    name, _, argument = response.partition(" ")
    if name == "wait":
        await asyncio.sleep(float(argument))
        return float(argument)
    return act(prompt, response, answer, metadata)


def lengths(prompt: Any, responses: list[str], answer: Any, metadata: dict[str, Any], *, scale: float = 1.0) -> Any:
    if "short" in responses:
        return [0.0]
    if "number" in responses:
        return 1.0
    return np.array([len(response) * scale for response in responses])


def too_few(prompt: Any, response: str) -> float:
    return 1.0
