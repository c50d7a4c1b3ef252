"""What a disk holds after the power went: what was synced, and any part of the rest. A pure function of the
trace, the instant and a seed."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from faults.disk import Operation

_SECTOR = 512
_NAMES = ("enter", "leave", "move")


def survivors(trace: Sequence[Operation], instant: int, chance: random.Random) -> list[Operation]:
    """Operations that are on the disk, in their order, if the power goes behind `instant` of them.

    A sync of a file brings its data, of a folder its names. What came behind the last one is there, is not,
    or is there in part; file systems that keep a journal keep the order of names, others keep none.
    """
    done = trace[:instant]
    safe_places = _synced(done)
    share = chance.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    journal = chance.randrange(instant + 1) if chance.random() < 0.5 else -1
    kept = []
    for place, operation in enumerate(done):
        safe = place in safe_places
        names = operation.kind in _NAMES
        by_journal = names and place < journal
        if operation.kind in ("sync", "unsynced"):
            continue
        if safe or by_journal or chance.random() < (share if not names or journal < 0 else 0):
            kept.append(operation if safe else _torn(operation, chance))
    return kept


def _synced(done: Sequence[Operation]) -> set[int]:
    """Places of operations that a sync has brought to the disk. One that failed has given a file's data up:
    the next one that succeeds says nothing of it. Names wait for the next one."""
    waiting: dict[int, list[int]] = defaultdict(list)
    safe: set[int] = set()
    for place, operation in enumerate(done):
        if operation.kind == "sync":
            safe.update(waiting.pop(operation.node, ()))
        elif operation.kind == "unsynced":
            names = [p for p in waiting[operation.node] if done[p].kind in _NAMES]
            waiting[operation.node] = names
        else:
            waiting[operation.node].append(place)
    return safe


def _torn(operation: Operation, chance: random.Random) -> Operation:
    """Of a write that nobody has synced, some sectors; the others hold nothing."""
    if operation.kind != "write" or chance.random() < 0.5:
        return operation
    data = bytearray(operation.data)
    for at in range(0, len(data), _SECTOR):
        if chance.random() < 0.3:
            data[at : at + _SECTOR] = bytes(len(data[at : at + _SECTOR]))
    end = len(data) if chance.random() < 0.5 else chance.randrange(0, len(data) + 1, _SECTOR)
    return Operation("write", operation.node, operation.at, bytes(data[:end]))


def build(kept: Sequence[Operation], folders: dict[int, bool], target: Path) -> None:
    """The tree that these operations lead to."""
    data: dict[int, bytearray] = defaultdict(bytearray)
    names: dict[int, dict[str, int]] = defaultdict(dict)
    for operation in kept:
        if operation.kind == "write":
            content = data[operation.node]
            content.extend(bytes(max(0, operation.at - len(content))))
            content[operation.at : operation.at + len(operation.data)] = operation.data
        elif operation.kind == "truncate":
            content = data[operation.node]
            content.extend(bytes(max(0, operation.at - len(content))))
            del content[operation.at :]
        elif operation.kind == "enter":
            names[operation.node][operation.name] = operation.target
        elif operation.kind == "leave":
            names[operation.node].pop(operation.name, None)
        elif operation.kind == "move":
            names[operation.node].pop(operation.other, None)
            names[operation.node][operation.name] = operation.target
    _make(0, target, folders, names, data)


def _make(
    node: int,
    path: Path,
    folders: dict[int, bool],
    names: dict[int, dict[str, int]],
    data: dict[int, bytearray],
) -> None:
    if not folders[node]:
        path.write_bytes(data[node])
        return
    path.mkdir(exist_ok=True)
    for name, inner in names[node].items():
        _make(inner, path / name, folders, names, data)
