"""Changes that agree with each other, as somebody would make them who knows the format: one alone would be
found at once by what it contradicts."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from everystep.format.base import CHUNK_BYTES
from everystep.format.planes import CHUNK_BYTES as PACKED_CHUNK
from everystep.format.planes import pack_chunk
from everystep.format.values import encode
from hostile.stores.documents import Document, Inner, Store

RANDOM_STATES = "random states"
_STATES_SHARE = 0.3  # of these changes: there are few of them in a store, and they lead far
_U64 = (1 << 64) - 1
# of a Mersenne twister 624 is the last one
_PLACES = (-1, 0, 1, 2, 600, 623, 624, 625, 1000, 10**6, 10**7, 2**31, 2**32 - 1, 2**40, 2**63 - 1)
_HOLE_BYTES = 300 << 20
_M61 = (1 << 61) - 1  # integers that differ by a multiple of it have one hash
_VERSIONS = ("9" * 5000, "9" * 20, "3", "1", "0", "-1", "1 ", "")


def change_together(store: Store, chance: random.Random) -> str:
    name = RANDOM_STATES if chance.random() < _STATES_SHARE else chance.choice([*_WAYS])
    work = _WAYS[name]
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
    base = _one_of(store, chance, "base")
    census = base.tree.get("census") if base and isinstance(base.tree, dict) else None
    atoms = census.get("atoms") if isinstance(census, dict) else None
    if base is None or not isinstance(atoms, list) or not atoms:
        return "no atoms"
    place = chance.randrange(len(atoms))
    more = [1] * chance.choice([30, 33, 64, 65, 100, 10_000])
    parts = store.parts_of(base)
    for owner in (atoms[place], *(tensor for part in parts for tensor in part.tree["tensors"])):
        ours = owner is atoms[place] or (owner.get("atom"), owner.get("slot")) == (place, "")
        if ours and isinstance(owner.get("shape"), list):
            owner["shape"] = more + owner["shape"]
    for document in (*parts, base):
        store.seal(document)
    return _told(store, base)


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
    document = _one_of(store, chance, "run", "manifest", "base", "part", "tag", "commit")
    if document is None:
        return "no document"
    document.version = chance.choice(_VERSIONS)
    store.seal(document)
    return f"{document.version[:20]!r}, {_told(store, document)}"


def _sealed_states(store: Store) -> list[tuple[Document, Any]]:
    """Random states of every base and of every record of a log, as trees."""
    found = [(d, d.tree["rng"]) for d in store.of("session") if d.is_there]
    for document in (d for d in store.of("log") if d.is_there):
        seals = [record[2][-1][0][-1] for record in document.tree["records"]]
        found += [(document, seal[3]) for seal in seals]
    return [(d, rng.tree) for d, rng in found if isinstance(rng, Inner)]


def _random_states(store: Store, chance: random.Random) -> str:
    """Numbers that a generator might take for places in its memory."""
    states = _sealed_states(store)
    newest = [pair for pair in states if pair[0].kind == "session"][-1:]
    document, tree = chance.choice(newest if newest and chance.random() < 0.5 else states)
    number = chance.choice(_PLACES)
    name, change = chance.choice([*_GENERATORS.items()])
    change(tree, number)
    store.seal(document)
    return f"{name} {number}, {_told(store, document)}"


def _in_python(tree: Any, number: int) -> None:
    words = bytearray(tree[0][1])
    struct.pack_into("<Q", words, len(words) - 8, number & _U64)
    tree[0][1] = bytes(words)


def _in_numpy(place: int) -> Callable[[Any, int], None]:
    def change(tree: Any, number: int) -> None:
        numpys = ["MT19937", bytes(range(1, 157)) * 16, 624, 0, 0.0]
        numpys[place] = bytes(abs(number) % 5000) if place == 1 else number
        tree[1] = numpys

    return change


def _in_numpys_document(tree: Any, number: int) -> None:
    """Of a generator that is no Mersenne twister."""
    words = np.arange(4, dtype=np.uint64)
    inner = {"counter": words, "key": words[:2]}
    beside = {"has_uint32": 0, "uinteger": 0, "has_gauss": 0, "gauss": 0.0}
    told = {"bit_generator": "Philox", "state": inner, "buffer": words, "buffer_pos": number}
    tree[1] = ["Philox", encode({**told, **beside}, ""), 0, 0, 0.0]


def _in_torch(tree: Any, number: int) -> None:
    """How many words are left, and which is the next one."""
    state = bytearray(tree[2])
    left = max(-(2**31), min(number, 2**31 - 1))
    agreeing = [(624, 600), (left, 0), (2, number & _U64), (624 - (left & 511), 623)]
    struct.pack_into("<iiQ", state, 8, *_with_seeded(agreeing[number % len(agreeing)]))
    tree[2] = bytes(state)


def _with_seeded(pair: tuple[int, int]) -> tuple[int, int, int]:
    return pair[0], 1, pair[1]


def _in_cuda(tree: Any, number: int) -> None:
    tree[3] = [bytes(number & 31), struct.pack("<QQ", 1, number & _U64)]


_GENERATORS: dict[str, Callable[[Any, int], None]] = {
    "python's position": _in_python,
    "numpy's words": _in_numpy(1),
    "numpy's position": _in_numpy(2),
    "numpy's flag": _in_numpy(3),
    "numpy's number": _in_numpy(4),
    "Philox's position": _in_numpys_document,
    "torch's words": _in_torch,
    "a CUDA device's": _in_cuda,
}


def _bomb(store: Store, chance: random.Random) -> str:
    """Byte planes of gigabytes in a small file, which say so: sizes that agree with each other."""
    found = [
        (document, entry, event)
        for document in store.of("log")
        if document.is_there
        for record in document.tree["records"]
        for entry in record[2]
        for event in entry[0]
        if event[0] == "planes"
    ]
    document, entry, event = chance.choice(found)
    chunk = pack_chunk(memoryview(bytes(PACKED_CHUNK)), event[2])
    count = chance.choice([1, 2, 100, 1600, 16_000])
    event[1], event[3] = count * PACKED_CHUNK - chance.randrange(3), [len(chunk)] * count
    entry[1] = chunk * count
    store.seal(document)
    return f"{count} chunks, {_told(store, document)}"


_WAYS: dict[str, Callable[[Store, random.Random], str]] = {
    "a shape of many dimensions": _long_shape,
    "another number of groups": _group_count,
    "slots of another kind": _slots_of_another_kind,
    "keys of one hash": _keys_of_one_hash,
    RANDOM_STATES: _random_states,
    "a bomb of byte planes": _bomb,
    "holes": _holes,
    "another version": _another_version,
}
