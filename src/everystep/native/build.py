"""Compiles the twins beside this file: `python -m everystep.native.build`. Installing does the same:
setup.py runs this file by itself, so it imports nothing of the package.

`--sanitize TARGET` compiles them for a test instead: every read and write out of bounds, and all that C does
not define, ends the process with a report."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fopenmp")
# a fused multiply-add stands where the original has one, and nowhere else
ROUNDING = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g",
)


def build(target: Path = HERE / "_replay.so", more: Sequence[str] = ()) -> Path:
    compiler = shlex.split(os.environ.get("CC", "")) or _compilers()[:1]
    if not compiler:
        raise FileNotFoundError("build the twins: neither gcc nor clang was found")
    sources = map(str, sorted(HERE.glob("*.c")))
    command = [*compiler, *FLAGS, *ROUNDING, *more, "-o", str(target), *sources, "-lm"]
    subprocess.run(command, check=True)
    return target


def _compilers() -> list[str]:
    return [found for name in ("gcc", "clang") if (found := shutil.which(name))]


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            sys.stdout.write(f"{build()}\n")
        case ["--sanitize", target]:
            sys.stdout.write(f"{build(Path(target), SANITIZE)}\n")
        case words:
            sys.exit(f"build: {' '.join(words)}: expected nothing, or --sanitize TARGET")
