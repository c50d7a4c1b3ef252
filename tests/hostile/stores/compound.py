"""Changes that agree with each other, as somebody would make them who knows the format: one alone would be
found at once by what it contradicts."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import xxhash

from everystep.format.base import CHUNK_BYTES
from hostile.stores.documents import Document, Inner, Store

_HOLE_BYTES = 300 << 20
_M61 = (1 << 61) - 1  # integers that differ by a multiple of it have one hash
_VERSIONS = ("9" * 5000, "9" * 20, "2", "0", "-1", "1 ", "")


def change_together(store: Store, chance: random.Random) -> str:
    name, work = chance.choice([*_WAYS.items()])
    try:
        return f"{name}: {work(store, chance)}"
    except (LookupError, TypeError, AttributeError, ValueError) as error:  # changed before
        return f"{name}: not where {type(error).__name__}"


def _one_of(store: Store, chance: random.Random, *kinds: str) -> Document | None:
    found = [document for document in store.of(*kinds) if document.is_there]
    return chance.choice(found) if found else None


def _told(store: Store, document: Document | None) -> str:
    return str(document.path.relative_to(store.root)) if document else "there is none"


def _long_shape(store: Store, chance: random.Random) -> str:
    index = _one_of(store, chance, "base")
    census = index.tree.get("census") if index and isinstance(index.tree, dict) else None
    atoms = census.get("atoms") if isinstance(census, dict) else None
    if index is None or not isinstance(atoms, list) or not atoms:
        return "no atoms"
    place = chance.randrange(len(atoms))
    more = [1] * chance.choice([30, 33, 64, 65, 100, 10_000])
    for owner in (atoms[place], *index.tree["tensors"]):
        ours = owner is atoms[place] or (owner.get("atom"), owner.get("slot")) == (place, "")
        if ours and isinstance(owner.get("shape"), list):
            owner["shape"] = more + owner["shape"]
    store.seal(index)
    return _told(store, index)


def _group_count(store: Store, chance: random.Random) -> str:
    session = _one_of(store, chance, "session")
    if session is None or not isinstance(session.tree, dict):
        return "no session"
    groups = session.tree.get("groups")
    if not isinstance(groups, list) or not groups:
        return "no groups"
    way = chance.randrange(4)
    found = groups[0].tree if isinstance(groups[0], Inner) else None
    if way == 0:
        groups.clear()
    elif way == 1:
        groups.append(groups[0])
    elif isinstance(found, list):
        groups[0] = Inner(found * 2 if way == 2 else [])
    else:
        groups[0] = Inner([])
    store.seal(session)
    return _told(store, session)


def _slots_of_another_kind(store: Store, chance: random.Random) -> str:
    session = _one_of(store, chance, "session")
    values = session.tree.get("values") if session and isinstance(session.tree, dict) else None
    if session is None or not isinstance(values, list):
        return "no values"
    other = chance.choice(
        [[1, 2], [], {"tuple": [1]}, {"int": "7"}, {"dict": [[{"tuple": []}, 1]]}]
    )
    values[:] = [[0, 0, Inner(other)], *values[1:]]
    store.seal(session)
    return _told(store, session)


def _keys_of_one_hash(store: Store, chance: random.Random) -> str:
    session = _one_of(store, chance, "session")
    if session is None or not isinstance(session.tree, dict):
        return "no session"
    keys: list[Any] = [{"int": str(k * _M61)} for k in range(1, 20_000)]
    if chance.random() < 0.5:
        keys = [{"complex": [-1000003.0 * k, float(k)]} for k in range(20_000)]
    tag = chance.choice(["set", "frozenset", "dict", "counter"])
    body = keys if "set" in tag else [[key, 0] for key in keys]
    session.tree["state"] = Inner({"dict": [["notes", {tag: body}]]})
    store.seal(session)
    return f"{tag}, {_told(store, session)}"


def _holes(store: Store, chance: random.Random) -> str:
    """A file that takes nearly nothing on the disk, and says that it is large."""
    document = _one_of(store, chance, "session", "tail", "weights", "log")
    if document is None:
        return "no file"
    in_bucket = (store.root / "commits").exists()  # what is fetched from there has no holes
    size = 64 << 30 if document.kind == "log" else _HOLE_BYTES // (3 if in_bucket else 1)
    if document.kind == "session" and chance.random() < 0.5:
        size = 3 << 30
    data = document.path.read_bytes()
    os.truncate(document.path, size)
    empty = xxhash.xxh3_64_hexdigest(bytes(CHUNK_BYTES))
    first = xxhash.xxh3_64_hexdigest(data.ljust(CHUNK_BYTES, b"\0")[:CHUNK_BYTES])
    if document.kind != "log" and len(data) <= CHUNK_BYTES:
        chunks = [first] + [empty] * (size // CHUNK_BYTES - 1)
        store.point_out(document, size, chunks)
    document.written = False  # nobody writes it whole again
    return f"{size >> 20} MiB, {_told(store, document)}"


def _another_version(store: Store, chance: random.Random) -> str:
    document = _one_of(store, chance, "run", "manifest", "base", "tag", "commit")
    if document is None:
        return "no document"
    document.version = chance.choice(_VERSIONS)
    store.seal(document)
    return f"{document.version[:20]!r}, {_told(store, document)}"


_WAYS: dict[str, Callable[[Store, random.Random], str]] = {
    "a shape of many dimensions": _long_shape,
    "another number of groups": _group_count,
    "slots of another kind": _slots_of_another_kind,
    "keys of one hash": _keys_of_one_hash,
    "holes": _holes,
    "another version": _another_version,
}
