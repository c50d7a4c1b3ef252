"""However a record is written to the log, what comes back is what the optimizer consumed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.core.census import Atom, Census, Mode, OptimizerSpec, gradient_layout
from everystep.core.events import AMP_BYTES, Call, Edit, Event, Planes, Seal, Sparse, pack_presence
from everystep.core.pace import planes_pay
from everystep.errors import CorruptData, StoreError
from everystep.format import planes
from everystep.format.entry import unframe_entries
from everystep.recover.expand import Expander
from everystep.shadow.logcodec import LogCodec

ATOMS = (
    Atom("weight", "float32", (1024, 1024)),
    Atom("bias", "float32", (1000,)),
    Atom("weight.residual", "float32", (1000,), buffer=True, lossy=True),
)
CENSUS = Census(ATOMS, (OptimizerSpec("", "m:O", Mode.REPLAY, ((0, 1),)),), "exact")
SIZE = gradient_layout(CENSUS, 0).bytes


@settings(max_examples=40)
@given(st.binary(max_size=5000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
def test_planes_are_lossless(data: bytes, width: int, threads: int) -> None:
    event, chunks = planes.pack_planes(memoryview(data), width, threads)
    stored = memoryview(b"".join(chunks))
    assert bytes(planes.unpack_planes(event, stored, threads)) == data
    if stored:
        with pytest.raises(CorruptData):
            planes.unpack_planes(event, stored[:-1], threads)


def test_planes_in_many_chunks() -> None:
    data = np.random.default_rng(0).integers(0, 255, (9 << 20) + 5, dtype=np.uint8)
    event, chunks = planes.pack_planes(memoryview(data), 4, 2)
    assert len(event.sizes) == 3
    back = planes.unpack_planes(event, memoryview(b"".join(chunks)), 2)
    assert bytes(back) == data.tobytes()
    broken = Planes(
        event.bytes, event.width, (event.sizes[0] - 1, event.sizes[1] + 1, event.sizes[2])
    )
    with pytest.raises(CorruptData):
        planes.unpack_planes(broken, memoryview(b"".join(chunks)), 2)


def record(gradient: torch.Tensor) -> list[tuple[list[Event], memoryview]]:
    payload = torch.zeros((SIZE + AMP_BYTES + 4096) // 4)
    start = gradient_layout(CENSUS, 0).offsets[0] // 4
    payload[start : start + gradient.numel()] = gradient.flatten()
    events: list[Event] = [
        Call(0, b"", pack_presence([True, True]), 0, {}),
        Edit(2, "", "float32", (1000,), 0, 4000, SIZE + AMP_BYTES),
    ]
    return [(events, memoryview(payload.numpy()).cast("B"))]


def through(codec: LogCodec, entries: list[tuple[list[Event], memoryview]]) -> list[Event]:
    """The events as they come back, when the gradients have been compared."""
    ((events, stored),) = unframe_entries(codec.framed(entries))
    with Expander(CENSUS, [torch.zeros(1)]) as expander:
        ((_, back),) = expander.payloads([(events, stored)])
    assert bytes(back[:SIZE]) == bytes(entries[0][1][:SIZE])
    return events


@pytest.mark.parametrize("kind", ["sparse", "bf16", "dense"])
def test_gradients_come_back(kind: str) -> None:
    torch.manual_seed(1)
    gradient = torch.randn(1024, 1024)
    if kind == "sparse":
        gradient[torch.rand(1024, 1024) > 0.01] = 0
    if kind == "bf16":
        gradient = gradient.bfloat16().float()
    codec = LogCodec(CENSUS)
    codec._step_seconds = 1e6  # there is time
    codec._framed_at = 0.0
    events = through(codec, record(gradient))
    assert not any(isinstance(e, Edit) for e in events), "residuals are not logged"
    expected = {"sparse": Sparse, "bf16": Planes, "dense": Call}[kind]
    assert isinstance(events[0], expected), (codec.how, codec.ratio)
    assert codec.ratio > {"sparse": 50, "bf16": 2, "dense": 0.99}[kind]


def test_a_turn_without_a_call_says_nothing_of_how_well_others_are_packed() -> None:
    codec = LogCodec(CENSUS)
    nothing: list[tuple[list[Event], memoryview]] = [
        ([Seal(2, 1, b"", b"", (), 0)], memoryview(b""))
    ]
    codec.framed(nothing)
    assert codec.ratio == 1.0
    gradient = torch.zeros(1024, 1024)
    gradient[0, :9] = 1
    through(codec, record(gradient))
    packed = codec.ratio
    codec.framed(nothing)
    assert codec.ratio == packed > 1


def test_planes_are_for_who_has_time() -> None:
    codec = LogCodec(CENSUS)
    gradient = torch.randn(1024, 1024).bfloat16().float()
    assert isinstance(through(codec, record(gradient))[0], Call), "steps may be quick: nobody knows"
    assert codec.how == "as it is"


@given(st.floats(0.5, 5), st.floats(0, 10), st.floats(0, 10))
def test_planes_pay(ratio: float, pack: float, step: float) -> None:
    if planes_pay(ratio, pack_seconds=pack, step_seconds=step):
        assert ratio > 1 and 4 * pack <= step
        assert planes_pay(ratio + 1, pack_seconds=pack, step_seconds=step + 1)


def test_without_zstd_a_compressed_log_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planes, "zstandard", None)
    planes.check_readable([Call(0, b"", b"", 0, {})])
    with pytest.raises(StoreError, match=r"everystep\[zstd\]"):
        planes.check_readable([Planes(4, 4, (2,)), Call(0, b"", b"", 0, {})])
