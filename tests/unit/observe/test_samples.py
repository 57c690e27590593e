import numpy as np

from relax.observe.samples import sample_row
from relax.types import Media, Outcome, Prompt, Sample, VersionSegment


def test_a_row_says_what_was_shown_but_not_where_in_a_file_of_the_run_it_lies():
    sample = Sample(
        group_id=3,
        index=1,
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=np.asarray([0, 0, 0, 1, 1], np.uint8),
        rollout_logprobs=np.zeros(5, np.float32),
        versions=(VersionSegment(3, 7),),
        outcome=Outcome.OK,
        metadata={"response": "a cat", "answer": "cat"},
        reward=1.0,
    )
    ask = {"role": "user", "content": [{"type": "image"}, {"type": "audio"}]}
    shown = (Media("image", "/data/cat.png"), Media("audio", "spool:0:99"))
    row = sample_row(sample, Prompt("rows.jsonl:1", messages=(ask,), media=shown))
    assert row["media"] == [{"kind": "image", "source": "/data/cat.png"}, {"kind": "audio"}]
    assert row["input"] == (ask,)
    assert (row["prompt"], row["response"], row["answer"], row["version"], row["tokens"]) == (
        "rows.jsonl:1",
        "a cat",
        "cat",
        7,
        5,
    )
    assert "media" not in sample_row(sample, Prompt("rows.jsonl:1", text="cat?"))
