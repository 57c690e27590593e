"""Roles that rewards may ask over HTTP: reward workers find their URLs in the environment."""

import os
from collections.abc import Mapping

from relax.errors import RewardError


def as_environment(services: Mapping[str, str]) -> dict[str, str]:
    """URLs by role as environment variables of a process that asks them."""
    return {_variable(role): url for role, url in services.items()}


def url_of(role: str) -> str:
    """Where the role called `role` answers. Raises `RewardError` when this process was not told."""
    url = os.environ.get(_variable(role))
    if not url:
        raise RewardError(f"there is no {role} role to ask: {_variable(role)} is not set. Reward workers of a run have it")
    return url


def _variable(role: str) -> str:
    return f"RELAX_{role.upper()}_URL"
