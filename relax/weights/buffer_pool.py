"""Which buffer the next version is written into. Buffers are re-used: pages already in memory are written much faster."""

import threading
from dataclasses import dataclass

from relax.weights.shared_memory import BufferFile, ShmFolder

USUAL_BUFFERS = 3


@dataclass(slots=True, eq=False)
class _Slot:
    file: BufferFile
    version: int  # the newest version written into it
    is_in_hand: bool = True  # between `take` and `release`
    is_settled: bool = False  # every receiver holds this version or a newer one


class BufferPool:
    """Two buffers in turn; a third when both are taken, so that the trainer never waits. Thread-safe.

    A buffer is free once every receiver has acknowledged its version or a newer one, and nobody has it mapped. With
    `USUAL_BUFFERS` in use, an overtaken version that nobody has mapped gives way too: a receiver that comes for it just then is
    refused, and takes the newest one.
    """

    def __init__(self, folder: ShmFolder) -> None:
        self._folder = folder
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()
        self._announced = -1

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, version: int, num_bytes: int) -> BufferFile:
        """A buffer of `num_bytes`, locked for writing; nobody else gets it before `release`."""
        with self._lock:
            slot = self._locked_free_slot()
            if slot is not None:
                slot.version, slot.is_in_hand, slot.is_settled = version, True, False
        if slot is None:
            slot = _Slot(self._folder.new_file(num_bytes), version)
            slot.file.lock_for_writing()
            with self._lock:
                self._slots.append(slot)
        try:
            slot.file.resize(num_bytes)
        except OSError:
            self._discard(slot)
            return self.take(version, num_bytes)
        return slot.file

    def release(self, file: BufferFile) -> None:
        """The version in `file` was announced."""
        with self._lock:
            slot = next(slot for slot in self._slots if slot.file is file)
            slot.is_in_hand = False
            self._announced = max(self._announced, slot.version)

    def give_back(self, file: BufferFile) -> None:
        """What is in `file` will not be announced: the next version may have it."""
        with self._lock:
            slot = next((slot for slot in self._slots if slot.file is file), None)
            if slot is not None:
                slot.is_in_hand, slot.is_settled = False, True

    def settle(self, version: int) -> None:
        """Every receiver holds `version` or a newer one."""
        with self._lock:
            for slot in self._slots:
                slot.is_settled = slot.is_settled or (slot.version <= version and not slot.is_in_hand)

    def close(self) -> None:
        with self._lock:
            for slot in self._slots:
                slot.file.close()
            self._slots = []

    def _locked_free_slot(self) -> _Slot | None:
        idle = sorted((slot for slot in self._slots if not slot.is_in_hand), key=lambda slot: slot.version)
        free = [slot for slot in idle if slot.is_settled]
        if len(self._slots) >= USUAL_BUFFERS:
            free += [slot for slot in idle if not slot.is_settled and slot.version < self._announced]
        return next((slot for slot in free if slot.file.lock_for_writing()), None)

    def _discard(self, slot: _Slot) -> None:
        with self._lock:
            self._slots.remove(slot)
        slot.file.close()
