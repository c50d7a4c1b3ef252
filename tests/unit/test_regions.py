"""Regions of shards against the elements themselves: a tensor of numbers, cut as torch cuts it."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from everystep.core.regions import (
    Copy,
    Flat,
    Layout,
    Mesh,
    Placement,
    Ragged,
    Region,
    Split,
    Strided,
    covers,
    flat_regions,
    runs,
    shard_of,
    whole,
)

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(prod(shape)).reshape(shape)


def taken(shape: tuple[int, ...], regions: tuple[Region, ...]) -> list[int]:
    """The elements of some regions, in row-major order of the logical tensor."""
    found: list[int] = []
    for region in regions:
        where = tuple(slice(a, a + n) for a, n in zip(region.start, region.shape, strict=True))
        found += numbered(shape)[where].ravel().tolist()
    return sorted(found)


def mesh_of(shape: tuple[int, ...]) -> Mesh:
    return Mesh(tuple("abc"[: len(shape)]), shape, tuple(range(10, 10 + prod(shape))))


@st.composite
def layouts(draw: Any) -> tuple[tuple[int, ...], Layout, Mesh]:
    shape = draw(SHAPES)
    grid = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple))
    dims = st.integers(0, len(shape) - 1)
    kinds = st.one_of(
        st.builds(Split, dims), st.builds(Strided, dims, st.integers(1, 4)), st.just(Copy())
    )
    return shape, Layout(0, tuple(draw(kinds) for _ in grid)), mesh_of(grid)


def cut_by_torch(tensor: torch.Tensor, placement: Placement, at: int, ways: int) -> torch.Tensor:
    if isinstance(placement, Copy):
        return tensor
    assert isinstance(placement, Split | Strided)
    theirs = TorchShard(placement.dim)
    if isinstance(placement, Strided):
        theirs = _StridedShard(placement.dim, split_factor=placement.factor)
    return theirs._split_tensor(tensor, ways, with_padding=False, contiguous=False)[0][at]


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_shards_are_what_torch_cuts(case: tuple[tuple[int, ...], Layout, Mesh]) -> None:
    """Uneven, empty and strided ones too. `fully_shard` on top of another cut has a test below."""
    shape, layout, mesh = case
    cut = [p.dim for p in layout.placements if isinstance(p, Split | Strided)]
    assume(len(cut) == len(set(cut)) or not isinstance(layout.placements[0], Strided))
    for rank in mesh.ranks:
        local = torch.from_numpy(numbered(shape))
        at = mesh.coordinates(rank)
        for placement, place, ways in zip(layout.placements, at, mesh.shape, strict=True):
            local = cut_by_torch(local, placement, place, ways)
        shard = shard_of(7, shape, layout, mesh, rank)
        assert shard.atom == 7 and shard.local_shape == tuple(local.shape)
        elements = local.flatten().tolist()
        assert taken(shape, shard.regions) == sorted(elements)
        if all(isinstance(p, Split | Copy) for p in layout.placements):
            assert elements == sorted(elements) and len(shard.regions) <= 1


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_all_ranks_together_hold_every_element_once_for_each_copy(
    case: tuple[tuple[int, ...], Layout, Mesh],
) -> None:
    shape, layout, mesh = case
    shards = {rank: shard_of(0, shape, layout, mesh, rank) for rank in mesh.ranks}
    for rank, shard in shards.items():
        assert rank in shard.copies
        assert all(shards[other].regions == shard.regions for other in shard.copies)
    owners = {shard.copies: shard.regions for shard in shards.values()}
    assert covers([region for regions in owners.values() for region in regions], shape)


@pytest.mark.parametrize("rows", [1, 5, 6, 10, 13, 14])
@pytest.mark.parametrize("tp, dp", [(2, 2), (2, 3), (4, 2)])
def test_fsdp_over_tensor_parallel(rows: int, tp: int, dp: int) -> None:
    """`fully_shard` cuts what tensor parallel has left, and writes it down from left to right."""
    layout = Layout(0, (Strided(0, tp), Split(0)))
    mesh = mesh_of((dp, tp))
    chunks = [list(c) for c in torch.arange(rows).chunk(tp)] + [[]] * tp
    for rank, (at_dp, at_tp) in zip(mesh.ranks, product(range(dp), range(tp)), strict=True):
        assert mesh.coordinates(rank) == (at_dp, at_tp)
        left = torch.tensor(chunks[at_tp], dtype=torch.int64)
        pieces = [c.tolist() for c in left.chunk(dp)] if len(left) else []
        expected = pieces[at_dp] if at_dp < len(pieces) else []
        shard = shard_of(0, (rows,), layout, mesh, rank)
        assert taken((rows,), shard.regions) == expected


def test_pieces_that_do_not_touch_are_regions_of_their_own() -> None:
    shard = shard_of(0, (8, 3), Layout(0, (Strided(0, 2), Copy())), mesh_of((2, 2)), 10)
    assert shard.regions == (Region((0, 0), (2, 3)), Region((4, 0), (2, 3)))
    assert shard.local_shape == (4, 3) and shard.copies == (10, 11)


def test_ragged_pieces() -> None:
    layout, mesh = Layout(0, (Ragged(1, (3, 0, 2)),)), mesh_of((3,))
    regions = [shard_of(0, (2, 5), layout, mesh, rank).regions for rank in mesh.ranks]
    assert regions == [(Region((0, 0), (2, 3)),), (), (Region((0, 3), (2, 2)),)]


@given(SHAPES, st.data())
def test_flat_ranges(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    count = data.draw(st.integers(0, prod(shape) - start))
    regions = flat_regions(shape, start, count)
    assert taken(shape, regions) == list(range(start, start + count))
    assert len(regions) <= max(1, 2 * len(shape) - 1)


def test_flat_shards() -> None:
    layout, mesh = Layout(0, (Copy(), Flat((4, 0, 2)))), mesh_of((2, 3))
    shards = [shard_of(0, (2, 3), layout, mesh, rank) for rank in mesh.ranks]
    assert [taken((2, 3), s.regions) for s in shards] == [[0, 1, 2, 3], [], [4, 5]] * 2
    assert [s.local_shape for s in shards] == [(4,), (0,), (2,)] * 2
    assert shards[0].copies == (10, 13)


@given(st.sets(st.integers(0, 60)))
def test_runs(indices: set[int]) -> None:
    found = runs(sorted(indices))
    assert [n for start, length in found for n in range(start, start + length)] == sorted(indices)
    assert all(a + n < b for (a, n), (b, _) in pairwise(found))


def test_covers() -> None:
    assert covers(whole((2, 3)), (2, 3)) and covers(whole(()), ()) and covers((), (0, 5))
    halves = (Region((0, 0), (1, 3)), Region((1, 0), (1, 3)))
    assert covers(halves, (2, 3))
    assert not covers(halves[:1], (2, 3)), "half of it"
    assert not covers((halves[0], halves[0]), (2, 3)), "as many elements, but not all"
    assert not covers((Region((1, 0), (2, 3)),), (2, 3)), "outside"
    assert not covers((Region((0,), (6,)),), (2, 3)), "of another tensor"
