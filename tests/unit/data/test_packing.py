"""Packing keeps every trained token, once, behind exactly the tokens that stood before it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.data.packing import find_groups, pack, plan
from relax.types import Ragged


@st.composite
def batches(draw):
    """(tokens, mask, group ids): few distinct tokens, so that rows of a group share beginnings of any length."""
    count = draw(st.integers(1, 9))
    rows = [draw(st.lists(st.integers(1, 3), min_size=1, max_size=9)) for _ in range(count)]
    masks = [[0, *draw(st.lists(st.integers(0, 1), min_size=len(r) - 1, max_size=len(r) - 1))] for r in rows]
    groups = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    tokens = Ragged.pack([np.asarray(r, np.int32) for r in rows])
    return tokens, Ragged.pack([np.asarray(m, np.uint8) for m in masks]), np.asarray(groups)


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(1, 30), st.lists(st.floats(0, 40), min_size=3, max_size=3))
def test_media_count_in_budget_and_balance_but_divide_no_group(batch, budget, media):
    tokens, mask, ids = batch
    groups = find_groups(tokens, mask, ids, dict(enumerate(media)))
    parts = plan(groups, budget)
    rows = [segment.row for part in parts for group in part for segment in group.segments]
    assert sorted(rows) == [row for row in range(len(tokens)) if mask[row].any()]
    for part in parts:
        assert sum(group.cost for group in part) <= budget or len(part) == 1
    whole = [group for group in groups if group.num_tokens <= budget]
    assert all(any(group in part for part in parts) for group in whole)


def test_micro_batches_are_even_in_cost():
    """Eight groups of 100 tokens, the last one with media that cost 500: it is as dear as six others."""
    rows = [np.full(101, group, np.int32) for group in range(8)]
    mask = Ragged.pack([np.r_[np.zeros(1), np.ones(100)].astype(np.uint8)] * 8)
    by_cost = plan(find_groups(Ragged.pack(rows), mask, np.arange(8), {7: 500.0}), 800)
    assert [sum(group.cost for group in part) for part in by_cost] == [700, 601]  # with media its last token is read as well
    by_length = plan(find_groups(Ragged.pack(rows), mask, np.arange(8)), 800)
    assert [sum(group.num_tokens for group in part) for part in by_length] == [800]


def test_a_row_alone_with_media_is_laid_out_to_its_end():
    """Its media may stand after what is trained; what is trained and what that sees stay the same."""
    tokens, mask = Ragged.pack([np.arange(9, dtype=np.int32)]), Ragged.pack([np.array([0, 0, 1, 1, 0, 0, 0, 0, 0], np.uint8)])
    short, whole = (pack(tokens, mask, find_groups(tokens, mask, np.zeros(1, np.int64), media)) for media in ({}, {0: 1.0}))
    assert short.ids.tolist() == [0, 1, 2]
    assert whole.ids.tolist() == list(range(9))
    assert (whole.sources.tolist(), whole.targets.tolist()) == (short.sources.tolist(), short.targets.tolist())


def contexts(micro):
    """For every trained token: (its index in the batch, the tokens that its source sees, their positions)."""
    prefix_of = {}
    for start, length in zip(micro.prefix_starts, micro.prefix_lengths, strict=True):
        prefix_of[len(prefix_of)] = list(range(start, start + length))
    found = []
    for source, target, sample in zip(micro.sources, micro.targets, micro.samples, strict=True):
        prefix = prefix_of[micro.groups[sample]]
        own = [p for p in range(micro.starts[sample], micro.starts[sample] + micro.lengths[sample]) if p <= source]
        seen = prefix + own if source not in prefix else [p for p in prefix if p <= source]
        assert seen[-1] == source
        found.append((int(target), micro.ids[seen].tolist(), micro.positions[seen].tolist()))
    return found


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(1, 30))
def test_every_trained_token_once_behind_its_own_context(batch, budget):
    tokens, mask, ids = batch
    groups = find_groups(tokens, mask, ids)
    found = []
    for part in plan(groups, budget):
        micro = pack(tokens, mask, part)
        assert len(micro.ids) <= budget or len(part) == len(part[0].segments) == 1
        assert micro.target_ids.tolist() == tokens.values[micro.targets].tolist()
        found += contexts(micro)
    wanted = []
    for row in range(len(tokens)):
        for place in np.flatnonzero(mask[row]).tolist():
            wanted.append((int(tokens.offsets[row]) + place, tokens[row][:place].tolist(), list(range(place))))
    assert sorted(found) == sorted(wanted)


def test_a_prompt_is_laid_out_once_and_last_tokens_not_at_all():
    prompt = [7, 8, 9]
    rows = [np.asarray([*prompt, *answer], np.int32) for answer in ([1, 2, 3], [1, 5], [6])]
    mask = Ragged.pack([(np.arange(len(r)) >= 3).astype(np.uint8) for r in rows])
    micro = pack(Ragged.pack(rows), mask, find_groups(Ragged.pack(rows), mask, np.zeros(3, np.int64)))
    assert micro.ids.tolist() == [7, 8, 9, 1, 2, 1]
    assert micro.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert micro.sources.tolist() == [2, 3, 4, 2, 5, 2]


def test_a_shared_beginning_ends_where_a_sample_trains():
    """Two samples sampled the same first token: it is trained, so each has its own copy."""
    rows = [np.asarray([5, 6, 1, 2], np.int32), np.asarray([5, 6, 1, 3], np.int32)]
    mask = Ragged.pack([np.asarray([0, 0, 1, 1], np.uint8)] * 2)
    (group,) = find_groups(Ragged.pack(rows), mask, np.zeros(2, np.int64))
    assert group.prefix == 2


def test_rows_that_share_nothing_and_rows_without_trained_tokens():
    tokens = Ragged.pack([np.asarray([1, 2, 3], np.int32), np.asarray([4, 5, 6], np.int32), np.asarray([1, 2], np.int32)])
    mask = Ragged.pack([np.asarray([0, 1, 1], np.uint8), np.asarray([0, 0, 1], np.uint8), np.zeros(2, np.uint8)])
    (group,) = find_groups(tokens, mask, np.zeros(3, np.int64))
    assert group.prefix == 0
    assert [segment.row for segment in group.segments] == [0, 1]
    assert find_groups(tokens, Ragged(np.zeros_like(mask.values), mask.offsets), np.zeros(3, np.int64)) == []


def test_micro_batches_are_of_about_equal_size():
    """Nine groups of 100 tokens under 500: not 500 + 400 by chance and then a rest, but as few as fit, and even."""
    rows = [np.full(101, group, np.int32) for group in range(9)]
    mask = Ragged.pack([np.r_[np.zeros(1), np.ones(100)].astype(np.uint8)] * 9)
    groups = find_groups(Ragged.pack(rows), mask, np.arange(9))
    sizes = [sum(g.num_tokens for g in part) for part in plan(groups, 800)]
    assert sizes == [500, 400]


def test_training_on_the_first_token_is_a_mistake():
    tokens, mask = Ragged.pack([np.asarray([1, 2], np.int32)]), Ragged.pack([np.asarray([1, 1], np.uint8)])
    with pytest.raises(AssertionError, match="entry 0"):
        find_groups(tokens, mask, np.zeros(1, np.int64))
