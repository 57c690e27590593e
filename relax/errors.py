"""Errors, named by the boundary that they crossed. A user's mistake is a `ConfigError`, `DataError` or `ModelError`;
what went wrong at run time says which part it came from. Errors chain (`raise ... from error`); none is swallowed."""


class RelaxError(Exception):
    """Base of every error that relax raises on purpose. The message is written for the person who runs the job."""


class ConfigError(RelaxError):
    """A setting is wrong: the message names the key, the value, what is allowed and the nearest right name."""


class DataError(RelaxError):
    """A data source is missing, empty or malformed: the message names the file and the line or row."""


class ModelError(RelaxError):
    """A model folder cannot be used: missing tokenizer, unsupported architecture, wrong shapes."""


class EngineError(RelaxError):
    """A generation engine failed or was lost while it served a request."""


class RewardError(RelaxError):
    """A reward function raised, returned something that is not a number, or ran past its time limit."""


class ServerError(RelaxError):
    """A server of somebody else's refused a request, or gave an answer that cannot be used.

    `may_pass`: a later request may succeed; this one was repeated as often as is allowed.
    """

    def __init__(self, text: str, *, may_pass: bool = False) -> None:
        super().__init__(text)
        self.may_pass = may_pass


class TeacherError(RelaxError):
    """A teacher behind a server has answered nothing for so long that the run cannot go on."""


class EnvError(RelaxError):
    """An environment failed while it reset, stepped or formatted an observation."""


class BusError(RelaxError):
    """The transfer queue refused a call or cannot be reached."""


class BusGone(BusError):
    """The transfer queue's core died or was closed; the caller's handles are void."""


class StaleHandle(BusError):
    """A row, lease or ticket of an earlier incarnation of the core, or one that is already settled."""


class GroupTooLarge(BusError):
    """A group has more bytes than the whole transfer queue may hold."""


class WaitTimeout(BusError):
    """A waiting call reached its deadline. `reason` says what it waited for, in words that `status` shows too."""

    def __init__(self, what: str, reason: str, waited_s: float) -> None:
        super().__init__(f"{what}: still waiting after {waited_s:.1f} s for {reason}")
        self.what, self.reason, self.waited_s = what, reason, waited_s

    def __reduce__(self) -> tuple[type["WaitTimeout"], tuple[str, str, float]]:
        return WaitTimeout, (self.what, self.reason, self.waited_s)


class WeightSyncError(RelaxError):
    """A published policy version did not verify: digest, names, shapes or the canary's log-prob disagree."""


class CheckpointError(RelaxError):
    """A checkpoint could not be written or is not complete."""


class RoleError(RelaxError):
    """A role stopped with an error; the message names the role and carries the first cause."""
