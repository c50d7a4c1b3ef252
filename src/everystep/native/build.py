"""Compiles the twins beside this file: `python -m everystep.native.build`. Installing does the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fopenmp")
# a fused multiply-add stands where the original has one, and nowhere else
ROUNDING = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")


def build(target: Path = HERE / "_replay.so") -> Path:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("build the twins: neither gcc nor clang was found")
    sources = map(str, sorted(HERE.glob("*.c")))
    command = [compiler, *FLAGS, *ROUNDING, "-o", str(target), *sources, "-lm"]
    subprocess.run(command, check=True)
    return target


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
