"""The worker pool: whatever a reward function does, only its own response is affected, and the pool stays whole."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relax.config.reward import ExactRewardConfig, FormatRewardConfig, FunctionRewardConfig, RewardConfig
from relax.errors import ConfigError, RewardError
from relax.rewards.pool import RewardPool
from relax.rewards.table import make_scorer
from relax.types import Outcome, Prompt

PROMPT = Prompt("p:1", messages=({"role": "user", "content": "1+1=?"},), answer="2", metadata={"level": 1})
HERE = Path(__file__).parents[1]  # of rewards_under_test.py


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def config(function: str = "act", **changes: Any) -> FunctionRewardConfig:
    return FunctionRewardConfig(path=f"rewards_under_test:{function}", **{"time_limit_s": 5.0, **changes})


class Running:
    """A started pool for a `with` block, which checks that no worker is left when it ends."""

    def __init__(self, reward: RewardConfig) -> None:
        self.pool = RewardPool(reward)

    async def __aenter__(self) -> RewardPool:
        await self.pool.start()
        return self.pool

    async def __aexit__(self, *_: object) -> None:
        pids = self.pool.worker_pids
        await self.pool.close()
        assert not [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Any, limit_s: float = 5.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


async def test_what_a_function_may_return_and_what_is_refused() -> None:
    good = {
        "true": 1.0,
        "int": 3.0,
        "numpy": 0.5,
        "array": 0.5,
        "number -2.5": -2.5,
        "print": 0.25,
        "parts": 1.0,
        "thread": 1.0,
    }
    bad = {
        "text": "must be a number, and is str: 'great'",
        "none": "NoneType",
        "nan": "nan",
        "inf": "inf",
        "huge": "inf",
        "vector": "ndarray",
        "complex": "complex",
        "no reward": "without the key 'reward'",
        "bad part": "the part 'format' must be a number",
        "raise oh no": "ValueError: oh no (rewards_under_test.py, line",
        "sys.exit": "SystemExit: bye",
        "unknown": "KeyError",
    }
    async with Running(config()) as pool:
        pids = pool.worker_pids
        results = await pool.score(PROMPT, [*good, *bad])
        assert [result.value for result in results[: len(good)]] == list(good.values())
        assert all(result.outcome is Outcome.OK and result.error is None for result in results[: len(good)])
        assert results[6].parts == {"format": 1.0, "answer": 0.5}
        for result, words in zip(results[len(good) :], bad.values(), strict=True):
            assert result.outcome is Outcome.REWARD_ERROR
            assert result.value is None
            assert words in str(result.error)
        modules = (await pool.score(PROMPT, ["modules", "echo"]))[0]
        assert modules.parts == {"torch": 0.0, "ray": 0.0}
        assert pool.worker_pids == pids  # none of this costs a worker
        assert await pool.score(PROMPT, []) == []


async def test_a_call_that_hangs_or_ends_its_worker_is_the_only_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "child"
    monkeypatch.setenv("RELAX_TEST_CHILD_NOTE", str(note))
    past = "ran past reward.time_limit_s = 0.5"
    bad = {"regex": past, "child": past, "exit 3": "exit code 3"}
    async with Running(config(time_limit_s=0.5, num_workers=2)) as pool:
        before = pool.worker_pids
        responses = [text for index, name in enumerate(bad) for text in (f"number {index}", name)]
        results, others = await asyncio.gather(pool.score(PROMPT, responses), pool.score(PROMPT, ["number 7"] * 20))
        assert [result.value for result in results[::2]] == [0.0, 1.0, 2.0]
        for result, words in zip(results[1::2], bad.values(), strict=True):
            assert (result.outcome, result.value) == (Outcome.REWARD_ERROR, None)
            assert words in str(result.error)
        assert [result.value for result in others] == [7.0] * 20
        assert await until(lambda: len(pool.worker_pids) == 2)
        assert not set(before) & set(pool.worker_pids)
        assert pool.stats.num_replaced == len(bad)
        assert await until(lambda: not is_alive(int(note.read_text())))  # what a reward starts ends with it


async def test_a_worker_killed_from_outside_loses_nothing_but_its_call() -> None:
    async with Running(config()) as pool:
        scoring = asyncio.create_task(pool.score(PROMPT, ["sleep 60", *["number 1"] * 20]))
        await asyncio.sleep(0.1)
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        results = await scoring
        assert "signal SIGKILL" in str(results[0].error)
        assert [result.value for result in results[1:]] == [1.0] * 20
        giving_up = asyncio.create_task(pool.score(PROMPT, ["sleep 0.1"] * 2))
        await asyncio.sleep(0.05)
        giving_up.cancel()  # a caller that gives up disturbs nobody
        assert (await pool.score(PROMPT, ["number 1"]))[0].value == 1.0


async def test_async_functions_overlap_and_have_the_same_limit() -> None:
    async with Running(config("act_later", time_limit_s=0.5)) as pool:
        pids = pool.worker_pids
        began = time.monotonic()
        results = await pool.score(PROMPT, ["wait 0.2"] * 16 + ["wait 60", "raise late", "text"])
        assert time.monotonic() - began < 2.5  # 16 x 0.2 s and the limit, all at once
        assert [result.value for result in results[:16]] == [0.2] * 16
        assert "time_limit_s" in str(results[16].error)
        assert "ValueError: late" in str(results[17].error)
        assert "is str" in str(results[18].error)
        assert pool.worker_pids == pids
        # One that ends the worker, in which all were running, is told from its neighbours.
        results = await pool.score(PROMPT, ["wait 0.1", "exit 3", "wait 0.2"])
        assert [result.value for result in results] == [0.1, None, 0.2]


async def test_a_function_per_group_must_return_one_number_a_response() -> None:
    async with Running(config("lengths", per_group=True, options={"scale": 2.0})) as pool:
        assert [result.value for result in await pool.score(PROMPT, ["", "a", "bbb"])] == [0.0, 2.0, 6.0]
        short = await pool.score(PROMPT, ["short", "x"])
        assert all("returned 1 values for 2 responses" in str(result.error) for result in short)
        number = await pool.score(PROMPT, ["number", "x"])
        assert all("must return a list of numbers" in str(result.error) for result in number)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (config("nothing_here"), "has no 'nothing_here'"),
        (FunctionRewardConfig(path="no_such_module:f"), "there is no module 'no_such_module'"),
        (FunctionRewardConfig(path="nonsense"), "package.module:function"),
        (config("too_few"), "does not fit"),
        (config("act", options={"scale": 2}), "does not fit: got an unexpected keyword argument 'scale'"),
        (config("CHILD_NOTE"), "is a str, not a function"),
        (FormatRewardConfig(pattern="("), "not a regular expression"),
    ],
)
def test_a_reward_that_cannot_be_made_says_why(reward: RewardConfig, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_scorer(reward)
    assert words in str(caught.value)


@pytest.mark.slow
async def test_a_pool_refuses_to_start_with_what_its_workers_cannot_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reward.py").write_text("1 / 0\n")
    (tmp_path / "deadly_reward.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "slow_reward.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = {
        "broken_reward": "importing broken_reward failed: ZeroDivisionError",
        "deadly_reward": "the worker ended while it imported the reward (exit code 7)",
        "slow_reward": "was not imported within 1 s",
    }
    limits = {"slow_reward": 1.0}
    pools = [RewardPool(FunctionRewardConfig(path=f"{name}:f"), start_limit_s=limits.get(name, 60.0)) for name in expected]
    errors = await asyncio.gather(*(pool.start() for pool in pools), return_exceptions=True)
    for error, words in zip(errors, expected.values(), strict=True):
        assert isinstance(error, ConfigError)
        assert words in str(error)
    assert all(pool.worker_pids == [] for pool in pools)


@pytest.mark.slow
async def test_a_reward_that_cannot_be_started_again_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax.rewards.pool.MAX_STARTS", 1)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "once.py").write_text("import os\ndef f(prompt, response, answer, metadata):\n    os._exit(1)\n")
    async with Running(FunctionRewardConfig(path="once:f")) as pool:
        (tmp_path / "once.py").write_text("1 / 0  # no longer of any use\n")
        with pytest.raises(RewardError, match="could not be replaced"):
            await pool.score(PROMPT, ["a", "b"])
        with pytest.raises(RewardError, match="could not be replaced"):
            await pool.score(PROMPT, ["a"])


async def test_closing_ends_those_who_wait() -> None:
    async with Running(config()) as pool:
        scoring = asyncio.create_task(pool.score(PROMPT, ["sleep 60"]))
        await asyncio.sleep(0.05)
        await pool.close()
        with pytest.raises(RewardError, match="closed"):
            await scoring
        with pytest.raises(RewardError, match="closed"):
            await pool.score(PROMPT, ["number 1"])
    with pytest.raises(RewardError, match="not started"):
        await RewardPool(config()).score(PROMPT, ["number 1"])


async def test_answers_and_metadata_of_any_json_kind_arrive() -> None:
    async with Running(ExactRewardConfig()) as pool:
        big = Prompt("p:2", text="x", answer=2**200)
        assert (await pool.score(big, [str(2**200), "\ud800"]))[0].value == 1.0
        odd = Prompt("p:3", text="x", answer={1, 2}, metadata={"x": object()})
        assert "p:3: its answer or metadata cannot be sent" in str((await pool.score(odd, ["1"]))[0].error)
        missing = Prompt("p:4", text="x")
        assert "the row has no answer" in str((await pool.score(missing, ["1"]))[0].error)


async def test_files_of_the_working_directory_do_not_hide_pythons_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('hidden')\n")
    (tmp_path / "noise.py").write_text(
        "import random\ndef f(prompt, response, answer, metadata):\n    return random.random()\n"
    )
    monkeypatch.chdir(tmp_path)
    async with Running(FunctionRewardConfig(path="noise:f")) as pool:
        assert (await pool.score(PROMPT, ["x"]))[0].outcome is Outcome.OK


ORPHAN = """
import asyncio, os, sys
sys.path.insert(0, {here!r})
from relax.config.reward import FunctionRewardConfig
from relax.rewards.pool import RewardPool
from relax.rewards.table import make_scorer
from relax.types import Prompt
async def main():
    pool = RewardPool(FunctionRewardConfig(path="rewards_under_test:act", num_workers=2, time_limit_s=60))
    await pool.start()
    tasks = [asyncio.create_task(pool.score(Prompt("p", text="x"), [what])) for what in ("regex", "sleep 60")]
    await asyncio.sleep(0.2)
    print(*pool.worker_pids, flush=True)
    os._exit(1)
asyncio.run(main())  # without a guard: workers must not run this file
"""


async def test_workers_end_with_a_parent_that_dies_even_inside_c_code(tmp_path: Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN.format(here=str(HERE)))
    done = await asyncio.to_thread(subprocess.run, [sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert await until(lambda: not any(is_alive(pid) for pid in pids))
