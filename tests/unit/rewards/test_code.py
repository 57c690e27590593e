"""The reward for programs: forms of tests, right and wrong programs, and that only a program can be wrong, not the box."""

import os
from typing import Any

import pytest

from relax.config.reward import CodeRewardConfig
from relax.errors import ConfigError
from relax.rewards import code
from relax.rewards.code_tests import Test, read_tests
from relax.rewards.pool import RewardPool
from relax.rewards.sandbox.box import SandboxError, open_box
from relax.rewards.table import Scorer, make_scorer
from relax.types import Outcome, Prompt

SUM = "```python\nprint(sum(map(int, input().split())))\n```"
PAIRS = [{"input": "1 2", "output": "3\n"}, {"input": "10 20 30", "output": "60"}]
HUMAN_EVAL = {
    "entry_point": "add",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n",
}
HEADER = 'def add(x: int, y: int) -> int:\n    """Add two numbers."""\n'


def _has_sandbox() -> bool:
    try:
        open_box("best").close()
    except SandboxError:
        return False
    return True


needs_sandbox = pytest.mark.skipif(not _has_sandbox(), reason="this machine has no sandbox")


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return make_scorer(CodeRewardConfig(test_time_limit_s=0.5))


@pytest.fixture(scope="module")
def partial() -> Scorer:
    return make_scorer(CodeRewardConfig(test_time_limit_s=0.5, partial=True))


def reward(scorer: Scorer, response: str, metadata: dict[str, Any], answer: Any = None, prompt: Any = "p") -> float:
    return float(scorer.call(prompt, response, answer, metadata)["reward"])


def test_tests_are_read_in_the_forms_that_data_sets_have() -> None:
    assert read_tests({"tests": PAIRS}, None, "tests")[0] == Test("1 2", "3\n")
    assert read_tests({"tests": '[{"stdin": "1", "stdout": "2"}]'}, None, "tests") == [Test("1", "2")]
    assert read_tests({"tests": {"inputs": ["1"], "outputs": ["2"]}}, None, "tests") == [Test("1", "2")]
    assert read_tests({"cases": ["assert f(1)", "assert f(2)"]}, None, "cases") == [
        Test(check="assert f(1)"),
        Test(check="assert f(2)"),
    ]
    assert read_tests({}, ["assert f(1)"], "tests") == [Test(check="assert f(1)")]
    assert read_tests({"tests": "[f(1)][0] or 1 / 0"}, None, "tests") == [Test(check="[f(1)][0] or 1 / 0")]
    assert "check(add)" in str(read_tests(HUMAN_EVAL, None, "tests")[0].check)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "the row has no tests in 'tests'"),
        ({"tests": []}, "the row has no tests"),
        ({"tests": ""}, "the row has no tests"),
        ({"tests": [{"input": "1"}]}, "neither an assert nor a pair"),
        ({"tests": "5"}, "neither asserts nor pairs"),
        ({"tests": ["5"]}, "neither an assert nor a pair"),
        ({"tests": [3]}, "neither an assert nor a pair"),
        ({"tests": {"inputs": ["1", "2"], "outputs": ["1"]}}, "as many outputs as inputs"),
        ({"tests": [{"input": "1", "output": " \n"}]}, "passed by a program that does nothing"),
    ],
)
def test_a_row_without_usable_tests_is_an_error(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_tests(metadata, None, "tests")


@needs_sandbox
@pytest.mark.parametrize(
    ("response", "metadata", "expected"),
    [
        (SUM, {"tests": PAIRS}, 1),
        ("print(3)", {"tests": PAIRS}, 0),
        ("print(sum(map(int, input().split())), end='  \\n\\n')", {"tests": PAIRS}, 1),  # white space at ends says nothing
        ("print('total', sum(map(int, input().split())))", {"tests": PAIRS}, 0),
        ("print(' 3')", {"tests": PAIRS[:1]}, 0),
        ("print(3); raise SystemExit(1)", {"tests": PAIRS[:1]}, 0),
        ("print(3", {"tests": PAIRS[:1]}, 0),
        ("print(3)\x00", {"tests": PAIRS[:1]}, 0),
        ("Sorry, I cannot do that.", {"tests": PAIRS}, 0),
        ("", {"tests": PAIRS}, 0),
        ("```python\n```", {"tests": ["assert True"]}, 0),
        ("# nothing", {"tests": ["assert True"]}, 0),
        ("'''text'''", {"tests": ["assert True"]}, 0),
        ("pass", {"tests": ["assert f(1) == 1"]}, 0),
        ("(" * 5000, {"tests": ["assert True"]}, 0),
        ("-" * 100_000 + "1", {"tests": ["assert True"]}, 0),
        ("x = 1\n" * 50_000, {"tests": ["assert True"]}, 0),  # longer than any answer
        ("def f(x):\n    return x", {"tests": ["assert f(1) == 1", "assert f(2) == 2"]}, 1),
        ("def f(x):\n    return 1", {"tests": ["assert f(1) == 1", "assert f(2) == 2"]}, 0),
        (f"```python\n{HEADER}    return x + y\n```", HUMAN_EVAL, 1),
        ("    return x + y\n", HUMAN_EVAL, 1),  # continues the prompt
        ("    return x - y\n", HUMAN_EVAL, 0),
        ("    import os\n    os._exit(0)\n", HUMAN_EVAL, 0),
        ("    import sys\n    sys.exit(0)\n", HUMAN_EVAL, 0),
        ("    pass\n\ndef check(candidate):\n    pass\n", HUMAN_EVAL, 0),
        ("", HUMAN_EVAL, 0),
    ],
)
def test_programs_are_right_when_their_tests_pass(
    scorer: Scorer, response: str, metadata: dict[str, Any], expected: int
) -> None:
    assert reward(scorer, response, metadata, prompt=HEADER) == expected


@needs_sandbox
def test_partial_is_the_share_of_tests(partial: Scorer, scorer: Scorer) -> None:
    row = {"tests": [f"assert f({number}) == {number}" for number in range(4)]}
    response = "def f(x):\n    if x == 1: raise ValueError\n    return x"
    assert partial.call("p", response, None, row) == {"reward": 0.75, "passed": 0.75}
    assert scorer.call("p", response, None, row) == {"reward": 0.0, "passed": 0.25}


@needs_sandbox
def test_tests_that_need_more_time_than_there_is_are_an_error_unless_the_program_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brief = make_scorer(CodeRewardConfig(test_time_limit_s=0.2, time_limit_s=0.6, partial=True))
    row = {"tests": ["import time; time.sleep(0.15)"] * 5}
    with pytest.raises(TimeoutError, match=r"tests took .* raise reward\.time_limit_s"):
        reward(brief, "x = 1", row)
    assert reward(brief, "import time; time.sleep(60)", row) == 0.0


def test_a_machine_without_a_sandbox_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise SandboxError("namespaces: not allowed; filters: no Landlock")

    monkeypatch.setattr(code, "open_box", none)
    with pytest.raises(ConfigError, match=r"reward\.isolation = 'best': this machine has no such sandbox: namespaces: not"):
        make_scorer(CodeRewardConfig())


@needs_sandbox
async def test_in_a_worker_what_a_program_does_costs_no_other_response_anything() -> None:
    pool = RewardPool(CodeRewardConfig(num_workers=2, test_time_limit_s=0.5, time_limit_s=3.0))
    os.environ["RELAX_TEST_SECRET"] = "hidden"
    try:
        await pool.start()
        assert "programs run in a sandbox of" in pool.notes[0]
        pids = pool.worker_pids
        prompt = Prompt("p", text="add", metadata={"tests": PAIRS})
        bad = [
            "import os\nos.kill(os.getppid(), 9)\nprint(3)",
            "while True: pass",
            "x = [0] * 10**10",
            "import os\nwhile 1: os.fork()",
        ]
        results = await pool.score(prompt, [text for item in bad for text in (SUM, item)])
        assert [result.value for result in results] == [1.0, 0.0] * len(bad)
        none = await pool.score(Prompt("q", text="x"), [SUM])
        assert (none[0].outcome, none[0].value) == (Outcome.REWARD_ERROR, None)
        assert "the row has no tests" in str(none[0].error)
        assert pool.worker_pids == pids
    finally:
        del os.environ["RELAX_TEST_SECRET"]
        await pool.close()
