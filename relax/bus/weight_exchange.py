"""The part of the core's face that speaks of policy versions: who receives them, and whose turn it is."""

from relax.bus.versions import Versions
from relax.bus.waits import Waits
from relax.types import WeightManifest


class WeightExchange:
    """`Core` inherits it; `versions` and `waits` are the core's."""

    def __init__(self, versions: Versions, waits: Waits) -> None:
        self.versions, self.waits = versions, waits

    async def subscribe(self, subscriber: str, *, takes_turns: bool = False) -> None:
        self.waits.check_open()
        self.versions.subscribe(subscriber, takes_turns)
        self.waits.notify("turn")

    async def unsubscribe(self, subscriber: str) -> None:
        self.waits.check_open()
        self.drop_subscriber(subscriber)

    def drop_subscriber(self, subscriber: str) -> None:
        """The receiver is gone: it holds nothing up any more."""
        self.versions.unsubscribe(subscriber)
        self.waits.notify("admit", "acknowledged", "turn", "manifest")

    async def announce(self, manifest: WeightManifest) -> None:
        self.waits.check_open()
        self.versions.announce(manifest)
        self.waits.notify("manifest", "engines", "admit")

    async def next_manifest(self, subscriber: str, wait_s: float) -> WeightManifest | None:
        (manifest,) = await self.waits.until(
            "manifest",
            lambda: self.versions.next_for(subscriber),
            call="next_manifest",
            key="next_manifest",
            who=subscriber,
            wait_s=wait_s,
            reason=lambda: self.versions.waiting_for_next(subscriber),
        )
        return manifest

    async def acknowledge(self, subscriber: str, version: int) -> None:
        """As the face says. Raises `StaleHandle` for a version that was lost when the trainer went back."""
        self.waits.check_open()
        self.versions.acknowledge(subscriber, version)
        self.waits.notify("admit", "acknowledged")

    async def reject(self, subscriber: str, version: int, reason: str) -> None:
        self.waits.check_open()
        self.versions.reject(subscriber, version, reason)

    async def wait_acknowledged(self, version: int, wait_s: float) -> None:
        await self.waits.until(
            "acknowledged",
            lambda: self.versions.all_hold(version) or None,
            call=f"wait_acknowledged {version}",
            key="wait_acknowledged",
            wait_s=wait_s,
            reason=lambda: self.versions.waiting_for(version),
        )

    # -- turns --------------------------------------------------------------------------------------------------------
    async def recall(self, wait_s: float) -> None:
        self.waits.check_open()
        turns = self.versions.turns
        turns.recall()
        self.waits.notify("manifest")
        await self.waits.until(
            "turn",
            lambda: turns.is_trainers or None,
            call="recall",
            key="recall",
            wait_s=wait_s,
            reason=turns.waiting_for,
        )

    async def gave_up(self, subscriber: str) -> None:
        self.waits.check_open()
        self.versions.gave_up(subscriber)
        self.waits.notify("turn", "manifest")

    async def hold_engines(self, holder: str, wait_s: float) -> None:
        turns = self.versions.turns

        def attempt() -> bool | None:
            if turns.is_recalled and holder not in turns.holders:
                return None
            turns.holders.add(holder)
            return True

        await self.waits.until(
            "engines",
            attempt,
            call="hold_engines",
            key="hold_engines",
            who=holder,
            wait_s=wait_s,
            reason=lambda: "the trainer, whose turn it is, to announce its next version",
        )

    async def let_go(self, holder: str) -> None:
        self.waits.check_open()
        self.drop_holder(holder)

    def drop_holder(self, holder: str) -> None:
        self.versions.turns.holders.discard(holder)
        self.waits.notify("turn", "manifest")
