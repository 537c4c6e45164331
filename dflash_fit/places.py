"""Which of the trials that wait start now, and on which device.  Pure: numbers in, names out.

Trials of one group see the same packs, so those that start together and at the same step share
what is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a trial is to do next, and what it takes."""

    name: str
    group: str  # of trials that see the same packs
    step: int  # where it stands
    goal: int  # to which it trains
    leap: int  # steps between its checkpoints
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """A device with what is left of it."""

    device: str
    room: int  # bytes
    most: int | None  # trials at once


@dataclass(frozen=True, kw_only=True)
class Start:
    """A trial at work, or about to be."""

    needs: Needs
    device: str
    stop_at: int | None = None  # a step before its goal, where others of its group wait for it
    ending: bool = False  # it is about to be over


def starts(
    waiting: Sequence[Needs],
    running: Sequence[Start],
    places: Sequence[Place],
    *,
    host_room: int,
) -> list[Start]:
    """Those that start now: as many as there is room for, group by group, the foremost first.

    A trial that is too large for a device gets it for itself.  Trials that share what is read end
    at about the same time: the next of their group wait for the last of them, to share as well.
    """
    ending = {start.needs.group for start in running if start.ending}
    waiting = [needs for needs in waiting if needs.group not in ending]
    groups = list(dict.fromkeys(needs.group for needs in waiting))
    order = sorted(waiting, key=lambda needs: (groups.index(needs.group), -needs.step))
    chosen: list[Start] = []
    for needs in order:
        device = place_for(needs, [*running, *chosen], places, host_room=host_room)
        if device is not None:
            chosen.append(Start(needs=needs, device=device))
    return [start for group in groups for start in levelled(group, chosen, running)]


def place_for(
    needs: Needs, taken: Sequence[Start], places: Sequence[Place], *, host_room: int
) -> str | None:
    """The device with the fewest trials that has room, None where none has."""
    host = host_room - sum(start.needs.host_bytes for start in taken)
    if taken and needs.host_bytes > host:
        return None
    found: list[tuple[int, int, str]] = []
    for place in places:
        there = [start.needs for start in taken if start.device == place.device]
        room = place.room - sum(other.device_bytes for other in there)
        if place.most is not None and len(there) >= place.most:
            continue
        if not there or needs.device_bytes <= room:
            found.append((len(there), -room, place.device))
    # Of equal ones the first: `places` are in the order that the user gave.
    return min(found, key=lambda item: item[:2])[2] if found else None


def levelled(group: str, chosen: Sequence[Start], running: Sequence[Start]) -> list[Start]:
    """Of a group, those that start now: where a crash left some of them a save behind the others,
    these go first, to where the others stand, and all go on together from there.
    """
    mine = [start for start in chosen if start.needs.group == group]
    behind = [start.stop_at for start in running if start.needs.group == group and start.stop_at]
    front = max([*behind, *(start.needs.step for start in mine)], default=0)
    late = {start.needs.name for start in mine if 0 < front - start.needs.step <= start.needs.leap}
    if not late and not behind:
        return mine
    return [
        Start(needs=start.needs, device=start.device, stop_at=front)
        if start.needs.name in late
        else start
        for start in mine
        # Those at the front wait; those far behind would keep them waiting for long.
        if start.needs.step < front
    ]
