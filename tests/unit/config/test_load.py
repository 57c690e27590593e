"""Loading: what a user writes is what the run gets, and every mistake is named with its key and what would be right."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.config import RunConfig, load_config, make_config
from relax.config.load import all_keys
from relax.config.mistakes import nearest
from relax.errors import ConfigError

MINIMAL = """
[model]
path = "model"
[data]
type = "file"
path = "train.jsonl"
[reward]
type = "exact"
[train]
num_steps = 3
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def _raw():
    return {
        "model": {"path": "model"},
        "data": {"type": "file", "path": "train.jsonl"},
        "reward": {"type": "exact"},
        "train": {"num_steps": 3},
    }


def _message(raw, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        make_config(raw, overrides)
    return str(caught.value)


# -- files ------------------------------------------------------------------------------------------------------------
def test_a_minimal_file_gets_the_defaults(run_file):
    config = load_config(run_file)
    assert config.train.num_steps == 3
    assert config.algorithm.type == "grpo"
    assert config.eval is None


def test_a_byte_order_mark_is_no_part_of_the_first_key(run_file):
    run_file.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_config(run_file).model.path == "model"


def test_a_missing_file_names_its_neighbour(run_file):
    with pytest.raises(ConfigError, match=r"rnu\.toml: no such file; did you mean .*run\.toml\?"):
        load_config(run_file.with_name("rnu.toml"))


def test_a_folder_names_the_file_inside(run_file):
    with pytest.raises(ConfigError, match=r"a folder, not a file; did you mean .*run\.toml\?"):
        load_config(run_file.parent)


def test_wrong_syntax_shows_the_line(run_file):
    run_file.write_text('[model]\npath = "model\n')
    with pytest.raises(ConfigError, match=r'at line 2.*\n  2: path = "model'):
        load_config(run_file)


def test_wrong_json_shows_the_line(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model":\n {"path" "model"}}')
    with pytest.raises(ConfigError, match=r'line 2.*\n  2:  \{"path" "model"\}'):
        load_config(path)


@pytest.mark.parametrize("text", ["[1, 2]", "null", '"text"'])
def test_json_that_is_no_object_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="wanted an object"):
        load_config(path)


def test_bytes_that_are_no_text_are_refused(run_file):
    run_file.write_bytes(b"[model]\npath = '\xff'\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(run_file)


def test_an_empty_file_names_every_section_that_is_missing(run_file):
    run_file.write_text("")
    with pytest.raises(ConfigError) as caught:
        load_config(run_file)
    text = str(caught.value)
    assert "[model]: this section is missing, and there is no default; it needs model.path" in text
    assert "data.type is one of 'file', 'reasoning_gym', 'generator'" in text
    assert "train.num_steps" in text


# -- mistakes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.num_step=3"], "train.num_step: unknown key; did you mean train.num_steps?"),
        (["trian.lr=1"], "trian: unknown key; did you mean train?"),
        (["group_size=4"], "group_size: unknown key; did you mean rollout.group_size?"),
        (["train.group_size=4"], "train.group_size: unknown key; did you mean rollout.group_size?"),
        (["algorithm.kl.coeff=1"], "algorithm.kl.coeff: unknown key; did you mean algorithm.kl.coef?"),
        (["data.task=chain_sum"], "data.task: unknown key; it belongs to data.type = 'reasoning_gym'"),
        (["algorithm.type=grp"], "algorithm.type = 'grp': allowed are 'grpo', 'dr_grpo', 'rloo',"),
        (
            ["train.schedule=cosin"],
            "train.schedule = 'cosin': allowed are 'constant', 'linear', 'cosine'; did you mean 'cosine'?",
        ),
        (["train.lr=-1"], "train.lr = -1: input should be greater than 0"),
        (["train.lr=fast"], "train.lr = 'fast': input should be a valid number"),
        (["train.lr=inf"], "train.lr = inf: input should be a finite number"),
        (["train=5"], "train = 5: this is a section; write [train]"),
        (['faults.events={kind="kill"}'], "this is a list; write [[faults.events]] for each, or faults.events = [{...}]"),
        (["faults.events=[3]"], "faults.events.0 = 3: each of faults.events is a table"),
        (["rollout.stop=a"], "rollout.stop = 'a': this is a list; write it in brackets, ['a']"),
        (["data={path='x'}"], "data.type is missing: allowed are 'file', 'reasoning_gym', 'generator'"),
        (["eval.every=2"], "[eval.data]: this section is missing"),
        (["eval.data.type=fil"], "eval.data.type = 'fil': allowed are"),
        (["eval.data.type=file"], "eval.data.path: missing, and there is no default"),
        (["train.backend.type=megatrn"], "train.backend.type = 'megatrn': allowed are 'torch'"),
        (["rollout.top_p=0.9"], "rollout.top_p = 1.0"),
        (["rollout.group_size=1"], "rollout.group_size = 1"),
        (["algorithm.old_logprobs=current"], "rollout.max_staleness = 0"),
    ],
)
def test_a_mistake_names_key_value_and_what_would_be_right(overrides, expected):
    assert expected in _message(_raw(), *overrides)


def test_every_mistake_is_listed_at_once():
    text = _message(_raw(), "train.lr=-1", "rollout.group_sise=4", "model.dtype=int8")
    assert "3 setting(s)" in text
    assert all(word in text for word in ("train.lr = -1", "rollout.group_sise", "model.dtype = 'int8'"))


def test_the_tag_of_a_union_member_never_shows_in_a_key():
    raw = _raw() | {"eval": {"data": {"type": "generator", "path": "a:b", "size": 0}}}
    text = _message(raw, "data.chat_template=perhaps")
    assert "eval.data.size = 0" in text
    assert "data.chat_template = 'perhaps'" in text
    assert ".generator" not in text
    assert ".file" not in text


def test_a_long_value_is_cut_in_the_message():
    assert len(_message(_raw(), f"train.lr={'x' * 5000}")) < 500


@pytest.mark.parametrize("override", ["train.lr", "=1", "train..lr=1", ".lr=1", "train.=1"])
def test_an_override_that_is_none_shows_the_form(override):
    assert "section.key=value" in _message(_raw(), override)


def test_an_override_below_a_value_is_refused():
    assert "train.lr is a value, not a section" in _message(_raw(), "train.lr=1", "train.lr.x=2")


# -- overrides --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("train.lr=1e-5", lambda c: c.train.lr == 1e-5),
        ("train.lr = 1e-5", lambda c: c.train.lr == 1e-5),
        ("run.name=second", lambda c: c.run.name == "second"),
        ("run.name='second'", lambda c: c.run.name == "second"),
        ("run.name=2024", lambda c: c.run.name == "2024"),
        ('train.freeze=["visual.*"]', lambda c: c.train.freeze == ["visual.*"]),
        ("model.path=a=b", lambda c: c.model.path == "a=b"),
        ("run.deterministic=true", lambda c: c.run.deterministic is True),
        ("model.max_context=none", lambda c: c.model.max_context is None),
        ("rollout.stop=['a', \"b\"]", lambda c: c.rollout.stop == ("a", "b")),
        ("data.template_options.enable_thinking=false", lambda c: c.data.template_options == {"enable_thinking": False}),
        ("reward={type='format', pattern='x'}", lambda c: c.reward.pattern == "x"),
        ("algorithm.kl.coef=0.1", lambda c: c.algorithm.kl.coef == 0.1 and c.algorithm.type == "grpo"),
        ("data.answer_key=none", lambda c: c.data.answer_key is None),
    ],
)
def test_an_override_sets_its_key(override, read):
    assert read(make_config(_raw(), [override]))


def test_the_last_override_wins():
    assert make_config(_raw(), ["train.lr=1", "train.lr=2"]).train.lr == 2


def test_another_type_leaves_behind_what_it_does_not_know():
    raw = _raw() | {
        "reward": {"type": "exact", "marker": "####", "num_workers": 3},
        "algorithm": {"normalize_std": False, "clip_low": 0.1},
    }
    config = make_config(raw, ["reward.type=math", "algorithm.type=rloo"])
    assert (config.reward.type, config.reward.num_workers) == ("math", 3)
    assert (config.algorithm.type, config.algorithm.clip_low) == ("rloo", 0.1)


def test_the_same_type_keeps_everything():
    raw = _raw() | {"reward": {"type": "exact", "marker": "####"}}
    assert make_config(raw, ["reward.type=exact"]).reward.marker == "####"


def test_the_input_is_not_changed():
    raw = _raw()
    make_config(raw, ["train.lr=1", "data.type=generator", "data.path=a:b"])
    assert raw == _raw()


# -- round trip -------------------------------------------------------------------------------------------------------
@given(
    st.fixed_dictionaries(
        {
            "algorithm": st.sampled_from([{"type": "rloo"}, {"type": "grpo", "kl": {"coef": 0.1}}, {}]),
            "rollout": st.fixed_dictionaries({"stop": st.lists(st.text(), max_size=2), "max_staleness": st.integers(0, 4)}),
            "train": st.fixed_dictionaries(
                {"num_steps": st.integers(1, 9), "lr": st.floats(1e-9, 1.0), "betas": st.just([0.9, 0.95])}
            ),
            "data": st.fixed_dictionaries(
                {"type": st.just("generator"), "path": st.just("a:b"), "options": st.dictionaries(st.text(), st.integers())}
            ),
            "eval": st.sampled_from([None, {"data": {"type": "file", "path": "x"}}]),
        }
    )
)
def test_a_saved_configuration_loads_as_the_same(tmp_path_factory, raw):
    config = make_config(_raw() | raw)
    path = tmp_path_factory.mktemp("run") / "config.json"
    path.write_text(config.model_dump_json())
    assert load_config(path) == config
    assert RunConfig.model_validate_json(json.dumps(json.loads(path.read_text()))) == config


def test_an_override_reaches_into_a_section_that_a_saved_configuration_left_unset(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(make_config(_raw()).model_dump_json())
    config = load_config(path, ["eval.data.type=file", "eval.data.path=test.jsonl"])
    assert config.eval is not None
    assert config.eval.data.path == "test.jsonl"


def test_a_configuration_is_never_assigned_to():
    with pytest.raises(ValueError, match="frozen"):
        make_config(_raw()).train.lr = 1.0


def test_every_key_is_listed_once():
    keys = all_keys()
    assert len(keys) == len(set(keys))
    assert {"run.name", "algorithm.kl.coef", "eval.data.task", "rollout.engine.device"} <= set(keys)


def test_a_name_that_is_hardly_alike_is_not_proposed() -> None:
    assert nearest("num_step", ["num_steps", "lr"]) == "num_steps"
    assert nearest("prompts_per_step", ["num_steps", "warmup_steps"]) is None
