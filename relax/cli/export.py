"""`relax export`: a checkpoint of a run as a folder that `from_pretrained` loads."""

import shutil
import tempfile
from pathlib import Path

from relax.config import load_config
from relax.errors import CheckpointError, ConfigError
from relax.observe.run_folder import RunFolder


def export_run(run_dir: Path, out: Path, step: int | None = None) -> Path:
    """Writes the model of checkpoint `step` (default: the last one) to `out`, tokenizer included; returns `out`.

    The folder is complete or not there. Raises `ConfigError` when `run_dir` is no run folder or `out` exists,
    `CheckpointError` when there is no such checkpoint.
    """
    RunFolder(run_dir).check_is_run()
    if out.exists():
        raise ConfigError(f"{out} is there already: remove it, or export to another folder")
    config = load_config(run_dir / "config.json")
    # here, since torch and transformers take seconds to import and a mistake in the paths should show at once
    from relax.roles.actor import BACKEND_FOLDER
    from relax.train.checkpoint import CheckpointStore
    from relax.train.torch_backend import TorchBackend

    found = CheckpointStore(run_dir / "checkpoints", config.train.checkpoint.keep).all()
    if not found:
        raise CheckpointError(f"{run_dir} has no complete checkpoint; the model of a finished run is in {run_dir / 'hf'}")
    chosen = max(found) if step is None else step
    if chosen not in found:
        raise CheckpointError(f"{run_dir} has no checkpoint of step {step}; there are {', '.join(map(str, sorted(found)))}")
    backend = TorchBackend(config)
    backend.load(found[chosen] / BACKEND_FOLDER)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        made = Path(name) / "made"
        backend.export(made)
        shutil.move(made, out)
    return out
