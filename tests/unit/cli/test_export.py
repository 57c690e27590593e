"""An exported model is the checkpoint's, and what is not there is named."""

from pathlib import Path

import pytest
import torch

from relax.cli.export import export_run
from relax.config import make_config
from relax.errors import CheckpointError, ConfigError
from relax.models.tiny import build_tiny_model
from relax.roles.actor import BACKEND_FOLDER
from relax.train.checkpoint import CheckpointStore
from relax.train.torch_backend import TorchBackend

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of steps 1 and 2, of which the weights differ."""
    root = tmp_path_factory.mktemp("export")
    build_tiny_model(
        root / "model", num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=300
    )
    config = make_config(
        {
            "model": {"path": str(root / "model")},
            "data": {"type": "generator", "path": "relax.data.arithmetic:addition"},
            "reward": {"type": "exact"},
            "train": {"num_steps": 2},
        }
    )
    run = root / "run"
    run.mkdir()
    (run / "config.json").write_text(config.model_dump_json(), "utf-8")
    backend = TorchBackend(config)
    for step in (1, 2):
        with torch.no_grad():
            backend.model.model.norm.weight.fill_(float(step))
        CheckpointStore(run / "checkpoints", 2).write(step, lambda folder: backend.save(folder / BACKEND_FOLDER))
    return run


@pytest.mark.parametrize(("step", "expected"), [(None, 2.0), (1, 1.0), (2, 2.0)])
def test_the_exported_model_is_the_checkpoints(run_dir: Path, tmp_path: Path, step: int | None, expected: float) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = export_run(run_dir, tmp_path / "new" / "out", step)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.model.norm.weight.tolist() == [expected] * 32
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert [item.name for item in out.parent.iterdir()] == ["out"]


def test_a_step_without_a_checkpoint_is_refused_with_those_there_are(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; there are 1, 2"):
        export_run(run_dir, tmp_path / "out", 7)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run folder"):
        export_run(tmp_path, tmp_path / "out")


def test_what_is_there_is_not_written_over(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        export_run(run_dir, tmp_path)
