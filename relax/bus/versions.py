"""Policy versions: who receives weights, what was announced, what each receiver computes with."""

from typing import Any

from relax.errors import BusError
from relax.types import WeightManifest


class Versions:
    """Receivers of weights and the version that each has acknowledged (`None` until its first)."""

    def __init__(self) -> None:
        self.held: dict[str, int | None] = {}
        self.newest: WeightManifest | None = None
        self.num_announced = self.num_acknowledged = self.num_rejected = 0
        self._rejections: dict[str, str] = {}

    @property
    def floor(self) -> int | None:
        """The version that every receiver holds at least; `None` while one holds none, or there is no receiver."""
        held = list(self.held.values())
        return None if not held or None in held else min(v for v in held if v is not None)

    def subscribe(self, subscriber: str) -> None:
        self.held[subscriber] = None

    def unsubscribe(self, subscriber: str) -> None:
        self.held.pop(subscriber, None)
        self._rejections.pop(subscriber, None)

    def announce(self, manifest: WeightManifest) -> None:
        if self.newest is not None and manifest.version <= self.newest.version and manifest != self.newest:
            raise BusError(f"version {manifest.version} was announced after version {self.newest.version}; versions only rise")
        if manifest != self.newest:
            self.newest = manifest
            self.num_announced += 1

    def newer_than(self, after: int) -> WeightManifest | None:
        return self.newest if self.newest is not None and self.newest.version > after else None

    def acknowledge(self, subscriber: str, version: int) -> None:
        self._check_known(subscriber)
        self.held[subscriber] = version
        self.num_acknowledged += 1
        self._rejections.pop(subscriber, None)

    def reject(self, subscriber: str, version: int, reason: str) -> None:
        self._check_known(subscriber)
        self.num_rejected += 1
        self._rejections[subscriber] = f"rejected version {version}: {reason}"

    def all_hold(self, version: int) -> bool:
        floor = self.floor
        return floor is not None and floor >= version

    def waiting_for(self, version: int) -> str:
        """Why not every receiver holds `version`, in words."""
        if not self.held:
            return f"a receiver of weights to subscribe (version {version} is wanted)"
        behind = []
        for name, held in sorted(self.held.items()):
            if held is None or held < version:
                note = f" and {self._rejections[name]}" if name in self._rejections else ""
                behind.append(f"{name} holds {'no version' if held is None else f'version {held}'}{note}")
        return f"version {version} to be acknowledged: " + ", ".join(behind)

    def _check_known(self, subscriber: str) -> None:
        if subscriber not in self.held:
            raise BusError(f"{subscriber!r} has not subscribed to weights; known are {sorted(self.held) or 'none'}")

    def stats(self) -> dict[str, Any]:
        return {
            "acknowledged": dict(self.held),
            "floor": self.floor,
            "newest": self.newest.version if self.newest else None,
            "publications": {
                "announced": self.num_announced,
                "acknowledged": self.num_acknowledged,
                "rejected": self.num_rejected,
            },
            "rejections": dict(self._rejections),
        }
