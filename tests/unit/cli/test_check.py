"""`relax check`: each thing that keeps a run from working is found before it starts, with its key and what would be right."""

import json
import shutil
import socket

import pytest

from relax.cli.check import check, check_config
from relax.cli.findings import Level, ok
from relax.config import load_config
from relax.errors import ConfigError


@pytest.fixture(autouse=True)
def _reward_is_not_tried(monkeypatch):
    """It takes a process; what is said of the reward is in test_check_reward.py."""
    monkeypatch.setattr("relax.cli.check.reward_findings", lambda *_: [ok("reward", "was not tried")])


JUDGE = ["reward.type=genrm", "genrm.judges.default.type=local"]
SERVED = [
    "reward.type=genrm",
    "genrm.judges.default.type=openai",
    "genrm.judges.default.url=http://127.0.0.1:9/v1",
    "genrm.judges.default.model=m",
]


def _found(report, level=Level.ERROR) -> str:
    return "\n".join(f"{finding.about}: {finding.text}" for finding in report.findings if finding.level is level)


def test_a_file_that_does_not_load_is_a_finding(small_run):
    report = check(small_run, ["train.lr=-1"])
    assert report.exit_code == 1
    assert "train.lr = -1" in report.render()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.path=nowhere"], "model.path = 'nowhere': there is no such folder"),
        (["data.path=nowhere.jsonl"], "no such file or folder"),
        (["eval.data.type=file", "eval.data.path=nowhere.jsonl"], "eval.data: "),
        (["rollout.max_new_tokens=256"], "leaves no room for a prompt in a context of 256"),
        (["data.max_prompt_tokens=240"], "is more than the context of 256"),
        (["data.answer_key=none"], "needs an answer"),
        (["data.type=reasoning_gym", "data.task=chain_sums"], "chain_sum"),
        (["algorithm.type=opd", "teacher.model.path=nowhere"], "teacher.model.path = 'nowhere': there is no such folder"),
        (["algorithm.type=ppo", "critic.model.path=nowhere"], "critic.model.path = 'nowhere': there is no such folder"),
        (["algorithm.type=custom", "algorithm.path=json:nope"], "has no 'nope'"),
        (["algorithm.type=custom", "algorithm.path=json:dumps", "algorithm.objective=nope:Loss"], "no module 'nope'"),
        ([*JUDGE, "genrm.judges.default.model.path=nowhere"], "genrm.judges.default.model.path = 'nowhere': there is no such"),
        ([*SERVED, "genrm.judges.default.api_key_env=NO_SUCH_KEY"], "'NO_SUCH_KEY': this environment variable is not set"),
    ],
)
def test_what_cannot_work_is_an_error(small_run, overrides, expected):
    report = check(small_run, overrides)
    assert report.exit_code == 1
    assert expected in _found(report)
    with pytest.raises(ConfigError, match="cannot run"):
        report.raise_on_error()


@pytest.mark.parametrize(
    ("overrides", "about"),
    [
        (["train.warmup_steps=10"], "train.warmup_steps"),
        (["train.min_lr_ratio=0.1"], "train.min_lr_ratio"),
        (["algorithm.kl.place=reward"], "algorithm.kl.place"),
        (["algorithm.old_logprobs=recompute"], "algorithm.correction"),
        (["algorithm.kl.kind=k1"], "algorithm.kl.kind"),
        (["algorithm.kl.update_reference_every=5"], "algorithm.kl.update_reference_every"),
        (["rollout.max_staleness=0", "rollout.on_stale=drop"], "rollout.on_stale"),
        (["rollout.max_staleness=0", "rollout.mask_older_versions=true"], "rollout.mask_older_versions"),
        (["rollout.oversampling=1.5"], "rollout.oversampling"),
        (["resources.mode=colocate", "rollout.max_staleness=0", "resources.engine_cpus=2"], "resources.engine_cpus"),
        (["run.runtime=inprocess", "run.ray_address=x"], "run.ray_address"),
        (["rollout.prompts_per_step=64"], "data"),
        (["critic.lr=1e-3"], "critic.lr"),
        (["algorithm.type=ppo", "critic.warmup_steps=10"], "critic.warmup_steps"),
        (["teacher.model.path=t"], "teacher"),
        (["train.backend.num_threads=4096"], "cores"),
        (["model.max_context=512"], "model.max_context"),
        ([*SERVED, "reward.type=exact"], "genrm.judges.default"),
        ([*SERVED, "reward.time_limit_s=20"], "reward.time_limit_s"),
        (["rollout.engine.max_slots=100000000"], "memory"),
    ],
)
def test_what_may_not_be_meant_is_a_warning(small_run, overrides, about):
    report = check(small_run, overrides)
    assert report.exit_code == 0, report.render()
    assert about in {finding.about for finding in report.warnings}


def test_a_judge_without_room_for_a_question_is_an_error(small_run):
    model = load_config(small_run).model.path
    judge = [*JUDGE, f"genrm.judges.default.model.path={model}"]
    assert "512 leaves no room for a question in a context of 256 tokens" in _found(check(small_run, judge))
    report = check(small_run, [*judge, "genrm.judges.default.max_new_tokens=8"])
    assert report.exit_code == 0, report.render()
    assert "genrm.judges.default.model.path" in {finding.about for finding in report.findings}


def test_evaluating_on_the_training_data_is_a_warning(small_run):
    data = load_config(small_run).data.path
    report = check(small_run, ["eval.data.type=file", f"eval.data.path={data}"])
    assert "eval.data: is the training data" in _found(report, Level.WARNING)


def test_the_column_that_tells_held_out_prompts_apart_is_looked_at(small_run, tmp_path):
    rows = [{"prompt": f"{i}+2=", "answer": str(i + 2), "kind": "even" if i % 2 == 0 else "odd"} for i in range(9)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = ["eval.data.type=file", f"eval.data.path={tmp_path}/held.jsonl"]
    assert "eval.by: 5 even, 4 odd" in _found(check(small_run, [*held_out, "eval.by=kind"]), Level.OK)
    assert "held.jsonl:1 has no such column" in _found(check(small_run, [*held_out, "eval.by=kinds"]))


def _drop(name):
    return lambda folder: (folder / name).unlink()


def _write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_drop("config.json"), "has no config.json"),
        (_drop("tokenizer.json"), "has no tokenizer"),
        (_drop("chat_template.jinja"), "set data.chat_template = false"),
        (_drop("model.safetensors"), "has no weights"),
        (_write("config.json", b"{"), "config.json: cannot be read"),
        (_write("model.safetensors", b"12345"), "model.safetensors: damaged"),
        (
            _write("model.safetensors.index.json", b'{"weight_map": {"a": "part-2.safetensors"}}'),
            "the download is not complete",
        ),
    ],
)
def test_a_damaged_model_folder_is_an_error(small_run, tmp_path, damage, expected):
    damage(tmp_path / "model")
    assert expected in _found(check(small_run))


def test_weights_that_were_cut_off_are_an_error(small_run, tmp_path):
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "shorter than its header says" in _found(check(small_run))


def test_a_tokenizer_of_its_own_folder_is_looked_for_there(small_run, tmp_path):
    other = shutil.copytree(tmp_path / "model", tmp_path / "tokenizer")
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert check(small_run, [f"model.tokenizer_path={other}"]).exit_code == 0


def test_layers_that_are_not_attention_are_an_error(small_run, fake_model):
    fake_model(layer_types=["full_attention", "linear_attention"])
    assert "linear_attention" in _found(check(small_run))


def test_a_port_in_use_is_an_error(small_run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        report = check(small_run, [f"services.http_port={taken.getsockname()[1]}"])
    assert "services.http_port" in _found(report)


def test_an_existing_run_is_a_warning_that_says_how_to_go_on(small_run, tmp_path):
    (tmp_path / "runs" / "test").mkdir(parents=True)
    (tmp_path / "runs" / "test" / "config.json").write_text("{}")
    report = check(small_run)
    assert report.exit_code == 0
    assert "--resume" in _found(report, Level.WARNING)


def test_nothing_is_written(small_run, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    check(small_run)
    assert sorted(tmp_path.rglob("*")) == before


def test_errors_are_shown_first_and_counted(small_run):
    *shown, last = check(small_run, ["model.path=nowhere", "train.warmup_steps=10"]).render().splitlines()
    levels = [line.split()[0] for line in shown]
    assert levels == sorted(levels, key=["error", "warning", "ok"].index)
    assert last == f"{small_run}: {levels.count('error')} error(s), {levels.count('warning')} warning(s)"
    assert levels.count("error") == 1


def test_a_loaded_configuration_is_checked_the_same(small_run):
    reports = check_config(load_config(small_run), str(small_run)), check(small_run)
    one, other = ([found for found in report.findings if found.about != "memory"] for report in reports)  # free memory moves
    assert one == other


def test_a_malformed_row_names_file_and_line(small_run, tmp_path):
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": 5}) + "\n")
    assert "41" in _found(check(small_run))
    assert "1 malformed rows" in _found(check(small_run, ["data.on_bad_row=skip"]), Level.WARNING)


def test_a_prompt_longer_than_the_context_names_its_row(small_run, tmp_path):
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "7" * 240, "answer": "1"}) + "\n")
    found = _found(check(small_run))
    assert "train.jsonl:41 with 240 tokens where 232 fit" in found
    assert "they are left out" in _found(check(small_run, ["data.on_bad_row=skip"]), Level.WARNING)
    assert check(small_run, ["model.max_context=264"]).exit_code == 0


def test_a_file_of_another_verb_is_recognised(tmp_path):
    path = tmp_path / "sft.toml"
    path.write_text('[model]\nbuild = "tiny"\n[output]\npath = "model"\n')
    assert "relax sft" in check(path).render()


@pytest.mark.parametrize(
    ("spoil", "overrides", "expected"),
    [
        ("vocab", [], "token 34 is 'a' there and 'B' here"),
        ("context", [], "the context of"),
        ("", ["algorithm.type=opd_full", "algorithm.top_k=101"], "policy and teacher share 100 tokens"),
        ("", [], None),
    ],
)
def test_a_teacher_has_to_read_what_the_policy_writes(small_run, fake_model, spoil, overrides, expected):
    teacher = small_run.parent / "teacher"
    shutil.copytree(fake_model(), teacher)
    tokenizer, config = (json.loads((teacher / name).read_text()) for name in ("tokenizer.json", "config.json"))
    if spoil == "vocab":
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["B"] = vocabulary["B"], vocabulary["a"]
        (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    if spoil == "context":
        (teacher / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    found = _found(check(small_run, ["algorithm.type=opd", f"teacher.model.path={teacher}", *overrides]))
    assert (expected or "") in found
    assert bool(found) == (expected is not None)


@pytest.mark.parametrize(
    ("changes", "overrides", "expected"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, [], 'is a Qwen3ForCausalLM; relax sft with task.type = "reward_model"'),
        ({}, ["reward.label=1"], "reward.label: 1, and"),
        ({"max_position_embeddings": 8}, [], "those that are longer have no reward"),
        ({}, [], None),
    ],
)
def test_a_reward_model_has_to_be_a_classifier_that_reads_all_samples(small_run, fake_model, changes, overrides, expected):
    judge = small_run.parent / "judge"
    shutil.copytree(fake_model(), judge)
    described = json.loads((judge / "config.json").read_text()) | {"id2label": {"0": "LABEL_0"}}
    described |= {"architectures": ["Qwen3ForSequenceClassification"]} | changes
    (judge / "config.json").write_text(json.dumps(described))
    report = check(small_run, ["reward.type=reward_model", f"reward.model.path={judge}", *overrides])
    found = [finding for finding in (*report.errors, *report.warnings) if finding.about.startswith("reward")]
    assert "".join(f"{finding.about}: {finding.text}" for finding in found).count(expected or "no fault") == len(found)
    assert bool(found) == (expected is not None)


def test_a_reward_model_that_is_not_there_is_named(small_run):
    found = _found(check(small_run, ["reward.type=reward_model", "reward.model.path=nowhere"]))
    assert "reward.model.path = 'nowhere': there is no such folder" in found
