"""Time that engines lose to media: weighted with the share of their room that waiting prompts would fill."""

import pytest

from relax.roles.engine_room import EngineRoom


class Clock:
    time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


def starved_in(room: EngineRoom, clock: Clock, seconds: float) -> float:
    before = room.starved_s
    clock.time_s += seconds
    return room.starved_s - before


def test_only_room_that_waiting_prompts_would_fill_counts() -> None:
    room = EngineRoom(2, clock := Clock())
    assert starved_in(room, clock, 5) == 0, "nobody waits, as when the staleness bound admits nothing"
    with room.waiting():
        assert starved_in(room, clock, 3) == 3, "engines have nothing else"
        with room.working():
            assert starved_in(room, clock, 4) == 2, "half of their room is empty"
            with room.working(), room.waiting():
                assert starved_in(room, clock, 9) == 0, "they are full: whoever waits would wait for them"
        assert starved_in(room, clock, 1) == 1
    assert starved_in(room, clock, 7) == 0
    assert room.starved_s == 6


def test_a_room_larger_than_all_there_is_to_do() -> None:
    room = EngineRoom(100.0, clock := Clock())
    with room.waiting(), room.working(), room.working(), room.working():
        assert starved_in(room, clock, 8) == 2


def test_a_group_that_fails_waits_no_longer() -> None:
    room = EngineRoom(4, clock := Clock())
    with pytest.raises(KeyError), room.waiting():
        raise KeyError
    assert starved_in(room, clock, 1) == 0
