"""What the controller asks of the place where roles run: in this process, or on Ray."""

from pathlib import Path
from typing import Any, Protocol

from relax.bus.transfer_queue import TransferQueue


class Runtime(Protocol):
    """Starts the roles of one run and stops them. Nothing of it is left behind after `stop`."""

    @property
    def bus(self) -> TransferQueue:
        """The controller's own connection to the transfer queue."""
        ...

    async def start(self, run_dir: Path, resume: Path | None) -> None:
        """Starts queue, engines and roles, from a checkpoint folder if given, and lets them run."""
        ...

    async def status(self) -> dict[str, dict[str, Any]]:
        """Each role's and engine's status by name; one that is dead says so under "error"."""
        ...

    async def stop(self) -> None:
        """Stops everything; may be called at any time, also after a failed `start`."""
        ...
