"""Typed configuration, light to import: neither torch nor ray."""

from relax.config.load import load_config, make_config
from relax.config.run import RunConfig

__all__ = ["RunConfig", "load_config", "make_config"]
