"""A store as trees of plain values, to be changed anywhere and sealed again with right checksums.

Bytes that hold a document of their own (user state, groups, events) are trees too. Whoever changes a file
leaves the digests that lead to it right: only what was changed on purpose is wrong.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from everystep.format import log
from everystep.format.base import CHUNK_BYTES
from everystep.format.document import VERSION, pack_document
from everystep.format.log import (
    BLOCK_BYTES,
    Chain,
    SegmentHeader,
    body_checksum,
    pack_segment_header,
    read_records,
    unpack_segment_header,
)

_FRAME = struct.Struct("<QQQ")
_KINDS = {
    "manifest.json": "manifest",
    "base.json": "base",
    "index.json": "part",
    "everystep.json": "run",
}
_SEALED = ("run", "manifest", "base", "part", "tag", "commit")
_PARTS = {"weights": "safetensors", "slots": "safetensors", "session": "bin", "tail": "bin"}
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
NO_TEXT = "\ue000"  # stands for bytes that are no UTF-8, in any string
_BYTES_OF_NO_TEXT = b"\xff\xfe\xfd"  # as many, so that lengths stay right


class Inner:
    """Bytes that are a msgpack document."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __repr__(self) -> str:
        return "a document"  # as deep as it may be, and the same wherever it lies in memory


def opened(value: Any) -> Any:
    """Plain values in which every document inside bytes is a tree."""
    if isinstance(value, dict):
        return {key: opened(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [opened(inner) for inner in value]
    if isinstance(value, bytes) and value:
        with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            tree = msgspec.msgpack.decode(value)
            if isinstance(tree, dict | list) and msgspec.msgpack.encode(tree) == value:
                return Inner(opened(tree))
    return value


def closed(value: Any) -> Any:
    if isinstance(value, Inner):
        return _packed(value.tree)
    if isinstance(value, dict):
        return {key: closed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [closed(inner) for inner in value]
    return value


def _packed(tree: Any) -> bytes:
    return _no_text(msgspec.msgpack.encode(closed(tree)))


def _no_text(data: bytes) -> bytes:
    return data.replace(NO_TEXT.encode(), _BYTES_OF_NO_TEXT)


def _sealed(kind: str, version: str, document: bytes) -> bytes:
    """As `pack_document` seals, whatever the version and the bytes."""
    body = _no_text(document.partition(b"\n")[2])
    head = f"{kind} {version} {len(body)}"
    digest = xxhash.xxh3_128_hexdigest(head.encode() + b"\n" + body)
    return f"everystep {head} {digest}\n".encode() + body


class Document:
    """One file of a store."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.version = str(VERSION)
        self.written = True  # False: what lies there is larger than what is known of it
        self.tree = _READ[kind](path.read_bytes())

    @property
    def is_there(self) -> bool:
        """It may have become a file of another kind."""
        return self.written and self.path.is_file() and not self.path.is_symlink()

    def bytes(self) -> bytes:
        if self.kind in _SEALED:
            return _sealed(self.kind, self.version, pack_document(self.kind, closed(self.tree)))
        return bytes(_WRITE[self.kind](self.tree))


def _read_json(data: bytes) -> Any:
    return json.loads(data.partition(b"\n")[2])


def _read_frames(data: bytes) -> list[Any]:
    entries, at = [], 0
    while at < len(data):
        document, _, payload = _FRAME.unpack_from(data, at)
        start = at + _FRAME.size
        events = msgspec.msgpack.decode(data[start : start + document])
        at = start + document + payload
        entries.append([opened(events), data[start + document : at]])
    return entries


def _write_frames(entries: Any) -> bytes:
    frames = []
    for entry in entries:
        events, payload = entry if isinstance(entry, list) and len(entry) == 2 else (entry, b"")
        document = _packed(events)
        payload = payload if isinstance(payload, bytes) else _packed(payload)
        checksum = xxhash.xxh3_64_intdigest(document)
        frames.append(_FRAME.pack(len(document), checksum, len(payload)) + document + payload)
    return b"".join(frames)


def _read_log(data: bytes) -> dict[str, Any]:
    view = memoryview(data)
    header = unpack_segment_header(view, "")._asdict()
    records = [[r.step, r.after, _read_frames(bytes(r.body))] for r in read_records(view, "")]
    return {"header": header, "records": records}


def _write_log(tree: dict[str, Any]) -> bytes:
    told = tree["header"]
    run_id = str(told.get("run_id")).encode(errors="replace")[:32].decode(errors="replace")
    term, rank = (_number(told.get(name), _U32) for name in ("term", "rank"))
    after, census = (_number(told.get(name)) for name in ("after", "census"))
    header = SegmentHeader(run_id, term, rank, after, census)
    chain, pieces = Chain(header), [_segment_header(header)]
    for record in tree["records"]:
        step, after, entries = (
            record if isinstance(record, list) and len(record) == 3 else (0, 0, [])
        )
        body = _write_frames(entries if isinstance(entries, list) else [])
        checksum = body_checksum(memoryview(body))
        pieces += [chain.head(_number(step), _number(after), len(body), checksum), body]
        pieces.append(bytes(-sum(map(len, pieces)) % BLOCK_BYTES))
    return b"".join(pieces)


def _segment_header(header: SegmentHeader) -> bytes:
    """Its run id may be no text."""
    fields = [*log._SEGMENT.unpack_from(pack_segment_header(header))]
    fields[2], fields[-1] = _no_text(fields[2]), 0
    fields[-1] = xxhash.xxh3_64_intdigest(log._SEGMENT.pack(*fields))
    return log._SEGMENT.pack(*fields).ljust(BLOCK_BYTES, b"\0")


def _number(value: Any, most: int = _U64) -> int:
    return value & most if isinstance(value, int) else 0


def _read_safetensors(data: bytes) -> list[Any]:
    (size,) = struct.unpack_from("<Q", data)
    return [json.loads(data[8 : 8 + size]), data[8 + size :]]


def _write_safetensors(tree: Any) -> bytes:
    header, data = tree if isinstance(tree, list) and len(tree) == 2 else (tree, b"")
    text = msgspec.json.encode(closed(header))
    text += b" " * (-(len(text) + 8) % 64)
    return struct.pack("<Q", len(text)) + text + (data if isinstance(data, bytes) else b"")


_READ: dict[str, Any] = {
    **dict.fromkeys(_SEALED, _read_json),
    "session": lambda data: opened(msgspec.msgpack.decode(data)),
    "tail": _read_frames,
    "log": _read_log,
    "weights": _read_safetensors,
    "slots": _read_safetensors,
}
_WRITE: dict[str, Any] = {
    "session": _packed,
    "tail": lambda tree: _write_frames(tree if isinstance(tree, list) else []),
    "log": _write_log,
    "weights": _write_safetensors,
    "slots": _write_safetensors,
}


class Store:
    """A run's directory, or what a bucket in a directory holds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        found = sorted(path for path in root.rglob("*") if path.is_file())
        self.documents = [Document(path, kind) for path in found if (kind := _kind(path))]

    def of(self, *kinds: str) -> list[Document]:
        return [document for document in self.documents if document.kind in kinds]

    def seal(self, document: Document) -> None:
        """Write a document that was changed, and make right what others say of its bytes."""
        data = document.bytes()
        if not document.is_there:
            return
        document.path.write_bytes(data)
        if document.kind in _PARTS:
            chunks = [
                xxhash.xxh3_64_hexdigest(data[at : at + CHUNK_BYTES])
                for at in range(0, len(data), CHUNK_BYTES)
            ]
            self.point_out(document, len(data), chunks)
        elif document.kind in ("part", "base"):
            for other in list(self._point_out_document(document, data)):
                self.seal(other)

    def point_out(self, document: Document, size: int, chunks: list[str]) -> None:
        """Have every index that refers to this file say so much of it."""
        for index in list(self._that_say(document, size, chunks)):
            self.seal(index)

    def _that_say(self, document: Document, size: int, chunks: list[str]) -> Iterator[Document]:
        for index in self.of("part"):
            for file in _dicts(index.tree, "kind"):
                place = tuple(file.get(name) for name in ("term", "step", "rank"))
                if (place, file["kind"]) == (_place_of_part(document.path), document.kind):
                    file["bytes"], file["chunks"] = size, chunks
                    yield index

    def _point_out_document(self, document: Document, data: bytes) -> Iterator[Document]:
        """What names this one, once it names these bytes."""
        digest = xxhash.xxh3_128_hexdigest(data)
        for owner, entry in list(self._that_name(document)):
            if entry.get("digest") != digest:
                entry["digest"] = digest
                yield owner

    def _that_name(self, document: Document) -> Iterator[tuple[Document, dict[str, Any]]]:
        if document.kind == "part":
            rank = _place_of_part(document.path)[2]
            for base in self.of("base"):
                if base.path.parent == document.path.parents[2]:
                    yield from ((base, e) for e in _dicts(base.tree, "rank") if e["rank"] == rank)
            return
        term, step = _place_of_base(document.path.parent)
        for owner in self.of("manifest", "commit", "tag"):
            entries = _entries(owner.tree, term)
            yield from ((owner, entry) for entry in entries if entry.get("step") == step)

    def parts_of(self, base: Document) -> list[Document]:
        return [part for part in self.of("part") if part.path.parents[2] == base.path.parent]


def _place_of_base(folder: Path) -> tuple[int, int]:
    return int(folder.parents[1].name.partition("-")[0]), int(folder.name)


def _place_of_part(path: Path) -> tuple[int, int, int]:
    """Of a file in it."""
    return (*_place_of_base(path.parents[2]), int(path.parent.name))


def _entries(tree: Any, term: int) -> Iterator[dict[str, Any]]:
    """What is said of the bases of a term: in a manifest, in each of a commit's, in a tag."""
    for owner in _dicts(tree, "term"):
        listed = owner.get("bases") or [owner.get("base")]
        if owner["term"] == term and isinstance(listed, list):
            yield from (entry for entry in listed if isinstance(entry, dict))


def _dicts(tree: Any, key: str) -> Iterator[dict[str, Any]]:
    """Every dict of a tree that has this key."""
    if isinstance(tree, dict):
        if key in tree:
            yield tree
        for inner in tree.values():
            yield from _dicts(inner, key)
    elif isinstance(tree, list):
        for inner in tree:
            yield from _dicts(inner, key)


def _kind(path: Path) -> str:
    if path.name in _KINDS:
        return _KINDS[path.name]
    if path.parent.name == "tags":
        return "tag"
    if path.parent.name == "commits":
        return "commit"
    if path.suffix == ".log" or path.parent.suffix == ".log":
        return "log"
    return path.stem if path.stem in _PARTS else ""
