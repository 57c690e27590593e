"""The reference page: every key once, with its type, default and meaning."""

import re

from relax.config.load import all_keys
from relax.config.reference import reference_markdown
from relax.config.schema import iter_fields
from relax.config.sft import SFTConfig


def test_every_key_has_a_row():
    page = reference_markdown()
    rows = set(re.findall(r"^\| `([\w.]+)` \|", page, re.M))
    wanted = {*all_keys(), *(key for key, _, _ in iter_fields(SFTConfig))}
    elsewhere = ("eval.data.", "eval.reward.")  # which have the keys of [data] and [reward]
    assert rows == {key for key in wanted if not key.startswith(elsewhere)}


def test_every_row_has_four_cells():
    rows = [line for line in reference_markdown().splitlines() if line.startswith("| `")]
    assert all(len(re.split(r"(?<!\\)\|", row)) == 6 for row in rows)
    assert not [row for row in rows if re.search(r"\|\s*\|", row)]


def test_a_key_says_bounds_default_and_whether_it_is_required():
    page = reference_markdown()
    assert "| `train.num_steps` | integer, ≥ 1 | *required* |" in page
    assert "| `rollout.top_p` | number, > 0, ≤ 1 | `1.0` |" in page
    assert "| `model.max_context` | integer | *unset* |" in page
    assert '| `algorithm.type` | `"grpo"`, ' in page
    assert "`[eval.data]` takes the same keys as [`[data]`](#data)." in page
