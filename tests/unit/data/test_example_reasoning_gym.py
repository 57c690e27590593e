"""The example's files load, and speak of the same task in training, evaluation and warm start."""

from pathlib import Path

from relax.cli.sft import load_sft_config
from relax.config import load_config
from relax.data.prompts import open_prompts
from relax.rewards.table import make_scorer

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "reasoning_gym"


def test_the_run_continues_its_warm_start_and_is_tested_on_other_problems() -> None:
    run, warm_start = load_config(FOLDER / "run.toml"), load_sft_config(FOLDER / "sft.toml", [])
    assert run.model.path == warm_start.output.path
    assert run.eval is not None
    sources = [open_prompts(data, seed=0) for data in (run.data, run.eval.data, warm_start.data)]
    assert len({source.row(0).key for source in sources}) == 3
    assert len({str(data.options) for data in (run.data, run.eval.data, warm_start.data)}) == 1
    row = sources[0].row(0)
    assert make_scorer(run.reward).call(row.messages, row.answer, row.answer, dict(row.metadata)) == 1.0
