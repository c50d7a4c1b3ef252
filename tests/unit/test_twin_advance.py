"""Passes of twins over a replica, fed by hand with param groups that change from call to call."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from everystep import native
from everystep.core.census import Atom, Census, Mode, OptimizerSpec
from everystep.core.events import Call, pack_presence
from everystep.format import values
from everystep.format.base import Point, SessionValues
from everystep.lane.arena import SharedMemory
from everystep.replay.tensors import pack, view_tensor
from everystep.shadow.replica import Replica
from everystep.shadow.twin_advance import TwinAdvance

pytestmark = pytest.mark.skipif(native.library() is None, reason="the twins were not compiled")
SIZE = 5


def census(twin: str, path: str) -> Census:
    spec = OptimizerSpec("", path, Mode.REPLAY, ((0,),), "", {"float32": twin})
    return Census((Atom("w", "float32", (SIZE,)),), (spec,), "exact")


def replica_of(taken: Census) -> Replica:
    replica = Replica(taken, None)
    replica.reserve_values()
    replica.based = [True]
    return replica


def call(optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> tuple[Call, memoryview]:
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    encoded = values.encode(groups, "groups", pack)
    payload = memoryview(bytearray(gradient.numpy().tobytes()))
    return Call(0, encoded, pack_presence([True]), 0, {}), payload


def sgd(twin_lr: Any = 0.1, **more: Any) -> tuple[torch.nn.Parameter, torch.optim.SGD]:
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    return parameter, torch.optim.SGD([parameter], lr=twin_lr, **more)


def step_both(
    parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, changes: list[dict[str, Any]]
) -> list[tuple[Call, memoryview]]:
    """The trainer's steps, each with other values in its group; returns what would be logged."""
    calls = []
    for number, change in enumerate(changes):
        optimizer.param_groups[0].update(change)
        parameter.grad = torch.arange(SIZE) * 0.37 + number
        calls.append(call(optimizer, parameter.grad))
        optimizer.step()
    return calls


@pytest.mark.parametrize("momenta", [[0.0, 0.9, 0.9], [0.9, 0.0, 0.8], [0.0, 0.0, 0.5]])
def test_momentum_may_begin_within_a_pass(momenta: list[float]) -> None:
    parameter, optimizer = sgd()
    calls = step_both(parameter, optimizer, [{"momentum": m} for m in momenta])
    taken = census("sgd-cpu-float32", "torch.optim.sgd:SGD")
    replica = replica_of(taken)
    TwinAdvance(taken, 0, replica, {}, 1).calls(calls)
    assert bytes(replica.view((0, ""))) == parameter.detach().numpy().tobytes()
    momentum = optimizer.state[parameter]["momentum_buffer"]
    assert bytes(replica.view((0, "/momentum_buffer"))) == momentum.numpy().tobytes()


def test_a_parameter_that_moves_without_momentum_is_fresh_when_it_gets_some() -> None:
    """Its first gradient with momentum is the buffer, whatever came before in the same pass."""
    parameter, optimizer = sgd(momentum=0.9, dampening=0.5)
    calls = step_both(parameter, optimizer, [{}, {"momentum": 0.0}, {"momentum": 0.9}])
    absent = Call(0, calls[0][0].groups, pack_presence([False]), 0, {}), calls[0][1]
    parameter, optimizer = sgd(momentum=0.0, dampening=0.5)
    for (_, payload), momentum in zip(calls[1:], (0.0, 0.9), strict=True):
        optimizer.param_groups[0]["momentum"] = momentum
        parameter.grad = view_tensor(payload, "float32", (SIZE,))
        optimizer.step()
    taken = census("sgd-cpu-float32", "torch.optim.sgd:SGD")
    replica = replica_of(taken)
    TwinAdvance(taken, 0, replica, {}, 1).calls([absent, *calls[1:]])
    assert bytes(replica.view((0, ""))) == parameter.detach().numpy().tobytes()


@pytest.mark.parametrize("lr", [torch.tensor(0.1), torch.tensor([0.1])])
def test_a_learning_rate_may_be_a_tensor_of_one_element(lr: torch.Tensor) -> None:
    parameter, optimizer = sgd(lr)
    calls = step_both(parameter, optimizer, [{}, {}])
    taken = census("sgd-cpu-float32", "torch.optim.sgd:SGD")
    replica = replica_of(taken)
    TwinAdvance(taken, 0, replica, {}, 1).calls(calls)
    assert bytes(replica.view((0, ""))) == parameter.detach().numpy().tobytes()


def test_betas_may_be_others_than_at_attach() -> None:
    """A scheduler that cycles them: nobody asked the device for their powers."""
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    changes = [{"betas": (0.9 - 0.01 * n, 0.999)} for n in range(4)]
    calls = step_both(parameter, optimizer, changes)
    taken = census("adam-fused-float32", "torch.optim.adamw:AdamW")
    replica = replica_of(taken)
    TwinAdvance(taken, 0, replica, {}, 1).calls(calls)
    found = np.frombuffer(replica.view((0, "")), np.float32)
    np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=1e-5)


def test_slots_begin_with_zeros_also_in_memory_that_was_adopted() -> None:
    """The user cleared the optimizer's state; the shadow that adopts the memory makes the slots anew."""
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    taken = census("adam-fused-float32", "torch.optim.adam:Adam")
    optimizer = torch.optim.Adam([parameter])
    first, second = step_both(parameter, optimizer, [{}, {}])
    replica = replica_of(taken)
    TwinAdvance(taken, 0, replica, {}, 1).calls([first, second])
    replica.drop_slots(0, set())
    session = SessionValues(2, b"", b"", (), ())
    handle = replica.handle(
        line=Point(1, session.step), session=session, tail_bytes=0, tail_steps=0
    )
    heir = Replica(taken, None)
    heir.adopt(handle, [SharedMemory(os.dup(extent.fd)) for extent in replica.extents])
    TwinAdvance(taken, 0, heir, {}, 1).calls([first])
    alone = replica_of(taken)
    TwinAdvance(taken, 0, alone, {}, 1).calls([first])
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert bytes(heir.view((0, f"/{name}"))) == bytes(alone.view((0, f"/{name}")))


def test_a_step_that_the_kernel_skipped_leaves_slots_behind() -> None:
    """The optimizer made them before its kernel found the overflow; the trainer's digests speak of them."""
    taken = census("adam-fused-float32", "torch.optim.adam:Adam")
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    ((logged, gradients), second) = step_both(parameter, torch.optim.Adam([parameter]), [{}, {}])
    found_inf = np.float32(1).tobytes()
    payload = memoryview(bytearray(bytes(gradients) + found_inf))
    skipped = Call(0, logged.groups, logged.presence, 0, {"found_inf": len(gradients)}), payload
    replica = replica_of(taken)
    assert TwinAdvance(taken, 0, replica, {}, 1).calls([skipped]) == [[0]]
    for name in ("", "/exp_avg", "/exp_avg_sq", "/step"):
        assert not any(replica.view((0, name)))
    TwinAdvance(taken, 0, replica, {}, 1).calls([skipped, second, skipped])
    assert np.frombuffer(replica.view((0, "/step")), np.float32)[0] == 1
