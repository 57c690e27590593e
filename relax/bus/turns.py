"""Whose turn it is on devices that trainer and engines share.

engines' turn --recall--> recalled: no new work; held until nobody holds the engines, then each gives its weights up
     ^                          |
     +------- announce ---------+  the trainer's turn, once all have given up
"""

from typing import Any


class Turns:
    """`takers`: receivers of weights that take turns with the trainer; `holders`: who keeps the engines from being recalled."""

    def __init__(self) -> None:
        self.takers: set[str] = set()
        self.holders: set[str] = set()
        self.is_recalled = False
        self._owing: set[str] = set()  # takers that have not given up since the recall

    def joined(self, name: str, takes_turns: bool) -> None:
        """A receiver begins anew, without weights: nothing is left to give up."""
        self.left(name)
        if takes_turns:
            self.takers.add(name)

    def left(self, name: str) -> None:
        self.takers.discard(name)
        self._owing.discard(name)

    def recall(self) -> None:
        if not self.is_recalled:
            self.is_recalled = True
            self._owing = set(self.takers)

    def end_recall(self) -> None:
        self.is_recalled = False
        self._owing.clear()

    def gave_up(self, name: str) -> None:
        self._owing.discard(name)

    def must_give_up(self, name: str) -> bool:
        return name in self._owing and not self.holders

    def may_load(self, name: str) -> bool:
        """Whether the receiver may take weights in now: also those that come while the engines are held, since the holder may
        have no other engine left."""
        return not self.is_recalled or name not in self.takers or bool(self.holders)

    def loads(self, name: str) -> None:
        """The receiver is taking weights in; after a recall it will have to give them up."""
        if self.is_recalled and name in self.takers:
            self._owing.add(name)

    @property
    def is_trainers(self) -> bool:
        return self.is_recalled and not self.holders and not self._owing

    def waiting_for(self) -> str:
        """What a recall waits for, in words."""
        if self.holders:
            return f"{', '.join(sorted(self.holders))} to let the engines go"
        return f"{', '.join(sorted(self._owing))} to give the weights up"

    def stats(self) -> dict[str, Any]:
        return {
            "recalled": self.is_recalled,
            "trainers": self.is_trainers,
            "holders": sorted(self.holders),
            "to_give_up": sorted(self._owing),
        }
