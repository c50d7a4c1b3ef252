"""What is published: a wheel for every Python 3 with the C library in it, and sources that build it again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import everystep

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src/everystep/native"
C_SOURCES = {path.name for path in NATIVE.iterdir() if path.suffix in (".c", ".cu", ".h")}
LOAD = """
import sys
from everystep import native
print(native.__file__, native.library(), native.missing())
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, packed from a copy: what a checkout has built does not count."""
    copy, target = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("sources")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=unwanted)
    (copy / "src/everystep/native/_replay.so").write_bytes(b"of the checkout")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return call("build_sdist", copy, target)


def run(*words: str | Path, **options: Any) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def call(hook: str, folder: Path, target: Path, **variables: str) -> Path:
    """Have what setuptools calls a hook write a file into `target`, as pip and build do."""
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(target)!r}))"
    name = run("-c", code, cwd=folder, env={**os.environ, **variables}).split()[-1]
    return target / name


def load_from(wheel: Path, target: Path, **variables: str) -> str:
    """What a Python says that has this wheel and no other everystep."""
    zipfile.ZipFile(wheel).extractall(target)
    told = run("-c", LOAD, cwd=target, env={**os.environ, "PYTHONPATH": str(target), **variables})
    assert str(target) in told
    return told


def test_the_version_stands_in_one_place() -> None:
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


def test_sources_hold_what_a_build_needs_and_nothing_built(sources: Path) -> None:
    with tarfile.open(sources) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    assert {f"src/everystep/native/{name}" for name in C_SOURCES} <= held
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "src/everystep/py.typed"} <= held
    assert not [name for name in held if name.endswith((".so", ".o", ".pyc"))]


def test_one_wheel_serves_every_python(sources: Path, tmp_path: Path) -> None:
    command = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    run(*command, "--wheel-dir", tmp_path / "wheel", sources)
    (wheel,) = (tmp_path / "wheel").iterdir()
    system, machine = os.uname().sysname.lower(), os.uname().machine
    assert wheel.name == f"everystep-{everystep.__version__}-py3-none-{system}_{machine}.whl"
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {f"everystep/native/{name}" for name in (*C_SOURCES, "_replay.so")} <= held
    assert "everystep/py.typed" in held
    assert not [name for name in held if not name.startswith("everystep")]
    # Where there is no OpenMP, because there is no gcc, torch's is taken.
    (tmp_path / "libgomp.so.1").touch()
    for hidden in ("", str(tmp_path)):
        told = load_from(wheel, tmp_path / "site", LD_LIBRARY_PATH=hidden)
        assert "/site/everystep/native/_replay.so" in told and told.endswith(" None\n")


def test_without_a_compiler_it_installs_and_says_what_is_missing(
    sources: Path, tmp_path: Path
) -> None:
    with tarfile.open(sources) as packed:
        packed.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    wheel = call("build_wheel", unpacked, tmp_path, PATH=str(tmp_path / "empty"), CC="")
    assert wheel.name.endswith("-py3-none-any.whl")
    told = load_from(wheel, tmp_path / "site")
    assert "the twins were not compiled" in told and "install gcc or clang" in told
    (tmp_path / "site/everystep/native/_replay.so").touch()  # nor is one that does not load an end
    assert "cannot be loaded" in load_from(wheel, tmp_path / "site")
