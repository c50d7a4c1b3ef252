"""Which elements of a logical tensor lie where when many ranks share it. A job of one has one region.

A placement cuts one dimension, or none. So it is enough to know for every dimension which of its indices a
rank has; what the rank holds are the products of their runs. Nothing here depends on how many elements there
are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, product
from math import prod

import msgspec

from everystep.core.numbers import Natural, Shape

Run = tuple[int, int]
"""Start and length along one dimension."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of a logical tensor."""

    start: Shape
    shape: Shape


class Mesh(msgspec.Struct, frozen=True):
    """Ranks on a grid; `ranks` in row-major order."""

    names: tuple[str, ...]
    shape: Shape
    ranks: tuple[Natural, ...]

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where a rank of it stands."""
        place, found = self.ranks.index(rank), []
        for size in reversed(self.shape):
            place, at = divmod(place, size)
            found.append(at)
        return tuple(reversed(found))


class Split(msgspec.Struct, frozen=True, tag="split"):
    """`dim` is cut as `torch.chunk` cuts it."""

    dim: Natural


class Strided(msgspec.Struct, frozen=True, tag="strided"):
    """`dim` is cut into `factor` pieces, and a rank has its chunk of each of them. Where later dimensions of
    the mesh make that many pieces, they cut first: so `fully_shard` cuts what tensor parallel has left."""

    dim: Natural
    factor: Natural


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    """Every rank has all of it."""


class Ragged(msgspec.Struct, frozen=True, tag="ragged"):
    """`dim` is cut into pieces of these sizes."""

    dim: Natural
    sizes: tuple[Natural, ...]


class Flat(msgspec.Struct, frozen=True, tag="flat"):
    """The elements in row-major order are cut into pieces of these sizes. Nothing else cuts the tensor."""

    sizes: tuple[Natural, ...]


Placement = Split | Strided | Copy | Ragged | Flat
_Placed = tuple[
    Placement, int, int
]  # a rank's place in a dimension of the mesh, and how many there are


class Layout(msgspec.Struct, frozen=True):
    """How a tensor lies on a mesh: a placement for each of the mesh's dimensions, applied in their order."""

    mesh: Natural  # its place in a list of meshes
    placements: tuple[Placement, ...]


class Shard(msgspec.Struct, frozen=True):
    """What one rank holds of an atom. `regions` are in row-major order; their elements fill a local tensor of
    `local_shape` as the logical tensor has them. `copies` are the ranks that hold the same."""

    atom: Natural
    regions: tuple[Region, ...]
    local_shape: Shape
    copies: tuple[Natural, ...]


class Part(msgspec.Struct, frozen=True):
    """What one rank sends: ranges of elements (atom, start, count) of its local tensors."""

    rank: Natural
    ranges: tuple[tuple[Natural, Natural, Natural], ...]


def whole(shape: Sequence[int]) -> tuple[Region, ...]:
    """All of a tensor, in one region."""
    return (Region((0,) * len(shape), tuple(shape)),)


def shard_of(atom: int, shape: Sequence[int], layout: Layout, mesh: Mesh, rank: int) -> Shard:
    """What a rank of the mesh holds of a tensor of this shape."""
    at = mesh.coordinates(rank)
    placed = list(zip(layout.placements, at, mesh.shape, strict=True))
    copies = tuple(other for other in mesh.ranks if _same_cut(mesh.coordinates(other), at, layout))
    flat = next(((p.sizes, place) for p, place, _ in placed if isinstance(p, Flat)), None)
    if flat is not None:
        sizes, place = flat
        regions = flat_regions(shape, sum(sizes[:place]), sizes[place])
        return Shard(atom, regions, (sizes[place],), copies)
    indices = [list(range(size)) for size in shape]
    for placement, place, ways in _in_order(placed):
        if not isinstance(placement, Copy | Flat):
            indices[placement.dim] = _cut(indices[placement.dim], placement, place, ways)
    return Shard(atom, product_of_runs(map(runs, indices)), tuple(map(len, indices)), copies)


def _same_cut(one: Sequence[int], other: Sequence[int], layout: Layout) -> bool:
    """Whether two ranks differ only where all have the same."""
    return all(
        a == b or isinstance(placement, Copy)
        for a, b, placement in zip(one, other, layout.placements, strict=True)
    )


def _in_order(placed: list[_Placed]) -> list[_Placed]:
    """The order in which a tensor is really cut; a strided placement behind its pieces is a plain one."""
    if not placed:
        return []
    (first, at, ways), behind = placed[0], placed[1:]
    if isinstance(first, Strided):
        pieces = prod(
            n for p, _, n in behind if not isinstance(p, Copy | Flat) and p.dim == first.dim
        )
        if pieces == first.factor:
            return [*_in_order(behind), (Split(first.dim), at, ways)]
    return [placed[0], *_in_order(behind)]


def _cut(indices: list[int], placement: Split | Strided | Ragged, at: int, ways: int) -> list[int]:
    if isinstance(placement, Ragged):
        begin = sum(placement.sizes[:at])
        return indices[begin : begin + placement.sizes[at]]
    if isinstance(placement, Split):
        return chunk(indices, at, ways)
    pieces = (chunk(indices, n, placement.factor) for n in range(placement.factor))
    return [index for piece in pieces for index in chunk(piece, at, ways)]


def chunk(indices: list[int], at: int, ways: int) -> list[int]:
    """As `torch.chunk` cuts: all pieces have one size but the last ones, which may be smaller or empty."""
    size = -(-len(indices) // ways)
    return indices[at * size : (at + 1) * size]


def runs(indices: Iterable[int]) -> list[Run]:
    """Rising indices as stretches without a gap."""
    # within a stretch the distance between an index and its place stays the same
    stretches = groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0])
    found = [[index for _, index in stretch] for _, stretch in stretches]
    return [(stretch[0], len(stretch)) for stretch in found]


def product_of_runs(dimensions: Iterable[list[Run]]) -> tuple[Region, ...]:
    """One region for every choice of a run in each dimension; none if a dimension has none."""
    return tuple(
        Region(tuple(start for start, _ in chosen), tuple(length for _, length in chosen))
        for chosen in product(*dimensions)
    )


def flat_regions(shape: Sequence[int], start: int, count: int) -> tuple[Region, ...]:
    """A range of elements in row-major order as rectangles: at most two for every dimension, less one."""
    if not count:
        return ()
    if not shape:
        return (Region((), ()),)
    row = prod(shape[1:])
    first, last = start // row, (start + count) // row  # `last` is not whole
    begin, end = start % row, (start + count) % row
    if first == last:
        return _in_row(shape, first, begin, count)
    found: list[Region] = []
    if begin:
        found += _in_row(shape, first, begin, row - begin)
        first += 1
    if first < last:
        rest = tuple(shape[1:])
        found.append(Region((first, *(0 for _ in rest)), (last - first, *rest)))
    return (*found, *(_in_row(shape, last, 0, end) if end else ()))


def _in_row(shape: Sequence[int], at: int, start: int, count: int) -> tuple[Region, ...]:
    return tuple(
        Region((at, *inner.start), (1, *inner.shape))
        for inner in flat_regions(shape[1:], start, count)
    )


def covers(regions: Iterable[Region], shape: Sequence[int]) -> bool:
    """Whether these regions are the whole tensor, each element in one of them."""
    held = list(regions)
    inside = all(
        len(r.start) == len(r.shape) == len(shape)
        and all(a + n <= size for a, n, size in zip(r.start, r.shape, shape, strict=True))
        for r in held
    )
    return inside and sum(prod(r.shape) for r in held) == prod(shape) and _apart(held)


def _apart(regions: list[Region]) -> bool:
    filled = [r for r in regions if prod(r.shape)]
    return not any(_meet(a, b) for n, a in enumerate(filled) for b in filled[:n])


def _meet(one: Region, other: Region) -> bool:
    sides = zip(one.start, one.shape, other.start, other.shape, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in sides)
