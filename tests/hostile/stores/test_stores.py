"""Hostile stores from fixed seeds, visited; `make hostile` draws many."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from store.small_store import build

from hostile.stores.documents import Store
from hostile.stores.mutate import change

ROOT = Path(__file__).resolve().parents[3]
STORES = os.environ.get("EVERYSTEP_HOSTILE", "30")


def test_drawn_stores_harm_nobody() -> None:
    words = [sys.executable, "-m", "tests.hostile.stores", "--n", STORES, "--seed", "1"]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=220)
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    build(tmp_path / "run", 200)
    return tmp_path / "run"


def test_a_store_is_sealed_as_it_was(valid: Path) -> None:
    """What nobody changed is written back in every byte, digests included."""
    before = {path: path.read_bytes() for path in valid.rglob("*") if path.is_file()}
    store = Store(valid)
    assert {document.kind for document in store.documents} >= {
        "run",
        "manifest",
        "base",
        "part",
        "session",
    }
    for document in store.documents:
        store.seal(document)
    assert {path: path.read_bytes() for path in before} == before


def test_changes_are_a_function_of_the_seed(valid: Path, tmp_path: Path) -> None:
    told = []
    for name in ("a", "b"):
        home = tmp_path / name
        (home / "outside").mkdir(parents=True)
        shutil.copytree(valid, home / "run")
        chance, words, store = random.Random(7), [], Store(home / "run")
        for _ in range(30):
            words += change(store, chance, home / "outside")
        told.append([line.replace(str(home), "") for line in words])
    assert told[0] == told[1]
