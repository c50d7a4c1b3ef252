"""Taking stock of models and optimizers: which tensors there are, their names, who moves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import msgspec
import torch
from torch.nn.parameter import is_lazy

from everystep.capture.groups import GroupValues
from everystep.capture.names import logical_names, walk
from everystep.capture.refusals import check_atom, check_optimizers, named
from everystep.capture.watching.state_stamp import check_slots
from everystep.compression.compressor import residuals_of
from everystep.core.census import (
    Atom,
    Census,
    Exactness,
    Mode,
    OptimizerSpec,
    agree_on_modes,
)
from everystep.errors import UsageError
from everystep.replay.choose import choose
from everystep.replay.optimizers import class_path, mode_of
from everystep.replay.slots import split
from everystep.replay.tensors import dtype_name, is_resolved, why_not_stored
from everystep.unwrap import by_key, check_given

_SWITCHES = (
    "fused",
    "foreach",
    "capturable",
    "differentiable",
    "amsgrad",
    "maximize",
    "nesterov",
    "momentum",
    "weight_decay",
    "decoupled_weight_decay",
)
Models = torch.nn.Module | Mapping[str, torch.nn.Module]
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
kind = attrgetter("dtype", "shape")
kind_of_gradient = attrgetter("layout", "dtype", "shape")  # (strided, *kind) if it can be logged


class LiveSlots(NamedTuple):
    """What an optimizer holds of one atom."""

    tensors: dict[str, torch.Tensor]
    others: dict[Any, Any]
    is_empty: bool  # there is a state, and nothing in it


@dataclass
class LiveCensus:
    """The census and the live objects it describes, in the same order. Owned by the training thread."""

    census: Census
    tensors: list[torch.Tensor]
    optimizers: list[torch.optim.Optimizer]
    homes: dict[int, tuple[torch.nn.Module, str]]  # the attribute that each atom is
    models: tuple[torch.nn.Module, ...] = ()
    powers: dict[float, bytes] = field(default_factory=dict)  # what fused twins need of the device

    def __post_init__(self) -> None:
        self.groups_of = [_numbers(spec.groups) for spec in self.census.optimizers]
        self.kinds = list(map(kind, self.tensors))
        pairs = zip(self.census.optimizers, self.optimizers, strict=True)
        self.group_values = [GroupValues(optimizer, spec.key) for spec, optimizer in pairs]
        self._forms = self._group_forms()
        in_order = [atom for spec in self.census.optimizers for atom in spec.atoms]
        self._moved = [self.tensors[atom] for atom in in_order]
        moved = set(in_order)
        self.in_no_optimizer = tuple(a for a in self.census.parameters if a not in moved)
        self._unmoved = {atom: self.homes[atom] for atom in self.homes.keys() - moved}
        homes = [(*self.homes[atom], self.tensors[atom]) for atom in self.homes.keys() & moved]
        self._homes_of_moved = [module._parameters for module, *_ in homes]
        self._names_of_moved = [name for _, name, _ in homes]
        self._at_home = [tensor for *_, tensor in homes]

    @property
    def keyed(self) -> dict[str, torch.optim.Optimizer]:
        return {s.key: o for s, o in zip(self.census.optimizers, self.optimizers, strict=True)}

    @property
    def unmoved_bytes(self) -> int:
        """Of gradients that parameters in no optimizer may have."""
        unmoved = (atom for atom in self.in_no_optimizer if self.tensors[atom].requires_grad)
        return sum(self.census.atoms[atom].bytes for atom in unmoved)

    def follow(self) -> bool:
        """Look where `module.name = tensor` put new tensors; True if the census is no longer true."""
        if not all(
            map(is_, map(dict.get, self._homes_of_moved, self._names_of_moved), self._at_home)
        ):
            return True  # a new Parameter: whoever holds the old one records what nobody trains
        for atom, (module, name) in self._unmoved.items():
            now = module._buffers.get(name, module._parameters.get(name))
            if now is self.tensors[atom]:
                continue
            if now is None or why_not_stored(now) or not is_resolved(now):
                return True
            if kind(now) != kind(self.tensors[atom]):
                return True
            self.tensors[atom] = now
        return False

    def groups_have_grown(self) -> bool:
        """True after `add_param_group`, where a group has another parameter now, or where steps are computed
        in another way from now on."""
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers)
        now = chain.from_iterable(map(itemgetter("params"), groups))
        return self._group_forms() != self._forms or not all(map(is_, now, self._moved))

    def _group_forms(self) -> list[list[tuple[object, ...]]]:
        """How many parameters each group has, and which code steps them: a twin was chosen for it."""
        return [[_form(group) for group in o.param_groups] for o in self.optimizers]

    def has_grown(self) -> bool:
        """True once `add_param_group`, or a tensor of another shape or type, made the census untrue."""
        return self.groups_have_grown() or list(map(kind, self.tensors)) != self.kinds

    def state_of(self, optimizer: int, atom: int) -> dict[str, Any]:
        """An optimizer's live state of one atom; empty while there is none."""
        return dict(self.optimizers[optimizer].state.get(self.tensors[atom], {}))

    def slots_of(self, optimizer: int, atom: int) -> LiveSlots:
        """The same, by the way its parts travel."""
        owner, parameter = self.optimizers[optimizer], self.tensors[atom]
        if parameter not in owner.state:
            return LiveSlots({}, {}, False)
        state = owner.state[parameter]
        check_slots(state, self.where(optimizer, atom))
        number = self.groups_of[optimizer][atom]
        tensors, others = split(owner, owner.param_groups[number], parameter, state)
        return LiveSlots(tensors, others, not state)

    def where(self, optimizer: int, atom: int) -> str:
        """How a message names the state of an atom."""
        key, name = self.census.optimizers[optimizer].key, self.census.atoms[atom].name
        return f"optimizer[{key!r}].state[{name!r}]"


def _numbers(groups: tuple[tuple[int, ...], ...]) -> dict[int, int]:
    return {atom: number for number, group in enumerate(groups) for atom in group}


def _form(group: dict[str, Any]) -> tuple[object, ...]:
    return (len(group["params"]), *map(_switch, map(group.get, _SWITCHES)))


def _switch(value: object) -> object:
    return bool(value) if isinstance(value, int | float) else type(value)


def take_census(models: Models, optimizers: Optimizers, *, log: bool = True) -> LiveCensus:
    """`Tuning(log=False)`: no optimizer's steps are logged, state is sent instead."""
    models, optimizers = by_key(models), by_key(optimizers)
    check_given(optimizers)
    atoms, tensors = _atoms(models)
    atom_of = {id(t): i for i, t in enumerate(tensors)}
    given = named(optimizers, "optimizer", torch.optim.Optimizer)
    _add_residuals(atoms, tensors, atom_of)
    own = [_optimizer_spec(key, live, atom_of, log) for key, live in given.items()]
    own, powers = _with_twins(own, list(given.values()))
    specs = agree_on_modes(own)
    exactness, why = _exactness(specs, tensors)
    census = Census(tuple(atoms), tuple(specs), exactness, why, _not_persistent(models))
    homes = _homes(models, atom_of)
    modules = tuple(named(models, "model", torch.nn.Module).values())
    live = LiveCensus(census, tensors, list(given.values()), homes, modules, powers)
    check_optimizers(live)
    return live


def _atoms(models: Models) -> tuple[list[Atom], list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    names: list[list[str]] = []
    seen: dict[int, int] = {}
    buffers: list[bool] = []
    for key, model in named(models, "model", torch.nn.Module).items():
        logical = logical_names(model)
        prefix = f"{key}." if key else ""
        # Module's own methods: wrappers override them and give other names
        for is_buffer, found in (
            (False, torch.nn.Module.named_parameters(model, remove_duplicate=False)),
            (True, torch.nn.Module.named_buffers(model, remove_duplicate=False)),
        ):
            for path, tensor in found:
                name = prefix + logical[path]
                check_atom(name, tensor, buffer=is_buffer)
                if id(tensor) in seen:
                    names[seen[id(tensor)]].append(name)
                    continue
                seen[id(tensor)] = len(tensors)
                tensors.append(tensor)
                names.append([name])
                buffers.append(is_buffer)
    _refuse_collisions(names)
    atoms = [
        Atom(n[0], dtype_name(t, n[0]), tuple(t.shape), buffer, tuple(dict.fromkeys(n[1:])))
        for n, t, buffer in zip(names, tensors, buffers, strict=True)
    ]
    return atoms, tensors


def _add_residuals(atoms: list[Atom], tensors: list[torch.Tensor], atom_of: dict[int, int]) -> None:
    """The residuals of compression with feedback are state too, one tensor for each parameter."""
    for parameter, residual in residuals_of(list(tensors)).items():
        owner = atoms[atom_of[id(parameter)]]
        name = f"{owner.name}.residual"
        atoms.append(Atom(name, owner.dtype, owner.shape, buffer=True, lossy=True))
        tensors.append(residual)


def _homes(models: Models, atom_of: dict[int, int]) -> dict[int, tuple[torch.nn.Module, str]]:
    return {
        atom_of[id(tensor)]: (module, name)
        for model in named(models, "model", torch.nn.Module).values()
        for module in model.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


def _not_persistent(models: Models) -> tuple[str, ...]:
    return tuple(
        (f"{key}." if key else "") + logical + name
        for key, model in named(models, "model", torch.nn.Module).items()
        for logical, module in walk(model)
        for name in sorted(module._non_persistent_buffers_set)
    )


def _refuse_collisions(names: list[list[str]]) -> None:
    owner: dict[str, int] = {}
    for i, own in enumerate(names):
        for name in own:
            if owner.setdefault(name, i) != i:
                raise UsageError(f"attach: two different tensors are named {name!r}")


def _optimizer_spec(
    key: str, optimizer: torch.optim.Optimizer, atom_of: dict[int, int], log: bool
) -> OptimizerSpec:
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in atom_of:
                shape = "not yet known" if is_lazy(parameter) else list(parameter.shape)
                raise UsageError(
                    f"attach: optimizer {key or type(optimizer).__name__!r}, group {number}: a parameter "
                    f"of shape {shape} belongs to no given model",
                    hint="give every model whose parameters are optimized: "
                    'attach({"net": net, "head": head}, ...)',
                )
        groups.append(tuple(atom_of[id(p)] for p in group["params"]))
    if not any(groups):
        raise UsageError(f"attach: optimizer {key or type(optimizer).__name__!r} has no parameters")
    path = class_path(optimizer)
    mode, why = (
        mode_of(path) if log else (Mode.STATE, "Tuning(log=False): its state is sent as it is")
    )
    return OptimizerSpec(key, path, mode, tuple(groups), why)


def _with_twins(
    specs: list[OptimizerSpec], optimizers: list[torch.optim.Optimizer]
) -> tuple[list[OptimizerSpec], dict[float, bytes]]:
    """Let each optimizer that the shadow replays have the twin that gives its bits, if there is one."""
    powers: dict[float, bytes] = {}
    for index, (spec, optimizer) in enumerate(zip(specs, optimizers, strict=True)):
        if spec.mode is Mode.REPLAY:
            choice = choose(optimizer)
            specs[index] = msgspec.structs.replace(spec, twins=choice.twins, why=choice.why)
            powers |= choice.powers
            if not choice.twins and any(map(_is_turned, _parameters(optimizer))):
                why = (
                    "torch's rounding depends on how a tensor lies in memory, and the shadow's copies lie "
                    "row by row: your optimizer replays at recovery"
                )
                specs[index] = msgspec.structs.replace(spec, mode=Mode.LOG, why=why)
    return specs, powers


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _is_turned(parameter: torch.Tensor) -> bool:
    return parameter.device.type == "cpu" and not parameter.is_contiguous()


def _exactness(specs: list[OptimizerSpec], tensors: list[torch.Tensor]) -> tuple[Exactness, str]:
    replayed = {a for s in specs if s.mode is Mode.REPLAY and not s.twins for a in s.atoms}
    if any(tensors[a].device.type != "cpu" for a in replayed):
        why = next(s.why for s in specs if s.mode is Mode.REPLAY and not s.twins)
        return "bounded", f"steps are replayed on the CPU: {why}"
    return "exact", "every step is replayed bit for bit"
