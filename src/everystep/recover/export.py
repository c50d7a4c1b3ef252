"""A state as a file that other tools open: safetensors of the weights, or what `torch.save` writes for the
model's and the optimizer's `state_dict`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from everystep.core.dtypes import ELEMENT_TYPES
from everystep.core.events import GRADIENT
from everystep.core.tensors import Held
from everystep.errors import StepUnavailable, StoreError, UsageError
from everystep.format import values
from everystep.format.base import safetensors_header
from everystep.format.optimizer import OptimizerValues, decode_values
from everystep.recover.state import State
from everystep.replay.tensors import unpack, view_tensor
from everystep.store.disk.files import RunPath, sync_folder

Progress = Callable[[int, int], None]
_PIECE_BYTES = 16 << 20


def export_safetensors(state: State, path: Path, progress: Progress) -> int:
    """Weights under the model's own names; returns the bytes written. A tied weight is there once, its other
    names are metadata, as `safetensors.torch.save_model` does it and `load_model` expects it."""
    tensors = [(name, t) for name, _, t in _weights(state)]
    tensors.sort(
        key=lambda named: -ELEMENT_TYPES[named[1].dtype].bytes
    )  # keeps all of them aligned
    aliases = {alias: name for name, others, _ in _weights(state) for alias in others}
    header = safetensors_header(
        [(name, t.dtype, t.shape, len(t.data)) for name, t in tensors], aliases
    )
    total = len(header) + sum(len(t.data) for _, t in tensors)
    with _new_file(path, total, progress) as file:
        file.write(header)
        for _, tensor in tensors:
            for at in range(0, len(tensor.data), _PIECE_BYTES):
                file.write(tensor.data[at : at + _PIECE_BYTES])
    return path.stat().st_size


def export_torch(state: State, path: Path, progress: Progress, *, weights_only: bool) -> int:
    """{"step": n, "model": state_dict, "optimizer": state_dict}; several optimizers lie under their keys."""
    if state.weights_only and not weights_only:
        raise StepUnavailable(
            f"export step {state.step}: only its weights are kept, not its optimizer slots",
            hint="add --weights-only",
        )
    document: dict[str, Any] = {"step": state.step, "model": _model(state)}
    total = sum(len(t.data) for t in state.tensors() if not (t.slot and weights_only))
    if not weights_only:
        found = {spec.key: _optimizer(state, i) for i, spec in enumerate(state.census.optimizers)}
        document["optimizer"] = found[""] if set(found) == {""} else found
    with _new_file(path, total, progress) as file:
        torch.save(document, file)
    return path.stat().st_size


def _weights(state: State) -> Iterator[tuple[str, list[str], Held]]:
    """What the model's own state_dict holds: name, the other names of the same tensor, tensor."""
    stored = {state.name(t): t for t in state.tensors() if not t.slot}
    left_out = {*state.census.not_persistent, *(a.name for a in state.census.atoms if a.lossy)}
    for atom in state.census.atoms:
        names = [name for name in (atom.name, *atom.aliases) if name not in left_out]
        if names:
            yield names[0], names[1:], stored[atom.name]


def _model(state: State) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, aliases, stored in _weights(state):
        tensor = view_tensor(stored.data, stored.dtype, stored.shape)
        found |= dict.fromkeys((name, *aliases), tensor)
    return found


def _optimizer(state: State, index: int) -> dict[str, Any]:
    """As `Optimizer.state_dict` numbers it: parameters in the order of the groups."""
    spec = state.census.optimizers[index]
    number = {atom: i for i, atom in enumerate(spec.atoms)}
    slots: dict[int, dict[str, Any]] = {}
    for t in state.tensors():
        key, _, slot = t.slot.rpartition("/")
        if t.slot not in ("", GRADIENT) and key == spec.key:
            room = slots.setdefault(number[t.atom], {})
            room[slot] = view_tensor(t.data, t.dtype, t.shape)
    for atom, optimizer, encoded in state.session.values:
        if optimizer == index:
            slots.setdefault(number[atom], {}).update(values.decode_dict(encoded, unpack))
    encoded = state.session.groups[index]
    none = OptimizerValues([{} for _ in spec.groups])
    told = decode_values(encoded, unpack, len(spec.groups)) if encoded else none
    parameters = [[number[atom] for atom in group] for group in spec.groups]
    later: list[dict[str, Any]] = [
        {} for _ in parameters[len(told.groups) :]
    ]  # came after the seal
    return {
        "state": {i: slots[i] for i in sorted(slots)} | {k: value for _, k, value in told.state},
        "param_groups": [
            {**group, "params": own}
            for group, own in zip([*told.groups, *later], parameters, strict=True)
        ],
    }


class _Counting:
    """A file that tells how much of it is written."""

    def __init__(self, file: BinaryIO, total: int, progress: Progress) -> None:
        self._file, self._total, self._progress, self._done = file, total, progress, 0

    def write(self, data: Any) -> int:
        written = self._file.write(data)
        self._done += written
        self._progress(min(self._done, self._total), self._total)
        return written

    def flush(self) -> None:
        self._file.flush()


@contextmanager
def _new_file(path: Path, total: int, progress: Progress) -> Iterator[Any]:
    """Under its name only once it is whole and on the disk."""
    if path.exists():
        raise UsageError(
            f"export to {path}: it exists already", hint="give another --output, or remove it"
        )
    temporary = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        with temporary.open("xb") as file:
            yield _Counting(file, total, progress)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync_folder(RunPath(path.parent))
    except OSError as error:
        raise StoreError(
            f"export to {path}: {error.strerror}", hint="check the folder and its free space"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
