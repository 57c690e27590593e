"""`[services]`: ports, queue limits, watchdogs."""

from pydantic import Field

from relax.config.base import Section


class ServicesConfig(Section):
    """Ports, queue limits, watchdogs."""

    http_port: int = Field(0, ge=0, le=65535)
    """Port of the HTTP interface on 127.0.0.1; 0 picks a free one."""
    queue_max_bytes: int = Field(1 << 30, ge=1 << 16)
    """Most bytes that the transfer queue holds; producers wait beyond it."""
    lease_s: float = Field(600.0, gt=0)
    """A consumer that does not come back within this time loses its rows to another."""
    max_restarts: int = Field(5, ge=0)
    """How often each role, engine or the queue may be restarted before the run stops with the first error. A budget is whole
    again after `restart_memory_s` without a failure."""
    restart_memory_s: float = Field(600.0, gt=0)
    """Seconds without a failure after which earlier restarts of a role no longer count."""
    restart_backoff_s: float = Field(1.0, ge=0)
    """Pause before a role's second restart in a row, in seconds; it doubles with each one, up to 30 s."""
    answer_timeout_s: float = Field(60.0, gt=0)
    """A role that does not say its status within this time is ended and restarted."""
    start_timeout_s: float = Field(180.0, gt=0)
    """Longest time for the roles to start, in seconds."""
    progress_timeout_s: float = Field(600.0, gt=0)
    """Stop with the reason when no step ends and no sample arrives for so long."""
