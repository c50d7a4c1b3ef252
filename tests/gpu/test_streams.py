"""The copier on real streams: copies are held up by random sleeps on the side stream, memory is
overwritten or given away as soon as the copier allows it, and every byte is compared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from everystep.capture.copying.copier import Copier
from everystep.core.census import Atom, Census, Mode, OptimizerSpec, gradient_layout
from everystep.core.geometry import Geometry
from everystep.device.copy_stream import STAGING_BYTES, CudaCopyStream
from everystep.format.slot import SLOT_DEVICE_WORD_AT, commit_word
from everystep.lane.arena import SharedMemory
from everystep.lane.ring import RingWriter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(64,), (3, 5), (1024, 1024), (7,), (4096, 2048), (2048,), (512, 4096)]
SLEEP_CYCLES = 20_000_000  # about 10 ms
GEOMETRY = Geometry(slots=2, slot_bytes=128 << 20)


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Copier, RingWriter, Any]]:
    chance = random.Random(1)
    offload = CudaCopyStream.offload

    def late(self: CudaCopyStream, *args: Any) -> None:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(chance.randrange(SLEEP_CYCLES))
        offload(self, *args)

    monkeypatch.setattr(CudaCopyStream, "offload", late)
    atoms = tuple(Atom(f"a{i}", "float32", shape) for i, shape in enumerate(SHAPES))
    spec = OptimizerSpec("", "torch.optim.sgd:SGD", Mode.REPLAY, (tuple(range(len(SHAPES))),))
    layout = gradient_layout(Census(atoms, (spec,), "exact"), 0)
    memory = SharedMemory.create(GEOMETRY.bytes, "test")
    ring = RingWriter(memory, GEOMETRY, 77)
    copier = Copier(ring, {torch.device("cuda", 0)})
    yield copier, ring, layout
    copier.close()


def gradients(number: int) -> list[torch.Tensor]:
    return [torch.full(shape, float(number + i), device="cuda:0") for i, shape in enumerate(SHAPES)]


def arrived(ring: RingWriter, at: int, layout: Any) -> list[float]:
    """The first and last value of every gradient, as the shadow would read them."""
    torch.cuda.synchronize()
    found = []
    for shape, offset in zip(SHAPES, layout.offsets, strict=True):
        size = 4 * torch.Size(shape).numel()
        data = ring.memory.view[at + offset : at + offset + size].cast("f")
        found += [data[0], data[len(data) // 2], data[-1]]
    return found


def expected(number: int) -> list[float]:
    return [float(number + i) for i in range(len(SHAPES)) for _ in range(3)]


def test_memory_that_was_released_may_be_overwritten(setting: Any) -> None:
    copier, ring, layout = setting
    for number in range(20):
        at = ring.slot_at(number) + 4096
        grads = gradients(number)
        copier.gradients.send(at, 0, layout, grads)
        copier.in_flight.release()
        for gradient in grads:
            gradient.fill_(-1)
        assert arrived(ring, at, layout) == expected(number)
    assert copier.stall_seconds > 0, "waiting for the copies should have been measured"


def test_without_the_wait_it_would_be_overwritten(setting: Any) -> None:
    copier, ring, layout = setting
    wrong = 0
    for number in range(5):
        at = ring.slot_at(number) + 4096
        grads = gradients(number)
        copier.gradients.send(at, 0, layout, grads)
        for gradient in grads:
            gradient.fill_(-1)
        wrong += arrived(ring, at, layout) != expected(number)
        copier.in_flight.release()
    assert wrong


def test_memory_that_was_released_may_be_given_to_others(setting: Any) -> None:
    """Parts are released one by one while others allocate in between."""
    copier, ring, layout = setting
    for number in range(20):
        at = ring.slot_at(number) + 4096
        grads = gradients(number)
        copier.gradients.send(at, 0, layout, grads)
        del grads
        others = []
        while copier.in_flight.bytes:
            copier.in_flight.release(keep_bytes=copier.in_flight.bytes - 1)
            others += [torch.full(shape, -1.0, device="cuda:0") for shape in SHAPES]
        del others
        assert arrived(ring, at, layout) == expected(number)


def test_a_slot_is_committed_only_when_its_state_is_there(setting: Any) -> None:
    copier, ring, _ = setting
    state = torch.full((1 << 20,), 3.0, device="cuda:0")
    for ticket in range(10):
        state.fill_(float(ticket))
        at = ring.slot_at(ticket) + 4096
        copier.state.piece(at, state, 0, state.nbytes, stays=True)
        word = ring.slot_at(ticket) + SLOT_DEVICE_WORD_AT
        copier.commit(ticket)
        assert ring._get(word) != commit_word(ring.nonce, ticket)
        copier.state.wait_for_copy()
        copier.settle(intact=True)
        state.fill_(-1)
        while ring._get(word) != commit_word(ring.nonce, ticket):
            pass
        data = ring.memory.view[at : at + state.nbytes].cast("f")
        assert data[0] == data[-1] == float(ticket)


def test_device_memory_is_bounded(setting: Any) -> None:
    copier, ring, layout = setting
    copier.gradients.send(ring.slot_at(0) + 4096, 0, layout, gradients(0))
    copier.in_flight.release()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = gradients(1)
    held = sum(g.nbytes for g in grads)
    copier.gradients.send(ring.slot_at(1) + 4096, 0, layout, grads)
    copier.in_flight.release()
    del grads
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= held + (1 << 20)
    assert STAGING_BYTES <= 32 << 20
    assert torch.cuda.memory_allocated() == before
