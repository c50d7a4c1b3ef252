"""Every name that a store may give: none of them is looked up anywhere, imported or called."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import everystep
from everystep.errors import CorruptData, EverystepError, ModelMismatch
from everystep.format.slot import unpack_events

from .documents import Store
from .jobs import JOBS, train
from .visit import Imports

NAMES = (
    "os:system",
    "hostile_bait:run",
    "hostile_bait",
    "torch.optim.adamw:AdamW.step",
    "",
    "__main__:x",
)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("names") / "valid"
    train("plain", run)
    return run


@pytest.fixture
def imports() -> Iterator[Imports]:
    found = Imports()
    yield found
    found.end()


@pytest.fixture
def run(valid: Path, tmp_path: Path) -> Path:
    shutil.copytree(valid, tmp_path / "run")
    return tmp_path / "run"


def seal_all(run: Path, kind: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Into every document of a kind: an older base must not serve instead."""
    store = Store(run)
    for document in store.of(kind):
        change(document.tree)
        store.seal(document)


def comes_back(run: Path, imports: Imports, *, attach: bool) -> EverystepError | None:
    """What loading it or attaching to it says; nothing is imported for it."""
    made = JOBS["plain"]()
    imports.seen.clear()
    imports.on = True
    try:
        if attach:
            options = {**made.options, "on_failure": "raise"}
            everystep.attach(
                made.model, made.optimizer, run=run, state=made.state, **options
            ).close()
        else:
            everystep.restore(run, made.model, made.optimizer)
    except EverystepError as error:
        return error
    finally:
        imports.on = False
        assert imports.seen == []
    return None


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_class_of_an_optimizer_is_compared_and_never_looked_up(
    name: str, attach: bool, run: Path, imports: Imports
) -> None:
    seal_all(run, "base", lambda tree: tree["census"]["optimizers"][0].update(path=name))
    error = comes_back(run, imports, attach=attach)
    assert isinstance(error, ModelMismatch) and "AdamW" in str(error)


SPEC_NAMES: dict[str, Callable[[dict[str, Any], str], object]] = {
    "key": lambda tree, name: tree["census"]["optimizers"][0].update(key=name),
    "mode": lambda tree, name: tree["census"]["optimizers"][0].update(mode=name),
    "twins": lambda tree, name: tree["census"]["optimizers"][0].update(twins={"float32": name}),
    "exactness": lambda tree, name: tree["census"].update(exactness=name),
    "kind": lambda tree, name: tree["files"][0].update(kind=name),
    "dtype": lambda tree, name: tree["tensors"][0].update(dtype=name),
    "slot": lambda tree, name: tree["tensors"][-1].update(slot=f"{name}/x"),
}


@pytest.mark.parametrize("what", SPEC_NAMES)
def test_other_names_of_an_index_are_compared_and_never_looked_up(
    what: str, run: Path, imports: Imports
) -> None:
    kind = "part" if what in ("kind", "dtype", "slot") else "base"
    seal_all(run, kind, lambda tree: SPEC_NAMES[what](tree, "hostile_bait:run"))
    error = comes_back(run, imports, attach=False)
    assert error is not None or what == "twins", "what the script's own optimizer has counts"


@pytest.mark.parametrize("kind", ["hostile_bait:run", "lz4", "pickle", "call2", ""])
def test_a_codec_or_kind_of_event_is_one_of_those_there_are(kind: str) -> None:
    import msgspec
    import xxhash

    for event in ([kind, 4, 4, [4]], [kind, 0, b"", b"", 0, {}]):
        document = msgspec.msgpack.encode([event])
        with pytest.raises(CorruptData):
            unpack_events(document, xxhash.xxh3_64_intdigest(document))


def test_a_search_for_a_module_is_seen(imports: Imports) -> None:
    import importlib

    imports.on = True
    for look in (
        lambda: importlib.import_module("hostile_bait"),
        lambda: __import__("hostile_bait"),
    ):
        with pytest.raises(ImportError):
            look()
    assert imports.seen == ["import hostile_bait"] * 2
