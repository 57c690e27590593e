"""What is said when Ray itself dies; the calls to its actors would wait for ever."""

import asyncio
import subprocess
import sys

import psutil

from relax.config import load_config
from relax.control.cluster import RayRuntime


def test_a_lost_raylet_is_named_at_once(run_file):
    runtime = RayRuntime(load_config(run_file("ray"), []))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stand_in:
        runtime._session.vital = {"raylet": psutil.Process(stand_in.pid)}
        assert asyncio.run(runtime.status()) == {}
        stand_in.kill()
        stand_in.wait()
        status = asyncio.run(runtime.status())
    assert status["ray"]["error_kind"] == "ray"
    assert f"Ray's raylet (process {stand_in.pid}) died" in status["ray"]["error"]
