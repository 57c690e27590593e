"""A teacher behind a server says what the same teacher loaded here says; and what nobody said is in no loss."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_teacher import TeacherServer, dumped
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.cli.check_models import other_model_findings
from relax.config import RunConfig, make_config
from relax.errors import ConfigError, ModelError, ServerError, TeacherError
from relax.models.folder import read_model_folder
from relax.roles.advantages import Advantages
from relax.roles.build import make_column_maker, make_inside
from relax.roles.rows import Rows, taught, untaught
from relax.roles.served_teacher import ServedTeacher
from relax.roles.teacher import Teacher
from relax.roles.teacher_protocols import PROTOCOLS, Told, read_answer
from relax.train.torch_backend import TorchBackend
from relax.types import Column, Ragged

RAW: dict[str, Any] = {
    "data": {"type": "reasoning_gym", "task": "chain_sum"},
    "reward": {"type": "exact"},
    "train": {"num_steps": 1},
    "resources": {"mode": "hybrid"},
    "rollout": {"group_size": 2},
}
OPD, FULL = {"type": "opd"}, {"type": "opd_full", "top_k": 5}
HASTY = {"backoff_s": 0.001, "request_time_limit_s": 5.0, "retries": 1}
IDS = np.array([0, 0, 1], np.int64)


def config_of(policy: Path, server: TeacherServer | None, algorithm: dict[str, Any] = OPD, **changes: Any) -> RunConfig:
    teacher = {"server": {"url": server.url, **HASTY, **changes}} if server else {"model": {"path": str(policy)}}
    return make_config({**RAW, "model": {"path": str(policy)}, "algorithm": algorithm, "teacher": teacher}, [])


@pytest.fixture
def columns() -> dict[str, Column]:
    """Three rows of two groups; what is trained has gaps. The first two share a prompt."""
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 512, 4)
    rows = [[*prompt, *rng.integers(0, 512, count)] for count in (3, 6)] + [list(rng.integers(0, 512, 9))]
    masks = [[0] * 4 + [1] * 3, [0] * 4 + [1, 1, 0, 0, 1, 1], [0] * 2 + [1] * 7]
    tokens = Ragged.pack([np.array(row, np.int32) for row in rows])
    mask = Ragged.pack([np.array(row, np.uint8) for row in masks])
    logprobs = Ragged(np.where(mask.values, -6.2, 0.0).astype(np.float32), mask.offsets)
    rewards, sampled = np.array([1.0, 0.0, 1.0]), np.array([3, 4, 7])
    return {"tokens": tokens, "loss_mask": mask, "rollout_logprobs": logprobs, "reward": rewards, "num_sampled": sampled}


def flat(made: dict[str, Column]) -> dict[str, np.ndarray]:
    return {name: column.values for name, column in made.items() if isinstance(column, Ragged)}


@pytest.mark.parametrize(
    ("protocol", "algorithm"), [("vllm", OPD), ("vllm", FULL), ("sglang", OPD), ("sglang", FULL), ("openai", OPD)]
)
def test_a_server_says_what_the_model_says_in_a_float64_loop_and_here(
    tiny_model: Path, columns: dict[str, Column], protocol: str, algorithm: dict[str, Any]
) -> None:
    with TeacherServer(tiny_model) as server:
        config = config_of(tiny_model, server, algorithm, protocol=protocol, max_requests=2)
        served = make_inside(config, TorchBackend(config), tiny_model)[0]
        served.load()
        found = flat(served.make(columns, IDS))
        here = Teacher(config_of(tiny_model, None, algorithm), TorchBackend)
        here.load()
        expected = flat(here.make(columns, IDS))
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name].dtype == values.dtype
            assert np.abs(found[name] - values).max() < 1e-5, name
        assert server.most_at_once <= 2
        tokens, mask = columns["tokens"], columns["loss_mask"]
        for start, end in pairwise(tokens.offsets):
            table = server.logprobs(tokens.values[start:end].tolist())
            for place in range(start + 1, end):
                if mask.values[place]:
                    row = table[place - start - 1]
                    if algorithm is OPD:
                        assert abs(found["teacher_logprobs"][place] - row[tokens.values[place]]) < 1e-5
                    else:
                        best = row.topk(5)
                        assert found["teacher_top_ids"][place].tolist() == best.indices.tolist()
                        assert np.abs(found["teacher_top_logprobs"][place] - best.values.numpy()).max() < 1e-5
        assert 0 < served.finish_step()["teacher/latency_s"] < 5
        assert served.finish_step() == {}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("gone", "ServerDisconnected"),
        ("hang", "no answer in teacher.server.request_time_limit_s"),
        (500, "it answered 500"),
        (429, "it answered 429"),
        (b"", "not one about"),
        (b"OK", "not one about"),
        (b"[" * 100_000, "not one about"),
        (dumped({"choices": []}), "not one about"),
        (dumped({"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1.0}}]}]}), "2 places"),
        (dumped({"choices": [{"prompt_logprobs": [{"7": {"logprob": -1.0}}] * 7}]}), "a first token with a log-prob"),
        (dumped({"choices": [{"prompt_logprobs": [None] + [{"7": {"logprob": -1.0}}] * 6}]}), "no "),
    ],
)
def test_a_sample_without_an_answer_is_left_out_and_the_others_are_not(
    tiny_model: Path, columns: dict[str, Column], caplog: pytest.LogCaptureFixture, fault: Any, words: str
) -> None:
    answers_at_once = isinstance(fault, bytes)  # no reason to ask again
    with TeacherServer(tiny_model) as server:
        teacher = ServedTeacher(config_of(tiny_model, server, request_time_limit_s=0.2, max_requests=1))
        teacher.load()
        server.num_asked, server.fault = 0, lambda number: fault if number < (1 if answers_at_once else 2) else None
        made = teacher.make(columns, IDS)
        assert untaught(made).tolist() == [True, False, False]
        mask = taught(columns | made)["loss_mask"]
        assert mask[0].tolist() == [0] * 7
        assert all(mask[row].tolist() == columns["loss_mask"][row].tolist() for row in (1, 2))
        assert "no answer about 1 of 3 samples" in caplog.text
        assert words in caplog.text
        assert not np.isnan(flat(teacher.make(columns, IDS))["teacher_logprobs"]).any()


def test_what_passes_is_asked_again_and_nothing_is_lost(tiny_model: Path, columns: dict[str, Column]) -> None:
    with TeacherServer(tiny_model, lambda number: 503 if number in (0, 4) else None) as server:
        teacher = ServedTeacher(config_of(tiny_model, server))
        teacher.load()
        assert not untaught(teacher.make(columns, IDS)).any()
        assert server.num_asked == 1 + 3 + 2


def test_a_teacher_that_is_gone_for_long_ends_the_run_with_the_reason(tiny_model: Path, columns: dict[str, Column]) -> None:
    with TeacherServer(tiny_model) as server:
        teacher = ServedTeacher(config_of(tiny_model, server, retries=0, max_failed_in_a_row=5))
        teacher.load()
        server.fault = lambda number: 500
        assert untaught(teacher.make(columns, IDS)).all()
        server.fault = lambda number: None
        assert not untaught(teacher.make(columns, IDS)).any()  # which ends the row of failures
        server.fault = lambda number: 500
        assert untaught(teacher.make(columns, IDS)).all()
        words = r"[56] samples in a row \(teacher.server.max_failed_in_a_row\); the last one: it answered 500"
        with pytest.raises(TeacherError, match=words) as raised:
            teacher.make(columns, IDS)
        assert server.url in str(raised.value)


def test_a_hanging_teacher_is_left_at_once_when_the_run_stops(tiny_model: Path, columns: dict[str, Column]) -> None:
    with TeacherServer(tiny_model) as server:
        teacher = ServedTeacher(config_of(tiny_model, server, request_time_limit_s=20.0))
        teacher.load()
        teacher.stop()  # of nothing
        is_asked = threading.Event()
        server.fault = lambda number: is_asked.set() or "hang"
        with ThreadPoolExecutor() as pool:
            making = pool.submit(teacher.make, columns, IDS)
            assert is_asked.wait(10)
            teacher.stop()
            with pytest.raises(asyncio.CancelledError):
                making.result(10)


def smaller_vocabulary(server: TeacherServer) -> None:
    server.num_tokens -= 1


def no_first_null(server: TeacherServer) -> None:
    def shift(answer: dict[str, Any]) -> dict[str, Any]:
        places = answer["choices"][0]["prompt_logprobs"]
        return {"choices": [{"prompt_logprobs": [*places[1:], None]}]}

    server.fault = lambda number: shift


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(smaller_vocabulary, "token id 511 is out of vocabulary"), (no_first_null, "a first token with a log-prob")],
)
def test_a_server_of_another_vocabulary_or_alignment_is_refused_at_the_start(
    tiny_model: Path, spoil: Callable[[TeacherServer], None], words: str
) -> None:
    with TeacherServer(tiny_model) as server:
        spoil(server)
        config = config_of(tiny_model, server)
        with pytest.raises(ConfigError, match=words) as raised:
            ServedTeacher(config).load()
        assert "teacher.server.url" in str(raised.value)
        policy = read_model_folder(config.model)
        assert [found.level for found in other_model_findings(config, policy)] == ["ok"]
        assert [found.level for found in other_model_findings(config, policy, ask_teacher=True)] == ["error"]
    gone = make_column_maker("teacher", config, tiny_model, 0, TorchBackend)
    with pytest.raises(ConfigError, match="Cannot connect"):
        gone.load()


def test_the_key_the_headers_and_the_name_are_sent(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_TEST_KEY", "abc")
    with TeacherServer(tiny_model) as server:
        sent = {"api_key_env": "RELAX_TEST_KEY", "headers": {"X-Run": "seven"}, "model": "big"}
        ServedTeacher(config_of(tiny_model, server, **sent)).load()
        assert (server.headers["Authorization"], server.headers["X-Run"]) == ("Bearer abc", "seven")
        assert server.asked["model"] == "big"
        monkeypatch.delenv("RELAX_TEST_KEY")
        with pytest.raises(ConfigError, match=r"teacher\.server\.api_key_env = 'RELAX_TEST_KEY'"):
            ServedTeacher(config_of(tiny_model, server, **sent)).load()


@pytest.mark.parametrize("algorithm", [OPD, FULL])
def test_an_untaught_row_is_as_if_it_had_not_been_there(
    tiny_model: Path, columns: dict[str, Column], algorithm: dict[str, Any]
) -> None:
    """Neither its gradient nor its count, in `advantages` and in the loss."""
    with TeacherServer(tiny_model) as server:
        config = config_of(tiny_model, server, algorithm, max_requests=1, retries=0)
        teacher = ServedTeacher(config)
        teacher.load()
        server.num_asked, server.fault = 0, lambda number: 500 if number == 2 else None
        told = columns | teacher.make(columns, IDS)
    found = []
    for count in (3, 2):
        rows = next(Rows(told, IDS).parts(2)) if count == 3 else next(Rows(told, IDS).parts(1))
        assert len(rows) == count
        if algorithm is OPD:
            rows.columns.update(Advantages(config).make(rows.columns, rows.group_ids))
        backend = TorchBackend(config)
        sums = backend.forward_backward(Rows(taught(rows.columns), rows.group_ids).to_batch())
        found.append((sums.values(), {name: gradient.clone() for name, gradient in backend.gradients().items()}))
    (with_it, its_gradients), (without, gradients) = found
    assert with_it == pytest.approx(without, rel=1e-5)
    assert its_gradients.keys() == gradients.keys()
    assert all(torch.allclose(its_gradients[name], gradient, atol=1e-6) for name, gradient in gradients.items())
    assert any(gradient.any() for gradient in gradients.values())


def test_tokens_that_the_policy_has_not_count_among_all_others(
    tiny_model: Path, columns: dict[str, Column], tmp_path: Path
) -> None:
    """The divergence is that of the tokens both have, and a bucket."""
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    described = json.loads((tmp_path / "config.json").read_text())
    with TeacherServer(tiny_model) as server:
        teacher = ServedTeacher(config_of(tiny_model, server, FULL))
        teacher.load()
        whole = flat(teacher.make(columns, IDS))
        trained = columns["loss_mask"].values != 0
        fewer = int(np.median(whole["teacher_top_ids"][trained]))
        (tmp_path / "config.json").write_text(json.dumps(described | {"vocab_size": fewer}))
        teacher = ServedTeacher(config_of(tmp_path, server, FULL))
        teacher.load()
        found = flat(teacher.make(columns, IDS))
    for place in np.flatnonzero(trained):
        known = whole["teacher_top_ids"][place] < fewer
        count = int(known.sum())
        assert found["teacher_top_ids"][place].tolist() == [*whole["teacher_top_ids"][place][known], *[0] * (5 - count)]
        assert found["teacher_top_logprobs"][place][:count].tolist() == whole["teacher_top_logprobs"][place][known].tolist()
        assert np.isneginf(found["teacher_top_logprobs"][place][count:]).all()
    assert np.isneginf(found["teacher_top_logprobs"][trained]).any()


def test_a_teacher_that_computes_no_numbers_is_an_error_and_not_an_untaught_row(
    tiny_model: Path, columns: dict[str, Column]
) -> None:
    teacher = Teacher(config_of(tiny_model, None), TorchBackend)
    teacher.load()
    with torch.no_grad():
        next(iter(teacher._backend.weights().values())).fill_(float("nan"))
    with pytest.raises(ModelError, match="not numbers"):
        teacher.make(columns, IDS)


SERVER = {"server": {"url": "http://127.0.0.1:1"}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": {}}, "give either teacher.model.path"),
        ({"teacher": {"model": {"path": "t"}, **SERVER}}, "give either teacher.model.path"),
        ({"rollout": {"temperature": 0.7}}, "log-probs of a prompt at temperature 1"),
        ({"data": RAW["data"] | {"media": {}}}, "sees no media of data.media"),
        ({"algorithm": FULL, "teacher": {"server": {"url": "http://t", "protocol": "openai"}}}, "by their text"),
        ({"teacher": {"server": {"url": "127.0.0.1:8000"}}}, "teacher.server.url"),
    ],
)
def test_what_a_server_cannot_tell_is_refused(changes: dict[str, Any], words: str) -> None:
    raw = {**RAW, "model": {"path": "m"}, "algorithm": OPD, "teacher": SERVER}
    make_config(raw, [])
    with pytest.raises(ConfigError, match=words):
        make_config(raw | changes, [])


# -- reading answers --------------------------------------------------------------------------------------------------
NUMBERS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
ANYTHING = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["choices", "prompt_logprobs", "logprob", "meta_info", "7"]), inner, max_size=3),
    ),
    max_leaves=12,
)
LOGPROBS = st.floats(-50, 0)


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[int], int, list[float], list[list[tuple[float, int]]], Any]:
    """A protocol, tokens, K, what is said about them, and the answer that says so."""
    protocol = draw(st.sampled_from(sorted(PROTOCOLS)))
    tokens = draw(st.lists(st.integers(0, 20), min_size=2, max_size=6))
    top_k = 0 if protocol == "openai" else draw(st.integers(0, 3))
    own = draw(st.lists(LOGPROBS, min_size=len(tokens) - 1, max_size=len(tokens) - 1))
    tables = []
    for logprob, token in zip(own, tokens[1:], strict=True):
        others = draw(st.lists(st.tuples(LOGPROBS, st.integers(0, 20)), min_size=3, max_size=3, unique_by=lambda p: p[1]))
        tables.append({other: value for value, other in others} | {token: logprob})
    top = [sorted(((v, t) for t, v in table.items()), key=lambda p: (-p[0], p[1]))[:top_k] for table in tables]
    if protocol == "vllm":
        places = [{str(token): {"logprob": value} for token, value in table.items()} for table in tables]
        answer: Any = {"choices": [{"prompt_logprobs": [None, *places]}]}
    elif protocol == "sglang":
        entries = [[None, tokens[0], None], *([v, t, None] for v, t in zip(own, tokens[1:], strict=True))]
        tops = [None, *([[v, t, None] for v, t in pairs] for pairs in top)]
        answer = {"meta_info": {"input_token_logprobs": entries, "input_top_logprobs": tops}}
    else:
        answer = {"choices": [{"logprobs": {"token_logprobs": [None, *own, *draw(st.sampled_from([[], [-1.0]]))]}}]}
    return protocol, tokens, top_k, own, top, answer


@settings(max_examples=40, deadline=None)
@given(answers())
def test_a_true_answer_is_read_as_it_was_meant(case: Any) -> None:
    protocol, tokens, top_k, own, top, answer = case
    told = read_answer(PROTOCOLS[protocol], dumped(answer), tokens, top_k)
    assert told.logprobs == [0.0, *own]
    assert [list(pairs) for pairs in told.top] == ([[], *top] if top_k else [])


def _spoiled(answer: Any, path: list[int], by: Any) -> Any:
    """With `by` in place of what lies at the end of the path."""
    if not path or not isinstance(answer, dict | list) or not answer:
        return by
    keys = list(answer) if isinstance(answer, dict) else range(len(answer))
    chosen = list(keys)[path[0] % len(answer)]
    items = answer.items() if isinstance(answer, dict) else enumerate(answer)
    changed = {key: _spoiled(inner, path[1:], by) if key == chosen else inner for key, inner in items}
    return changed if isinstance(answer, dict) else list(changed.values())


@settings(max_examples=80, deadline=None)
@given(answers(), st.lists(st.integers(0, 5), max_size=6), ANYTHING)
def test_a_spoiled_answer_is_an_error_of_the_server_or_still_whole(case: Any, path: list[int], by: Any) -> None:
    protocol, tokens, top_k, *_, answer = case
    try:
        told = read_answer(PROTOCOLS[protocol], dumped(_spoiled(answer, path, by)), tokens, top_k)
    except ServerError:
        return
    assert isinstance(told, Told)
    assert len(told.logprobs) == len(tokens)
    assert np.isfinite(told.logprobs).all()
    assert max(told.logprobs) < 0.01
    assert all(len(pairs) == top_k for pairs in told.top[1:])
    assert all(number >= 0 for pairs in told.top for _, number in pairs)
