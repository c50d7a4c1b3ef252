"""What a number or a checksum in a document may be. Decoding refuses everything else."""

from __future__ import annotations

from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A step, a count, a size in bytes, a place in a list."""
Time = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
"""Seconds: since 1970, or of something that lasted."""
Digest = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
"""xxh3-128, in hexadecimal digits."""
Checksum = Annotated[str, msgspec.Meta(min_length=16, max_length=16)]
"""xxh3-64, in hexadecimal digits."""
