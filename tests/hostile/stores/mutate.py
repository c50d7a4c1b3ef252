"""Changes of a valid store, drawn from a seed: a value of any document, or what kind of file lies where."""

from __future__ import annotations

import contextlib
import os
import random
import reprlib
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostile.stores.compound import change_together
from hostile.stores.documents import NO_TEXT, Document, Inner, Store

_KINDS_WEIGHTS = {
    "run": 1,
    "manifest": 6,
    "base": 6,
    "part": 6,
    "tag": 3,
    "commit": 6,
    "session": 6,
    "tail": 6,
    "log": 8,
    "weights": 2,
    "slots": 2,
}
_FILES_SHARE = 0.2  # of all changes: of files, not of what they say
_TOGETHER_SHARE = 0.2  # of the others: several that agree with each other
_MORE = 0.3  # that another change follows
_LONG = 100_000
_DEEP = 3000
_PATH_MAX = 300  # characters: what lies deeper is not looked into


def change(store: Store, chance: random.Random, outside: Path) -> list[str]:
    """Change it; what was done, in words. `outside` is what nobody may touch."""
    told = []
    while not told or chance.random() < _MORE:
        if chance.random() < _FILES_SHARE:
            told.append(_change_file(store.root, chance, outside))
        elif chance.random() < _TOGETHER_SHARE:
            told.append(change_together(store, chance))
        else:
            told.append(_change_document(store, chance, outside))
    return told


# ---------------------------------------------------------------------- what documents say


def _change_document(store: Store, chance: random.Random, outside: Path) -> str:
    documents = [document for document in store.documents if document.is_there]
    if not documents:
        return "nothing is left to change"
    shares = [_KINDS_WEIGHTS[d.kind] / len(store.of(d.kind)) for d in documents]
    document = chance.choices(documents, shares)[0]
    places = list(_places(document))
    owner, key, path = chance.choice(places)
    old = owner[key]
    new = _hostile(chance, old, store, outside)
    if isinstance(key, int) and isinstance(owner, list) and chance.random() < 0.05:
        owner.insert(key, new)
    else:
        owner[key] = new
    words = f"{document.path.relative_to(store.root)}: {path}: {_short(old)} -> {_short(new)}"
    try:
        store.seal(document)
    except (UnicodeEncodeError, OverflowError, RecursionError, TypeError) as error:
        owner[key] = old  # no document can say this
        store.seal(document)
        return f"{words} (taken back: {type(error).__name__})"
    return words


def _places(document: Document) -> Iterator[tuple[Any, Any, str]]:
    """Every value of a document: what holds it, where, and its path. Documents inside bytes are looked into;
    a long list of small numbers counts as few."""
    holder = {"": document.tree}

    def walk(owner: Any, key: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
        yield owner, key, path
        value = owner[key]
        if len(path) > _PATH_MAX:
            return
        inner = value.tree if isinstance(value, Inner) else value
        if isinstance(value, Inner):
            yield from walk(value.__dict__, "tree", f"{path}<")
        elif isinstance(inner, dict):
            for name in inner:
                yield from walk(inner, name, f"{path}.{name}")
        elif isinstance(inner, list):
            step = max(1, len(inner) // 20)
            for i in range(0, len(inner), step):
                yield from walk(inner, i, f"{path}[{i}]")

    places = list(walk(holder, "", ""))
    yield from places[1:]


def _hostile(chance: random.Random, old: Any, store: Store, outside: Path) -> Any:
    """Mostly of the type that was there: another one is found at once."""
    if chance.random() < 0.15:
        old = chance.choice([0, "", b"", [], {}, None, 0.5, True])
    if chance.random() < 0.2:
        return _elsewhere(chance, store, type(old))
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return _number(chance, old)
    if isinstance(old, float):
        return chance.choice([float("nan"), float("inf"), -1.0, 0.0, 1e308, -1e-300, old * 1e9])
    if isinstance(old, str):
        return _text(chance, old, outside)
    if isinstance(old, bytes):
        return _bytes(chance, old)
    if isinstance(old, Inner):
        return chance.choice(
            [b"", Inner(_deep(chance)), Inner([]), Inner({}), b"\xc1", Inner(old.tree)]
        )
    if isinstance(old, list):
        return _list(chance, old)
    if isinstance(old, dict):
        return _dict(chance, old, outside)
    return chance.choice([0, -1, "x", [], {}, b"x", True])


def _number(chance: random.Random, old: int) -> int:
    near = [0, 1, -1, old + 1, old - 1, -old, 2 * old, old * 1000 + 7, old ^ 1]
    far = [2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**9]
    far += [10**9 - 1, 10**12 - 1, 10**12, 10**18 - 1]  # the largest in names, and behind them
    return chance.choice(near if chance.random() < 0.6 else far)


def _text(chance: random.Random, old: str, outside: Path) -> str:
    ways_out = [
        f"{outside}/bait",
        "../outside/bait",
        "../../outside/bait",
        "../" * 8 + "x",
        f"{outside}",
    ]
    ways_out += [f"{'../' * n}outside/bait" for n in range(3, 8)]
    code = [
        "torch.load",
        "load",
        "builtins:eval",
        "os:system",
        "os.system",
        "subprocess.Popen",
        "hostile_bait:run",
        "__class__",
    ]
    shows = [
        "\x1b[31mred\x1b[0m",
        "\x1b]0;title\x07",
        "[/red]",
        "[bold red]",
        "\x9b31m",
        "a\rb",
        "\u202eevil",
    ]
    odd = [
        "",
        ".",
        "..",
        "/",
        "\0",
        "\ud800",
        NO_TEXT,
        f"{old}{NO_TEXT}",
        "²",
        "latest",
        "0",
        "x" * _LONG,
        "~",
        "*",
        f"{old}\n",
        old * 2,
    ]
    dtypes = [
        "float32",
        "uint8",
        "complex128",
        "quint8",
        "bfloat16",
        "cuda:99",
        "meta",
        "tensor",
        "dict",
    ]
    return chance.choice(chance.choice([ways_out, code, shows, odd, dtypes]))


def _bytes(chance: random.Random, old: bytes) -> bytes:
    cut = chance.randrange(len(old) + 1)
    flipped = bytearray(old or b"\0")
    flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    made = [b"", old[:cut], old * 2, bytes(flipped), bytes(len(old)), b"\x91" * _LONG, b"\xff" * 64]
    made += [
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\x7f\xff\xff\xff",
        b"\x80\x04\x8c\x02os\x94.",
    ]  # sizes that lie, a pickle
    return chance.choice(made)


def _list(chance: random.Random, old: list[Any]) -> list[Any]:
    if not old or chance.random() < 0.2:
        return chance.choice([[], [[]], [None], [-1], ["x"], list(range(1000)), _deep(chance)])
    i = chance.randrange(len(old))
    return chance.choice(
        [
            old[:i] + old[i + 1 :],
            [*old, old[i]],
            old[::-1],
            old * 2,
            [old[i]] * 3000,
            [*old, None],
            [1] * 100 + old,
            old[:i],
        ]
    )


def _dict(chance: random.Random, old: dict[Any, Any], outside: Path) -> dict[Any, Any]:
    if not old or chance.random() < 0.2:
        return chance.choice(
            [{}, {"x": 1}, {"": None}, {"tensor": ["float32", [10**9], b"", "cpu"]}]
        )
    key = chance.choice(list(old))
    without = {k: v for k, v in old.items() if k != key}
    return chance.choice(
        [without, {**old, "unknown": 1}, {**without, _text(chance, str(key), outside): old[key]}]
    )


def _deep(chance: random.Random) -> Any:
    found: Any = []
    for _ in range(chance.choice([40, 200, _DEEP])):
        found = [found] if chance.random() < 0.9 else {"dict": [[0, found]]}
    return found


def _elsewhere(chance: random.Random, store: Store, kind: type) -> Any:
    """A value of the same type that stands somewhere else in the store."""
    document = chance.choice(store.documents)
    found = [o[k] for o, k, _ in _places(document) if type(o[k]) is kind]
    return chance.choice(found) if found else None


def _short(value: Any) -> str:
    return reprlib.repr(value.tree if isinstance(value, Inner) else value)[:60]


# ---------------------------------------------------------------------- files of another kind


def _change_file(root: Path, chance: random.Random, outside: Path) -> str:
    found = sorted(path for path in root.rglob("*") if not path.is_symlink())
    path = chance.choice(found) if found else root
    name, work = chance.choice([*_WAYS.items()])
    work(path, chance, outside)
    return f"{path.relative_to(root)}: {name}"


def _gone(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()


def _becomes(make: Callable[[Path], object]) -> Callable[[Path, random.Random, Path], None]:
    def work(path: Path, chance: random.Random, outside: Path) -> None:
        _gone(path)
        make(path)

    return work


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)  # its whole path may be longer than a socket's can be


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _link_to_bait(path: Path, chance: random.Random, outside: Path) -> None:
    folder = path.is_dir()
    _gone(path)
    path.symlink_to(outside / ("folder" if folder else "bait"))


def _link_to_copy(path: Path, chance: random.Random, outside: Path) -> None:
    """What lies outside is just what should lie here."""
    copy = outside / f"copy-{len(list(outside.iterdir()))}"
    path.rename(copy)
    path.symlink_to(copy)


def _linked_twice(path: Path, chance: random.Random, outside: Path) -> None:
    if path.is_file():
        os.link(path, outside / f"linked-{len(list(outside.iterdir()))}")


def _beside(path: Path, chance: random.Random, outside: Path) -> None:
    """More names, next to what is there."""
    folder = path if path.is_dir() else path.parent
    name = chance.choice(
        [
            "²",
            "000003",
            "999999",
            "999999999",
            "1000000000",
            "999999999999",
            "9" * 18,
            "1" + "0" * 18,
            "9" * 200,
            "1e3",
            "-1",
            "0",
            "..x",
            "latest.json",
            "\x1b[31m",
            "a\nb",
            "000000000009",
        ]
    )
    with_folder = chance.random() < 0.5
    target = folder / name
    if not target.exists():
        target.mkdir() if with_folder else target.write_bytes(b"x")
    temporary = folder / f".everystep-tmp-{path.name}"
    if not temporary.exists() and not temporary.is_symlink():
        temporary.symlink_to(outside / "bait")


def _cut(path: Path, chance: random.Random, outside: Path) -> None:
    if path.is_file():
        os.truncate(path, chance.randrange(path.stat().st_size + 1))


def _renumbered(path: Path, chance: random.Random, outside: Path) -> None:
    """A folder or segment under another number."""
    numbered = [p for p in (path, *path.parents) if p.name.isdigit()]
    if numbered:
        old = numbered[0]
        new = old.with_name(str(int(old.name) + chance.choice([1, 5, 10**5])).zfill(len(old.name)))
        if not new.exists():
            old.rename(new)


_WAYS: dict[str, Callable[[Path, random.Random, Path], None]] = {
    "a link to what lies outside": _link_to_bait,
    "moved outside, and a link to it": _link_to_copy,
    "linked from outside, too": _linked_twice,
    "a link to nothing": _becomes(lambda path: path.symlink_to("nowhere")),
    "a link to itself": _becomes(lambda path: path.symlink_to(path.name)),
    "a link without end": _becomes(lambda path: path.symlink_to("/dev/zero")),
    "a pipe": _becomes(os.mkfifo),
    "a socket": _becomes(_socket),
    "a folder": _becomes(lambda path: path.mkdir()),
    "an empty file": _becomes(lambda path: path.touch()),
    "a huge file": _becomes(_huge),
    "gone": _becomes(lambda path: None),
    "with others beside it": _beside,
    "cut": _cut,
    "under another number": _renumbered,
}
