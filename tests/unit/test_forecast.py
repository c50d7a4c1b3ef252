"""How long a disk lasts, as a pure function: against a simulation of a store that is written and pruned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.core.census import Atom, Census, Mode, OptimizerSpec
from everystep.core.forecast import Forecast, base_bytes, check_fits, forecast, record_bytes
from everystep.core.retention import BaseFacts, judge, rules_of
from everystep.errors import NotEnoughDisk
from everystep.options import Keep, Options

DAY = 86400.0


def census(path: str = "torch.optim.adamw:AdamW", mode: Mode = Mode.REPLAY) -> Census:
    atoms = (Atom("w", "float32", (1000,)), Atom("frozen", "float32", (500,)))
    return Census(atoms, (OptimizerSpec("", path, mode, ((0,),)),), "exact")


def look(options: Options, free: int, base: int, **known: float) -> Forecast:
    return forecast(
        options,
        rules_of(options),
        free_bytes=free,
        present_bytes=0,
        base_bytes=base,
        record_bytes=10,
        **known,  # type: ignore[arg-type]
    )


def test_sizes_come_from_the_census() -> None:
    assert base_bytes(census()) == 4000 * 3 + 2000
    sgd = census("torch.optim.sgd:SGD")
    assert base_bytes(sgd, certain=True) == 6000 < base_bytes(sgd)
    assert record_bytes(census()) >= 4000 and record_bytes(census(mode=Mode.STATE)) == 0


def test_a_disk_that_no_base_fits_on_is_refused() -> None:
    need = base_bytes(census(), certain=True)
    check_fits("run", census(), need)
    with pytest.raises(NotEnoughDisk, match=r"13\.7 KiB at least, 13\.7 KiB are free") as refusal:
        check_fits("run", census(), need - 1)
    assert refusal.value.hint


def test_what_is_not_known_yet_is_left_open() -> None:
    steps = Options(durable_every=100)
    assert look(steps, 1000, 10).bytes_per_day is None
    assert look(steps, 1000, 10, seconds_per_step=1.0).bytes_per_day == pytest.approx(10 * 864)
    logged = Options(durable_log=1)
    assert look(logged, 1000, 10).bytes_per_day is None
    by_time = look(Options(durable_every="1h"), 1000, 10)
    assert by_time.bytes_per_day == pytest.approx(240) and by_time.days_until_full is None


def test_the_log_counts() -> None:
    found = look(Options(durable_log=1, durable_every="1h"), 10**9, 10, seconds_per_step=0.5)
    assert found.bytes_per_day == pytest.approx(240 + 20 * DAY)


@given(
    last=st.integers(1, 4),
    daily=st.integers(0, 3),
    every=st.sampled_from([0, 100, 700]),
    room=st.integers(2, 40),
)
def test_against_a_store_that_is_written_and_pruned(
    last: int, daily: int, every: int, room: int
) -> None:
    """Bases every ten minutes of 50 steps: the day on which the disk is full is the one foretold."""
    options = Options(durable_every="10m", keep=Keep(last=last, daily=daily, every=every))
    base = 1000
    found = look(options, room * base, base, seconds_per_step=12.0)
    bases: list[BaseFacts] = []
    full = None
    for number in range(144 * 8):
        if len(bases) + 1 > room:
            full = number / 144
            break
        bases.insert(0, BaseFacts(50 * number, 600.0 * number))
        verdicts = judge(bases, rules_of(options), 0)
        bases = [b for b, verdict in zip(bases, verdicts, strict=True) if verdict.stays]
    if found.days_until_full is None:
        assert full is None
    elif full is not None:
        # rules overlap (a base may be a daily one and among the last): the forecast is never too late
        assert found.days_until_full <= full + 1 / 144


def test_warnings_say_what_to_do() -> None:
    short = look(Options(durable_every="1h", keep=Keep(last=5)), 30, 10)
    assert "durable_every" in short.warning and short.days_until_full == pytest.approx(3 / 24)
    growing = look(
        Options(durable_every="1h", keep=Keep(every=3600)), 100, 10, seconds_per_step=1.0
    )
    assert "Keep(every=…)" in growing.warning and growing.days_until_full == pytest.approx(6 / 24)
    assert look(Options(durable_every="1h"), 10**9, 10).warning == ""
