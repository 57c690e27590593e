import pytest

from relax.errors import WeightSyncError
from relax.weights.naming import check_names


def test_equal_sets_pass_in_any_order():
    check_names(["a", "b"], ["b", "a"])
    check_names([], [])


def test_missing_and_left_over_names_are_listed_with_their_nearest():
    with pytest.raises(WeightSyncError) as caught:
        check_names(["model.layers.0.q_proj.weight", "norm"], ["layers.0.q_proj.weight", "norm", "rotary"])
    message = str(caught.value)
    assert "1 missing: 'model.layers.0.q_proj.weight' (nearest: 'layers.0.q_proj.weight')" in message
    assert "2 left over" in message
    assert "'rotary'" in message
    assert "'norm'" not in message


def test_one_side_is_enough_and_long_lists_are_cut():
    with pytest.raises(WeightSyncError, match=r"30 missing: .* and 20 more$"):
        check_names([f"tensor{i}" for i in range(30)], [])
    with pytest.raises(WeightSyncError, match=r"do not match .*: 1 left over: 'lm_head'$"):
        check_names([], ["lm_head"])
