"""One name for a tensor, whatever wraps the module: the same with and without compile, DDP, PEFT…"""

from __future__ import annotations

from collections.abc import Iterator

import torch

# which child of a wrapper is the wrapped module itself; its name does not count
_TRANSPARENT = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}


def logical_names(model: torch.nn.Module) -> dict[str, str]:
    """Logical name of every parameter and buffer, by the name torch gives it."""
    names: dict[str, str] = {}
    for path, logical, module in _walk(model, "", ""):
        members = [*module._parameters.items(), *module._buffers.items()]
        for name, tensor in members:
            if tensor is not None:
                names[path + name] = logical + name
    return names


def walk(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module with the logical prefix of its tensors."""
    for _, logical, module in _walk(model, "", ""):
        yield logical, module


def _walk(
    module: torch.nn.Module, path: str, logical: str
) -> Iterator[tuple[str, str, torch.nn.Module]]:
    yield path, logical, module
    for name, child in module._modules.items():
        if child is not None:
            inner = logical if _is_transparent(module, name) else f"{logical}{name}."
            yield from _walk(child, f"{path}{name}.", inner)


def _is_transparent(module: torch.nn.Module, child: str) -> bool:
    kind = type(module)
    if _TRANSPARENT.get(kind.__name__) == child:
        return True
    if kind.__module__.startswith("peft."):  # PeftModel.base_model, tuner.model, layer.base_layer
        return child in ("base_model", "model", "base_layer", "original_module")
    return False
