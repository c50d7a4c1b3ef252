"""Payloads stored as their words that are not zero come back bit for bit, where an event speaks of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep import native
from everystep.core.census import Atom, Census, Mode, OptimizerSpec, align, gradient_layout
from everystep.core.events import AMP_BYTES, Call, Edit, Event, pack_presence, used_ranges
from everystep.errors import CorruptData
from everystep.format.sparse import block_starts, expand
from everystep.lane import sparse as lane_sparse
from everystep.lane.sparse import pack_sparse
from everystep.recover.expand import Expander, expand_on_device

pytestmark = pytest.mark.skipif(native.library() is None, reason="nothing was compiled")


@pytest.fixture(autouse=True)
def _small_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_sparse, "_WORTH_BYTES", 0)


def _record(
    sizes: list[int], present: list[bool], edit_bytes: int
) -> tuple[Census, list[Event], int]:
    atoms = tuple(Atom(f"a{i}", "uint8", (n,)) for i, n in enumerate(sizes))
    spec = OptimizerSpec("", "m:O", Mode.REPLAY, (tuple(range(len(sizes))),))
    census = Census(atoms, (spec,), "exact")
    at = 192
    end = at + gradient_layout(census, 0).bytes
    events: list[Event] = [
        Call(0, b"", pack_presence(present), at, {"found_inf": end}),
        Edit(0, "", "uint8", (edit_bytes,), 0, edit_bytes, end + AMP_BYTES),
    ]
    return census, events, end + AMP_BYTES + align(edit_bytes)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([1, 3, 63, 4096, 262144, 262147, 600001]), min_size=1, max_size=5),
    st.integers(0, 2**32),
    st.floats(0, 0.02),
    st.sampled_from([0, 5, 70000]),
)
def test_round_trip(sizes: list[int], seed: int, share: float, edit_bytes: int) -> None:
    random = np.random.default_rng(seed)
    present = [bool(random.random() < 0.8) for _ in sizes]
    census, events, size = _record(sizes, present, edit_bytes)
    payload = np.zeros(size, np.uint8)
    ranges = used_ranges(events, census)
    for start, length in ranges:
        there = random.random(length) < share
        payload[start : start + length][there] = random.integers(1, 256, int(there.sum()))
        payload[start + length - 1 : start + length] = 7  # where a range ends within a word
    used = np.zeros(size, bool)
    for start, length in ranges:
        used[start : start + length] = True
    payload[~used] = 255  # gaps hold anything
    packed = pack_sparse(events, memoryview(payload), census)
    if packed is None:
        assert share > 0.005 or size < 20000
        return
    back = np.frombuffer(expand(*packed, ranges), np.uint8)
    assert len(back) == size
    assert (back[used] == payload[used]).all()
    assert 4 * len(packed[1]) <= size
    stored = torch.tensor(np.frombuffer(packed[1], np.uint8))
    starts = torch.from_numpy(block_starts(ranges))
    assert bytes(back) == expand_on_device(packed[0], stored, starts).numpy().tobytes()


def test_dense_payloads_are_left_alone() -> None:
    census, events, size = _record([1 << 20], [True], 0)
    payload = np.random.default_rng(1).integers(1, 256, size, dtype=np.uint8)
    assert pack_sparse(events, memoryview(payload), census) is None


def test_what_is_dense_at_its_beginning_only() -> None:
    """Blocks from everywhere are looked at before it is decided."""
    census, events, size = _record([64 << 20], [True], 0)
    payload = np.zeros(size, np.uint8)
    payload[192 : 192 + (9 << 20)] = 7
    packed = pack_sparse(events, memoryview(payload), census)
    assert packed is not None
    assert expand(*packed, used_ranges(events, census)) == memoryview(payload)


def test_what_does_not_fit_its_events_is_refused() -> None:
    census, events, size = _record([1 << 20], [True], 0)
    payload = np.zeros(size, np.uint8)
    payload[200:1000] = 7
    packed = pack_sparse(events, memoryview(payload), census)
    assert packed is not None
    with pytest.raises(CorruptData):
        expand(*packed, used_ranges(events, census)[:0])
    with pytest.raises(CorruptData):
        expand(packed[0], packed[1][:-4], used_ranges(events, census))


def test_a_payload_that_no_event_speaks_of() -> None:
    census, events, size = _record([1 << 16], [False], 0)
    without = [event for event in events if isinstance(event, Call) and not event.amp]
    packed = pack_sparse(without, memoryview(np.ones(size, np.uint8)), census)
    assert packed is not None and len(packed[1]) == 0
    assert not np.frombuffer(expand(*packed, []), np.uint8).any()
    with Expander(census, []) as expander:
        expander._device = torch.device("cpu")  # as if it were a GPU
        ((_, whole),) = expander.payloads([([packed[0]], packed[1])])
    assert len(whole) == size and isinstance(whole, torch.Tensor) and not whole.any()
