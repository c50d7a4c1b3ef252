"""The digest kernel's own source as plain C, its threads one after the other: what it computes can be tested
without a GPU."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everystep.native.digests import KERNEL, KERNEL_RUNS

# a warp of one thread has nobody to exchange sums with
_CUDA = """
#define __device__
#define __global__
#define __grid_constant__
#define warpSize 1
#define __shfl_down_sync(mask, value, lane) 0
#define atomicAdd(target, value) (*(target) += (value))
typedef struct { unsigned x, y, z, w; } __attribute__((aligned(16))) uint4;
static struct { unsigned x; } blockIdx, threadIdx, blockDim;
#include "KERNEL"
void launch(const Runs *runs, int count, u64 *sums, unsigned blocks, unsigned threads) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) digest_runs(*runs, count, sums);
}
int runs_of_a_launch(void) { return RUNS; }
"""
COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


@functools.cache
def _compiled() -> Any:
    assert COMPILER is not None
    with tempfile.TemporaryDirectory() as place:
        source, library = Path(place) / "kernel.c", Path(place) / "kernel.so"
        source.write_text(_CUDA.replace("KERNEL", str(KERNEL)))
        options = ["-O1", "-w", "-fPIC", "-shared"]
        subprocess.run([COMPILER, *options, "-o", str(library), str(source)], check=True)
        loaded = ctypes.CDLL(str(library))
    assert loaded.runs_of_a_launch() == KERNEL_RUNS
    return loaded


def launch(rows: np.ndarray, pieces: int, sums: torch.Tensor) -> None:
    padded = np.zeros((KERNEL_RUNS, rows.shape[1]), np.uint64)
    padded[: len(rows)] = rows
    table, target = ctypes.c_void_p(padded.ctypes.data), ctypes.c_void_p(sums.data_ptr())
    _compiled().launch(table, len(rows), target, pieces, 256)
