"""What is said and the residual lie where the gradient lay, whatever its layout in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everystep
from everystep.compression.compressor import residuals_of


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build() -> nn.Module:
    torch.manual_seed(2)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False))
    return layers.to(memory_format=torch.channels_last)


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model(x).square().sum().backward()
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}


def test_bf16_of_a_bf16_model_says_what_it_says(alone: None) -> None:
    """Its gradients need no conversion, so what is said could be the very memory of what is left."""
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False).bfloat16())
    everystep.compress(model, "bf16", feedback=True)
    model(torch.tensor([[1.0, 2, 3, 4]], dtype=torch.bfloat16)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_a_small_parameter_has_a_scale_of_its_own(method: str) -> None:
    large, small = nn.Parameter(torch.zeros(33)), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([large, small], lr=0.0)
    everystep.compress(optimizer, method)
    large.grad, small.grad = torch.full((33,), 1.0), torch.tensor(2.0**-20)
    large.grad[32] = math.nan
    optimizer.step()
    assert small.grad == 2.0**-20 and large.grad[:32].eq(1).all() and large.grad[32].isnan()


@pytest.mark.parametrize("method", ["topk", "int8"])
@pytest.mark.parametrize("target", ["optimizer", "ddp"])
def test_said_and_unsaid_add_up(method: str, target: str, alone: None) -> None:
    torch.manual_seed(3)
    x = torch.randn(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)
    whole = gradients(build(), x)
    model = build()
    parameters = list(model.parameters())
    # SGD with this rate leaves the gradients as they are
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    trained = DistributedDataParallel(model) if target == "ddp" else model
    everystep.compress(trained if target == "ddp" else optimizer, method, ratio=0.05, feedback=True)
    said = gradients(trained, x)
    optimizer.step()
    held = residuals_of(parameters)
    for (name, gradient), parameter in zip(whole.items(), parameters, strict=True):
        assert torch.equal(said[name] + held[parameter], gradient), name
        assert held[parameter].stride() == parameter.stride()
    assert any(residual.any() for residual in held.values())
