"""Compiles a CUDA kernel at run time, with the compiler that every torch for CUDA brings along (NVRTC).

`torch.cuda._compile_kernel` does the same, but asks for the headers of a CUDA toolkit, which many machines
do not have."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_pointer = ctypes.c_void_p


class Kernel:
    """Owned by whoever compiled it: code that is loaded on one device."""

    def __init__(self, source: Path, name: str, device: torch.device) -> None:
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # the device's context exists, and is this thread's
            image = _compile(source, torch.cuda.get_device_capability(device))
            module, self._function = _pointer(), _pointer()
            self._call("cuModuleLoadData", ctypes.byref(module), image)
            self._call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())

    def launch(self, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        """Queue it on the current stream. Arguments are of ctypes; a structure goes by value."""
        addresses = (_pointer * len(arguments))(*map(ctypes.addressof, arguments))
        with torch.cuda.device(self._device):
            stream = _pointer(torch.cuda.current_stream(self._device).cuda_stream)
            sizes = (blocks, 1, 1, threads, 1, 1, 0)
            self._call("cuLaunchKernel", self._function, *sizes, stream, addresses, None)

    def _call(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._driver, function)(*arguments):
            raise RuntimeError(f"{function} on {self._device}: error {code}")


def _compile(source: Path, capability: tuple[int, int]) -> bytes:
    nvrtc = _nvrtc()
    program, size = _pointer(), ctypes.c_size_t()
    text, name = source.read_bytes(), source.name.encode()

    def call(function: str, *arguments: Any) -> int:
        return int(getattr(nvrtc, function)(*arguments))

    if code := call("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None):
        raise RuntimeError(f"nvrtcCreateProgram of {source.name}: error {code}")
    try:
        options = [
            b"--gpu-architecture=sm_%d%d" % capability,
            b"--include-path=" + bytes(source.parent),
        ]
        if call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * 2)(*options)):
            call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
            said = ctypes.create_string_buffer(size.value + 1)
            call("nvrtcGetProgramLog", program, said)
            raise RuntimeError(f"compile {source.name}: {said.value.decode(errors='replace')}")
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, image)
        return image.raw
    finally:
        call("nvrtcDestroyProgram", ctypes.byref(program))


def _nvrtc() -> ctypes.CDLL:
    """It is often found nowhere but through the library by which torch itself reaches it."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError:
        return ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libcaffe2_nvrtc.so"))
