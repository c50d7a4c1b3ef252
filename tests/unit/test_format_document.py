"""docs/FORMAT.md and the code say the same: its tables are parsed and compared."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from everystep.core import events, numbers
from everystep.core.census import Census
from everystep.core.dtypes import ELEMENT_TYPES
from everystep.core.geometry import SLOT_HEADER_BYTES
from everystep.format import entry, log, slot, values
from everystep.format.base import CHUNK_BYTES, session_bytes_max
from everystep.format.document import VERSION
from everystep.replay.tensors import pack, unpack
from everystep.store import layout

TEXT = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text()


def table(first_column: str) -> list[list[str]]:
    """Rows of the table whose header begins with this word."""
    lines = TEXT.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_slot_header_offsets() -> None:
    at, expected = 0, []
    for name, code in slot.SLOT_FIELDS:
        size = struct.calcsize("<" + code)
        expected.append([name, str(at), str(size)])
        at += size
    expected.append(["device word", str(slot.SLOT_DEVICE_WORD_AT), "8"])
    expected.append(["host word", str(slot.SLOT_HOST_WORD_AT), "8"])
    assert table("slot field") == expected
    assert at <= slot.SLOT_DEVICE_WORD_AT
    assert f"payload begins at byte {SLOT_HEADER_BYTES}" in TEXT


def test_ring_words() -> None:
    for name, offset in table("ring word"):
        assert getattr(slot, f"RING_{name.upper().replace(' ', '_')}_AT") == int(offset), name
    known = [n for n in vars(slot) if re.fullmatch(r"RING_\w+_AT", n)]
    assert len(known) == len(table("ring word"))


def test_log() -> None:
    for name, packed in (("segment field", log._SEGMENT), ("record field", log._RECORD)):
        at = 0
        codes = re.findall(r"\d*[a-zA-Z]", packed.format.removeprefix("<"))
        for (_, offset, size), code in zip(table(name), codes, strict=True):
            assert (int(offset), int(size)) == (at, struct.calcsize("<" + code))
            at += struct.calcsize("<" + code)
    header = log.SegmentHeader("ab" * 16, 7, 3, 120, 99)
    assert log.unpack_segment_header(memoryview(log.pack_segment_header(header)), "") == header


def test_events() -> None:
    kinds = {kind.__struct_config__.tag: kind for kind in events.Event.__args__}
    written = {tag: fields.split(", ") for tag, fields in table("event")}
    assert written == {tag: list(kind.__struct_fields__) for tag, kind in kinds.items()}


def test_tail_frame() -> None:
    offsets = [(int(at), int(size)) for _, at, size in table("tail field")]
    assert offsets == [(0, 8), (8, 8), (16, 8)]
    framed = entry.frame_entry(b"doc", 7, b"payload")
    assert struct.unpack_from("<QQQ", framed) == (3, 7, 7)
    assert framed[24:] == b"docpayload"


def test_element_types_and_chunks() -> None:
    written = {name: (int(size), code) for name, size, code in table("element type")}
    assert written == {name: tuple(kind) for name, kind in ELEMENT_TYPES.items()}
    for name, kind in ELEMENT_TYPES.items():
        assert torch.empty(0, dtype=getattr(torch, name)).element_size() == kind.bytes
    assert f"every chunk of {CHUNK_BYTES} bytes" in TEXT


def test_every_state_tag_is_written_and_read() -> None:
    from collections import Counter, OrderedDict, deque

    examples = {
        "dict": {1: "a"},
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("abca"),
        "tuple": (1, (2, 3)),
        "set": {1, 2},
        "frozenset": frozenset("x"),
        "deque": deque([1, 2], maxlen=5),
        "int": 1 << 100,
        "text": "half of a pair: \ud800",
        "complex": 1 + 2j,
        "range": range(1, 9, 2),
        "ndarray": np.arange(6, dtype=np.float32).reshape(2, 3),
        "npscalar": np.float64(0.1),
        "tensor": torch.arange(3.0, dtype=torch.bfloat16),
        "size": torch.Size([2, 3]),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
    }
    assert [tag for tag, _ in table("tag")] == list(examples)
    for tag, example in examples.items():
        data = values.encode(example, "state", pack)
        assert tag.encode() in data
        back = values.decode(data, unpack)
        assert type(back) is type(example)
        same = back == example
        assert bool(same.all()) if isinstance(example, np.ndarray | torch.Tensor) else same


def test_bounds() -> None:
    written = re.search(
        r"Terms go up to (\d+), steps up to (\d+), segments of a term up to (\d+), ranks up to (\d+)",
        TEXT,
    )
    assert written is not None
    expected = (numbers.TERM_MAX, numbers.STEP_MAX, layout._SEGMENT_MAX, numbers.RANK_MAX)
    assert tuple(map(int, written.groups())) == expected
    assert TEXT.count(f"\nVersion {VERSION}.") == 1
    assert f"The version of a segment is {log._VERSION}." in TEXT
    assert f"at most {numbers.DIMENSIONS_MAX} dimensions" in TEXT
    assert f"at most {session_bytes_max(Census((), (), 'exact'))} bytes" in TEXT
    assert f"more than {values._ALIKE_MAX} keys" in TEXT


@pytest.mark.parametrize("flag, name", [(slot.FLAG_SEALED, "sealed"), (slot.FLAG_GAP, "gap")])
def test_flags(flag: int, name: str) -> None:
    assert re.search(rf"\b{flag} {name}\b", TEXT)
