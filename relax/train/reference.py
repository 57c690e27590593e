"""Weights of a reference that follows the policy, on disk: a restarted role, or a run that goes back, has the right ones."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from relax.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_FILE = re.compile(r"version_(\d+)\.safetensors")


class ReferenceFiles:
    """Files `version_N.safetensors` in `folder`, one for each time that the reference took the policy's weights.

    `every`: versions between two of them; 0: the reference keeps its first weights, and nothing is written. `num_kept` older
    files stay, for the checkpoints that a run may go back to. Raises `CheckpointError` for files that cannot be used.
    """

    def __init__(self, folder: Path, every: int, num_kept: int) -> None:
        self.folder, self.every, self._num_kept = folder, every, num_kept

    def is_due(self, held: int, version: int) -> bool:
        """Whether a reference of version `held` takes `version`."""
        return self.every > 0 and version >= held + self.every

    def begin(self, weights: Mapping[str, "Tensor"]) -> None:
        """Keeps the first weights, as version 0, unless they are there."""
        if self.every > 0 and 0 not in self._versions():
            self.keep(0, weights)

    def keep(self, version: int, weights: Mapping[str, "Tensor"]) -> None:
        """Writes the weights of `version`, whole or not at all."""
        # here, since safetensors' torch part is only for processes that compute
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        target = self._path(version)
        beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, beside)
            beside.replace(target)
        except (OSError, RuntimeError, SafetensorError) as error:
            beside.unlink(missing_ok=True)
            raise CheckpointError(f"{target}: the reference's weights cannot be written: {error}") from error
        for old in sorted(v for v in self._versions() if 0 < v < version)[: -self._num_kept]:
            self._path(old).unlink(missing_ok=True)

    def back_to(self, version: int) -> tuple[int, dict[str, "Tensor"]] | None:
        """The newest weights of at most `version`, and their version; `None` where none were kept. Later ones are removed: they
        are of a future that the run has not."""
        versions = self._versions()
        found = max((v for v in versions if v <= version), default=None)
        if self.every == 0 or found is None:
            return None
        for later in (v for v in versions if v > version):
            self._path(later).unlink(missing_ok=True)
        # here, as above
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return found, load_file(self._path(found))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path(found)}: the reference's weights cannot be read: {error}") from error

    def _path(self, version: int) -> Path:
        return self.folder / f"version_{version}.safetensors"

    def _versions(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return [int(found[1]) for path in self.folder.iterdir() if (found := _FILE.fullmatch(path.name))]
