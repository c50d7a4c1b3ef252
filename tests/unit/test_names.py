"""An atom has one name, whatever wraps its module; and a user's own words are never taken away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel

from everystep.capture.census import take_census
from everystep.errors import UsageError


class Block(nn.Module):
    """With names that look like a wrapper's: they belong to the user and stay."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)
        self.model = nn.Linear(3, 3)
        self.base_layer = nn.Linear(3, 3)
        self._orig_mod = nn.BatchNorm1d(3)
        self.tied = self.module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(self.base_layer(self.model(self.module(x))))


OWN = [
    f"{layer}.{kind}"
    for layer in ("module", "model", "base_layer", "_orig_mod")
    for kind in ("weight", "bias")
] + [f"_orig_mod.{b}" for b in ("running_mean", "running_var", "num_batches_tracked")]


def net() -> nn.Sequential:
    return nn.Sequential(Block(), nn.ReLU(), Block())


EXPECTED = sorted(f"{i}.{name}" for i in (0, 2) for name in OWN)


def names(model: nn.Module) -> list[str]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return sorted(a.name for a in take_census(model, torch.optim.SGD(trained)).census.atoms)


def aliases(model: nn.Module) -> set[str]:
    census = take_census(model, torch.optim.SGD(model.parameters())).census
    return {alias for atom in census.atoms for alias in atom.aliases}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_plain_model_keeps_its_own_names() -> None:
    assert names(net()) == EXPECTED
    assert aliases(net()) == {f"{i}.tied.{k}" for i in (0, 2) for k in ("weight", "bias")}


def test_compiled() -> None:
    compiled = torch.compile(net(), backend="eager")
    assert type(compiled).__name__ == "OptimizedModule"
    assert names(compiled) == EXPECTED
    assert aliases(compiled) == aliases(net())
    inner = net()
    inner[0] = torch.compile(inner[0], backend="eager")
    assert names(inner) == EXPECTED
    in_place = net()
    in_place.compile(backend="eager")
    assert names(in_place) == EXPECTED


def test_data_parallel(group: None) -> None:
    assert names(DistributedDataParallel(net())) == EXPECTED
    assert names(DataParallel(net())) == EXPECTED


def test_activation_checkpointing() -> None:
    assert names(checkpoint_wrapper(net())) == EXPECTED
    model = net()
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block | nn.Linear))
    assert any("_checkpoint_wrapped_module" in n for n, _ in model.named_parameters())
    assert names(model) == EXPECTED


def test_wrappers_inside_wrappers(group: None) -> None:
    model = net()
    model[2] = checkpoint_wrapper(model[2])
    stacked = torch.compile(DistributedDataParallel(model), backend="eager")
    assert names(stacked) == EXPECTED
    assert names(DistributedDataParallel(torch.compile(model, backend="eager"))) == EXPECTED


def test_keys_prefix_names_of_wrapped_models() -> None:
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    other = nn.Linear(2, 2)
    both = [*model.parameters(), *other.parameters()]
    census = take_census({"a": model, "b": other}, torch.optim.SGD(both)).census
    assert [a.name for a in census.atoms] == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_adapters_leave_the_names_of_the_model_alone() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["module", "base_layer"])
    found = names(peft.get_peft_model(net(), config))
    adapters = sorted(
        f"{i}.{layer}.lora_{side}.default.weight"
        for i in (0, 2)
        for layer in ("module", "base_layer")
        for side in "AB"
    )
    assert [n for n in found if "lora" in n] == adapters
    assert [n for n in found if "lora" not in n] == EXPECTED


def test_adapters_with_saved_modules_and_wrappers() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["module"], modules_to_save=["model"])
    plain = names(peft.get_peft_model(net(), config))
    compiled = torch.compile(peft.get_peft_model(net(), config), backend="eager")
    assert names(compiled) == plain
    assert set(EXPECTED) <= set(plain)
    inside = peft.get_peft_model(checkpoint_wrapper(net()), config)
    assert names(inside) == plain


def test_two_tensors_never_share_a_name() -> None:
    clashing = {"x": nn.Sequential(nn.Linear(1, 1)), "x.0": nn.Linear(1, 1)}
    both = [p for m in clashing.values() for p in m.parameters()]
    with pytest.raises(UsageError, match="two different tensors"):
        take_census(clashing, torch.optim.SGD(both))
