"""A small store whose every byte is known: two terms, three bases, shared files, a log tail."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import ondisk
from states import random_states

from everystep.core.census import Atom, Census, Mode, OptimizerSpec
from everystep.core.events import Edit
from everystep.core.retention import Rules
from everystep.core.tensors import TensorRef
from everystep.format.base import CHUNK_BYTES, SessionValues
from everystep.format.entry import frame_entry
from everystep.format.slot import pack_events
from everystep.format.values import encode
from everystep.recover.find import find_newest
from everystep.recover.point import RestorePoint
from everystep.store import layout
from everystep.store.bases import read_base
from everystep.store.layout import name_of
from everystep.store.runs import Point, read_lineage
from everystep.store.snapshot import Snapshot
from everystep.store.term import TermWriter

SMALL, LARGE = 200, 2 * CHUNK_BYTES + 777  # bytes of the first atom; the large one has three chunks
STEPS = {1: (0, 0), 2: (0, 2), 3: (3, 2)}  # step: the version of every atom


def census(size: int) -> Census:
    atoms = tuple(Atom(f"layer.{i}", "uint8", (n,)) for i, n in enumerate((size, 300)))
    adam = OptimizerSpec("", "torch.optim.adam:Adam", Mode.REPLAY, ((0, 1),))
    return Census(atoms, (adam,), "exact")


@functools.cache
def content(atom: int, slot: str, version: int, size: int) -> bytes:
    return hashlib.shake_128(f"{atom}{slot}{version}".encode()).digest(size)


@functools.cache
def snapshot(step: int, size: int) -> Snapshot:
    tensors = []
    described = census(size)
    for atom, version in enumerate(STEPS[step]):
        for slot in ("", "/exp_avg", "/exp_avg_sq"):
            length = 40 if slot else described.atoms[atom].bytes
            data = memoryview(content(atom, slot, version, length))
            tensors.append(TensorRef(atom, slot, "uint8", (len(data),), version, data))
    state, groups, slots = (encode(v, "") for v in ({"step": step}, [{"lr": 0.1}], {"count": 3}))
    session = SessionValues(step, random_states(step), state, (groups,), ((0, 0, slots),))
    return Snapshot(step, described, tensors, session, tail_of(step), 1 if step == 3 else 0)


def tail_of(step: int) -> bytes:
    if step != 3:
        return b""
    edit = Edit(1, "", "uint8", (300,), 0, 16, 0)
    return frame_entry(*pack_events([edit]), b"sixteen bytes ok")


def build(run: Path, size: int) -> None:
    """Term 1 holds step 1; term 2 continues it with 2 and 3, each referring to the one before."""
    TermWriter(run, None, Rules(5)).commit(snapshot(1, size))
    writer = TermWriter(run, Point(1, 1), Rules(5))
    writer.commit(snapshot(2, size))
    writer.commit(snapshot(3, size))


def needs(run: Path) -> dict[int, set[str]]:
    """The files that each step cannot do without, newest step first."""
    found: dict[int, set[str]] = {}
    for candidate in read_lineage(run).candidates:
        base = read_base(run, candidate)
        files = {name_of(file) for file in base.files}
        files |= {path.inside for path in layout.documents(run, base)}
        manifest = ondisk.term_dir(run, candidate.term) / ondisk.MANIFEST
        found[candidate.entry.step] = {*files, str(manifest.relative_to(run))}
    return found


def newest(run: Path) -> RestorePoint | None:
    """What a trainer would resume from; its bytes are compared, all of them."""
    found, _ = find_newest(run, None)
    if found is None:
        return None
    expected = snapshot(found.point.step, found.census.atoms[0].bytes)
    loaded: dict[Any, bytes] = {(t.atom, t.slot): bytes(t.data) for t in found.tensors()}
    assert loaded == {(t.atom, t.slot): bytes(t.data) for t in expected.tensors}
    assert found.session == expected.session
    assert (bytes(found.tail), found.tail_steps) == (expected.tail, expected.tail_steps)
    assert found.census == expected.census
    return found
