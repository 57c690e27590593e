"""What the controller asks of the place where roles run: in this process, or on Ray."""

from pathlib import Path
from typing import Any, Protocol

from relax.bus.transfer_queue import TransferQueue
from relax.config.faults import FaultEvent

QUEUE = "queue"
"""The transfer queue's name beside those of roles and engines."""


class Runtime(Protocol):
    """Starts the roles of one run and stops them. Nothing of it is left behind after `stop`; then it can be started again."""

    @property
    def bus(self) -> TransferQueue:
        """The controller's own connection to the transfer queue."""
        ...

    async def start(self, run_dir: Path, resume: Path | None) -> None:
        """Starts queue, engines and roles, from a checkpoint folder if given, and lets them run.

        Raises a `RelaxError` after `services.start_timeout_s` at the latest.
        """
        ...

    async def status(self) -> dict[str, dict[str, Any]]:
        """Each role's and engine's status by name, within seconds.

        One that is dead says so under "error", with "error_kind"; one that has not answered yet says for how long under
        "silent_s". When the queue or Ray itself is lost, there is that alone.
        """
        ...

    async def restart(self, name: str, resume: Path | None, first_step: int, *, is_restart: bool) -> None:
        """Ends what is left of a role or an engine, puts a new one in its place and lets it run. The caller sets the deadline.

        `first_step`: what the role takes as done already. Raises a `RelaxError` with the cause.
        """
        ...

    async def end(self, name: str) -> None:
        """Ends a role, an engine or the `queue` at once, as a SIGKILL does; `status` then says so. Nothing when it is dead."""
        ...

    async def disturb(self, name: str, event: FaultEvent) -> None:
        """Lets a fault other than a kill come into force in a role or an engine. Raises a `RelaxError` if it cannot."""
        ...

    async def stop(self) -> None:
        """Stops everything, within seconds; may be called at any time, also after a failed `start`."""
        ...
