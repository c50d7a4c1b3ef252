"""The objects of a run's terms, by the paths that their files have in a directory.

Two hosts that know nothing of each other may claim the same number. So an object's name has more than the
number, as terms/000002-1f0c95ad/bases/…: the first letters of the token of its term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from everystep.errors import StoreError
from everystep.format.commit import Commit
from everystep.store import layout
from everystep.store.bucket.client import Bucket
from everystep.store.runs import read_manifest

_TOKEN_LETTERS = 8


class Objects:
    """Of the terms whose token `token_of` tells. May be used by several threads."""

    def __init__(self, bucket: Bucket, token_of: Callable[[int], str]) -> None:
        self._bucket, self._token_of = bucket, token_of
        self.url = bucket.url

    @classmethod
    def of_commit(cls, bucket: Bucket, commit: Commit) -> Objects:
        """As the bucket's newest commit names them."""
        tokens = {m.term: m.token for m in commit.manifests}
        return cls(bucket, lambda term: tokens.get(term, ""))

    @classmethod
    def of_directory(cls, bucket: Bucket, run: Path) -> Objects:
        """As the directory's own files are shipped."""
        return cls(bucket, lambda term: _token_in(run, term))

    def listing(self) -> dict[str, int]:
        """Every object and its size."""
        return dict(self._split(self._bucket.listing("terms"))[0])

    def others(self) -> dict[str, int]:
        """Objects of other terms of the same numbers, by name, and the numbers."""
        return {
            name: number
            for name in self._split(self._bucket.listing("terms"))[1]
            if (number := layout.number_of(name.split("/")[1].partition("-")[0])) is not None
        }

    def _split(self, found: dict[str, int]) -> tuple[list[tuple[str, int]], list[str]]:
        ours, others = [], []
        folders: dict[str, str | None] = {}
        for name, size in found.items():
            _, folder, *rest = name.split("/")
            if folder not in folders:
                folders[folder] = self._plain(folder)
            plain = folders[folder]
            if plain is None or not rest:
                others.append(name)
            else:
                ours.append(("/".join(("terms", plain, *rest)), size))
        return ours, others

    def _plain(self, folder: str) -> str | None:
        """What the folder of a term is called in a directory; None: it is another term's."""
        plain = folder.partition("-")[0]
        number = layout.number_of(plain)
        return plain if number is not None and folder == self._folder(plain, number) else None

    def _folder(self, plain: str, number: int) -> str:
        token = self._token_of(number)[:_TOKEN_LETTERS]
        return f"{plain}-{token}" if token else plain

    def _name(self, path: str) -> str:
        terms, plain, rest = path.split("/", 2)
        number = layout.number_of(plain)
        if number is None:
            raise StoreError(f"name the object of {path}: its term has no number")
        return f"{terms}/{self._folder(plain, number)}/{rest}"

    def read(self, path: str) -> bytes | None:
        return self._bucket.read(self._name(path))

    def read_part(self, path: str, start: int, end: int) -> memoryview:
        return self._bucket.read_part(self._name(path), start, end)

    def put(self, path: str, data: bytes | memoryview) -> None:
        self._bucket.put(self._name(path), data)

    def put_parts(self, path: str, parts: Iterator[memoryview]) -> None:
        self._bucket.put_parts(self._name(path), parts)

    def delete(self, paths: Iterable[str]) -> None:
        self._bucket.delete(map(self._name, paths))


def _token_in(run: Path, term: int) -> str:
    """Of a term that has no manifest nothing counts."""
    manifest = read_manifest(run, term)
    return manifest.token if manifest else ""
