"""Pure decisions: options, cadence, geometry, survival, names of differences, the status sentence."""

from __future__ import annotations

import pytest

from everystep.core.cadence import base_is_due, recorded_every, retry_seconds
from everystep.core.census import Atom, Census, Mode, OptimizerSpec, gradient_layout, mismatches
from everystep.core.events import pack_presence, unpack_presence
from everystep.core.geometry import ring_geometry
from everystep.core.pace import early_pays, worth_a_hook
from everystep.core.status import summary
from everystep.core.survival import Facts, survival
from everystep.environment import resolve
from everystep.errors import NotEnoughMemory, OptionsError
from everystep.options import Options

PLAIN = Facts(
    pid=100,
    parent_pid=50,
    pid_namespace_is_initial=True,
    cgroup="0::/user.slice",
    slurm_step="",
    memory_available_bytes=1 << 34,
    memory_limit_bytes=0,
    memlock_bytes=-1,
    shm_free_bytes=1 << 30,
    shm_total_bytes=1 << 30,
)


def facts(**changes: object) -> Facts:
    import msgspec

    return msgspec.structs.replace(PLAIN, **changes)


@pytest.mark.parametrize(
    "given, outlives",
    [
        ({}, True),
        ({"pid": 1, "pid_namespace_is_initial": False}, False),
        ({"parent_pid": 1, "pid_namespace_is_initial": False}, False),
        ({"parent_pid": 7, "pid_namespace_is_initial": False}, True),
        ({"cgroup": "0::/slurm/job_7/step_0/task_0", "slurm_step": "0"}, False),
        ({"cgroup": "0::/system.slice/train.service"}, False),
        ({"parent_pid": 1}, True),  # a daemon on a plain host
    ],
)
def test_survival(given: dict[str, object], outlives: bool) -> None:
    verdict = survival(facts(**given))
    assert verdict.outlives is outlives
    assert verdict.because


def test_explicit_options_beat_the_environment() -> None:
    environment = {"EVERYSTEP_DURABLE_EVERY": "50", "EVERYSTEP_ON_LAG": "wait"}
    assert resolve({}, environment) == Options(durable_every=50, on_lag="wait")
    assert resolve({"durable_every": "5m"}, environment).durable_every == "5m"
    assert resolve({}, {"EVERYSTEP_DISABLE": "1"}).enabled is False
    assert resolve({"enabled": True}, {"EVERYSTEP_DISABLE": "1"}).enabled is True


@pytest.mark.parametrize(
    "bad",
    [
        {"durable_every": "soon"},
        {"durable_every": 0},
        {"on_lag": "panic"},
        {"on_failure": "ignore"},
        {"every": 0},
        {"durable": "10m"},
    ],
)
def test_bad_options_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(OptionsError) as refusal:
        resolve(bad, {})
    assert next(iter(bad)) in str(refusal.value)


def test_bases_come_due() -> None:
    options = Options(durable_every="10m")

    def due(**known: object) -> bool:
        return base_is_due(
            options, **{"step": 10, "durable_step": 5, "seconds_since_base": 0, **known}
        )

    assert due(durable_step=None), "the first base is due at once"
    assert not due(seconds_since_base=599)
    assert due(seconds_since_base=600)
    assert not due(seconds_since_base=6000, durable_step=10), "nothing new to write"
    steps = Options(durable_every=4)
    assert base_is_due(steps, step=9, durable_step=5, seconds_since_base=0)
    assert not base_is_due(steps, step=8, durable_step=5, seconds_since_base=9999)
    assert [retry_seconds(n) for n in (0, 1, 30)] == [0.5, 1.0, 60.0]


def test_auto_records_every_step() -> None:
    assert recorded_every(Options().every) == 1
    assert [recorded_every(every) for every in ("auto", 1, 7, "10m")] == [1, 1, 7, "10m"]


def census(*shapes: tuple[int, ...]) -> Census:
    atoms = tuple(Atom(f"a{i}", "float32", shape) for i, shape in enumerate(shapes))
    ids = tuple(range(len(shapes)))
    return Census(atoms, (OptimizerSpec("", "torch.optim:SGD", Mode.REPLAY, (ids,)),), "exact")


def test_ring_shrinks_with_memory_and_refuses_when_there_is_none() -> None:
    large = census((1 << 20,), (1 << 20,))  # 8 MiB of gradients
    roomy = ring_geometry(large, 1000, 1 << 34)
    assert roomy.slots >= 7 and roomy.capacity > 8 << 20
    beside = ring_geometry(large, 1000, 1 << 34, roomy.slot_bytes + (8 << 20))
    assert beside.slot_bytes >= roomy.slot_bytes + (8 << 20), "gradients of no optimizer go whole"
    assert ring_geometry(large, 1000, 1 << 34, 1 << 40).slots >= 8, "but not at any price"
    tight = ring_geometry(large, 1000, 3 * roomy.slot_bytes)
    assert tight.slots == 2 and tight.slot_bytes == roomy.slot_bytes
    with pytest.raises(NotEnoughMemory) as refusal:
        ring_geometry(large, 1000, roomy.slot_bytes)
    assert "MiB" in str(refusal.value) and refusal.value.hint


def test_gradients_keep_their_place_and_alignment() -> None:
    layout = gradient_layout(census((3,), (16,), (1,)), 0)
    assert layout == ((0, 64, 128), (12, 64, 4), 192, 192)


def test_small_gradients_lie_together() -> None:
    """One copy moves them all, whatever lies between them in the model."""
    layout = gradient_layout(census((3,), (1 << 20,), (16,), (1 << 17,)), 0)
    assert layout.offsets == (0, 128, 64, 128 + (4 << 20))
    assert layout.packed_bytes == 128 and layout.bytes == 128 + (4 << 20) + (512 << 10)


def test_presence_bits() -> None:
    for present in ([], [True], [False] * 9, [True, False] * 20):
        assert unpack_presence(pack_presence(present), len(present)) == present


def test_differences_are_named() -> None:
    one, other = census((3,), (4,)), census((3,), (5,), (6,))
    assert mismatches(one, one) == []
    assert mismatches(one, other) == [
        "a2: in the run, not in the model",
        "a1: model has float32[4], run has float32[5]",
    ]


def test_status_does_not_count_a_shadow_that_dies_with_the_trainer() -> None:
    document = {
        "shadow_step": 90,
        "durable_step": 50,
        "durable_age_seconds": 300,
        "exactness": "exact",
    }
    assert "process dies → step 90" in summary({**document, "outlives_trainer": True})
    assert "process dies → step 50" in summary({**document, "outlives_trainer": False})
    assert "host dies → step 50, 5 min old" in summary(document)
    assert "nothing to resume" in summary({})


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ([], []),
        ([7], [0]),
        ([1, 50, 1, 48], [1, 3]),
        ([10] * 10, [*range(9)]),
    ],
)
def test_few_parameters_carry_most_bytes(sizes: list[int], chosen: list[int]) -> None:
    assert worth_a_hook(sizes) == chosen


@pytest.mark.parametrize(
    ("stall_seconds", "hooks", "pays"),
    [
        (0.0, 50, False),
        (0.040, 50, False),  # 16 steps of 50 hooks take 48 ms
        (0.060, 50, True),
        (0.010, 1, True),
        (1.0, 0, False),  # nothing is large enough to leave early
    ],
)
def test_early_only_where_it_saves_more_than_it_costs(
    stall_seconds: float, hooks: int, pays: bool
) -> None:
    assert early_pays(stall_seconds, steps=16, hooks=hooks) is pays
