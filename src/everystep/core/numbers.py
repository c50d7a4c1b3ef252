"""What a number or a checksum in a document may be. Decoding refuses everything else."""

from __future__ import annotations

from typing import Annotated

import msgspec

# names are made from these, and have to be found again: no run comes near, a billion terms or a step every
# microsecond for eleven days
TERM_MAX = 10**9 - 1
STEP_MAX = 10**12 - 1
RANK_MAX = 10**6 - 1
DIMENSIONS_MAX = 64  # of a tensor: torch's and numpy's own limit

Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A count, a size in bytes, a place in a list."""
Term = Annotated[int, msgspec.Meta(ge=0, le=TERM_MAX)]
Step = Annotated[int, msgspec.Meta(ge=0, le=STEP_MAX)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=RANK_MAX)]
"""Of a process of a job, as it was numbered at that attach. A job of one is rank 0."""
Shape = Annotated[tuple[Natural, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
Time = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
"""Seconds: since 1970, or of something that lasted."""
Digest = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
"""xxh3-128, in hexadecimal digits."""
Checksum = Annotated[str, msgspec.Meta(min_length=16, max_length=16)]
"""xxh3-64, in hexadecimal digits."""
