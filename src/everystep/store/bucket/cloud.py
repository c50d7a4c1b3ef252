"""A bucket on a server, through obstore; with bounds on how long it is waited for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import from_url

from everystep.errors import CorruptData

_CHUNK_BYTES = 8 << 20  # S3 wants at least 5 MiB
_PARALLEL = 4
_DELETED_AT_ONCE = 500
# a request is tried again within these bounds; then the caller hears of it, and tries later by itself
_RETRIES = 4
_RETRY_SECONDS = 20.0
_REQUEST_SECONDS = 120.0
_CONNECT_SECONDS = 5.0


class CloudBucket:
    """May be used by several threads."""

    failures: tuple[type[Exception], ...] = (BaseError,)  # what its library raises
    denied: tuple[type[Exception], ...] = (PermissionDeniedError, UnauthenticatedError)

    def __init__(self, url: str) -> None:
        self._store: Any = from_url(url, **_bounds())

    def listing(self, below: str) -> dict[str, int]:
        chunks = obstore.list(self._store, prefix=below or None)
        return {item["path"]: item["size"] for chunk in chunks for item in chunk}

    def read(self, path: str, most: int) -> bytes | None:
        try:
            found = obstore.get(self._store, path)
        except FileNotFoundError:
            return None
        size = found.meta["size"]
        if size > most:
            raise CorruptData(f"read {path}: {size} bytes, expected at most {most}")
        return bytes(found.bytes())

    def read_part(self, path: str, start: int, end: int) -> memoryview:
        try:
            return memoryview(obstore.get_range(self._store, path, start=start, end=end))
        except FileNotFoundError:
            raise
        except (
            BaseError
        ):  # some servers refuse a range that goes too far, others send what there is
            if obstore.head(self._store, path)["size"] >= end:
                raise
            return memoryview(b"")

    def create(self, path: str, data: bytes) -> bool:
        try:
            obstore.put(self._store, path, data, mode="create")
        except AlreadyExistsError:
            return False
        return True

    def put(self, path: str, data: bytes | memoryview) -> None:
        obstore.put(self._store, path, data, use_multipart=False)

    def put_parts(self, path: str, parts: Iterator[memoryview]) -> None:
        obstore.put(self._store, path, parts, chunk_size=_CHUNK_BYTES, max_concurrency=_PARALLEL)

    def delete(self, paths: Iterable[str]) -> None:
        todo = list(paths)
        for i in range(0, len(todo), _DELETED_AT_ONCE):
            try:
                obstore.delete(self._store, todo[i : i + _DELETED_AT_ONCE])
            except FileNotFoundError:
                for path in todo[i : i + _DELETED_AT_ONCE]:
                    self._delete_one(path)

    def _delete_one(self, path: str) -> None:
        try:
            obstore.delete(self._store, path)
        except FileNotFoundError:
            return


def _bounds() -> dict[str, Any]:
    return {
        "client_options": {
            "timeout": timedelta(seconds=_REQUEST_SECONDS),
            "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
            "allow_http": _plain_http_is_meant(),
        },
        "retry_config": {
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
        },
    }


def _plain_http_is_meant() -> bool:
    """Options given in code hide what the environment says of them."""
    asked = [v for k, v in os.environ.items() if k.upper().endswith("_ALLOW_HTTP")]
    return any(value.lower() in ("1", "true") for value in asked)
