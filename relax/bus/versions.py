"""Policy versions: who receives weights, what was announced, what each receiver computes with."""

from typing import Any

from relax.bus.turns import Turns
from relax.errors import BusError, StaleHandle
from relax.types import WeightManifest


class Versions:
    """Receivers of weights and the version that each has acknowledged (`None` until its first)."""

    def __init__(self) -> None:
        self.held: dict[str, int | None] = {}
        self.newest: WeightManifest | None = None
        self.turns = Turns()
        self.num_announced = self.num_acknowledged = self.num_rejected = 0
        self._rejections: dict[str, str] = {}
        self._was_rewound = False

    @property
    def floor(self) -> int | None:
        """The version that every receiver holds at least; `None` while one holds none, there is none, or it is not theirs."""
        held = list(self.held.values())
        return None if not held or None in held or self.turns.is_recalled else min(v for v in held if v is not None)

    def subscribe(self, subscriber: str, takes_turns: bool) -> None:
        self.held[subscriber] = None
        self._rejections.pop(subscriber, None)
        self.turns.joined(subscriber, takes_turns)

    def unsubscribe(self, subscriber: str) -> None:
        self.held.pop(subscriber, None)
        self._rejections.pop(subscriber, None)
        self.turns.left(subscriber)

    def announce(self, manifest: WeightManifest) -> None:
        if self.newest is not None and manifest.version <= self.newest.version and manifest != self.newest:
            raise BusError(f"version {manifest.version} was announced after version {self.newest.version}; versions only rise")
        if manifest != self.newest:
            self.newest = manifest
            self.num_announced += 1
        self.turns.end_recall()

    def next_for(self, subscriber: str) -> tuple[WeightManifest | None] | None:
        """(manifest,) to load, (None,) when the weights must be given up, `None` while there is nothing to do."""
        self.check_known(subscriber)
        if self.turns.must_give_up(subscriber):
            return (None,)
        if self.newest is None or self.newest.version == self.held[subscriber] or not self.turns.may_load(subscriber):
            return None
        self.turns.loads(subscriber)
        return (self.newest,)

    def waiting_for_next(self, subscriber: str) -> str:
        if not self.turns.may_load(subscriber):
            return "the trainer, whose turn it is, to announce its next version"
        held = self.held[subscriber]
        return (
            "a first policy version to be announced" if held is None else f"another policy version than {held} to be announced"
        )

    def acknowledge(self, subscriber: str, version: int) -> None:
        """Raises `StaleHandle` for a version that was lost when the trainer went back."""
        self.check_known(subscriber)
        if self._was_rewound and (self.newest is None or version > self.newest.version):
            raise StaleHandle(f"{subscriber}: version {version} is lost with the trainer; take the one that is announced next")
        self.held[subscriber] = version
        self.num_acknowledged += 1
        self._rejections.pop(subscriber, None)

    def reject(self, subscriber: str, version: int, reason: str) -> None:
        self.check_known(subscriber)
        self.num_rejected += 1
        self._rejections[subscriber] = f"rejected version {version}: {reason}"

    def gave_up(self, subscriber: str) -> None:
        self.check_known(subscriber)
        self.held[subscriber] = None
        self.turns.gave_up(subscriber)

    def rewind(self) -> None:
        """Every receiver holds none, and any version may be announced next."""
        self.held = dict.fromkeys(self.held)
        self.newest, self._was_rewound = None, True

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

    def check_known(self, subscriber: str) -> None:
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
