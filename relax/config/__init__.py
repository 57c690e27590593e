"""Typed configuration, light to import: neither torch nor ray.

What is named here is loaded when it is asked for: a reward worker needs its own section alone, and starts in half the time.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax.config.load import load_config, make_config
    from relax.config.run import RunConfig

__all__ = ["RunConfig", "load_config", "make_config"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from relax.config import load  # here, for the reason above

    return getattr(load, name)
