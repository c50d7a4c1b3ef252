"""How long the disk lasts: what a base and the log take, how often, and what retention lets stay."""

from __future__ import annotations

import msgspec

from everystep.core.cadence import seconds_between_bases
from everystep.core.census import Census, Mode, gradient_layout
from everystep.core.retention import Rules
from everystep.core.sizes import size
from everystep.errors import NotEnoughDisk
from everystep.option_values import best_of
from everystep.options import Options

_DAY_SECONDS = 86400.0
_SHORT_DAYS = 7.0
# tensors of a parameter's own size that these optimizers keep in any case, whatever their settings
_CERTAIN_SLOTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1}
_CERTAIN_SLOTS |= {"RMSprop": 1, "Adadelta": 2}
_USUAL_SLOTS = 2


class Forecast(msgspec.Struct, frozen=True):
    """None: not known yet, or never."""

    free_bytes: int
    base_bytes: int  # one base at most: what did not change is not written again
    bytes_per_day: float | None  # written, of which retention removes most
    kept_bytes: float | None  # what the rules let stay in the end, `Keep.every` aside
    days_until_full: float | None
    warning: str = ""


def base_bytes(census: Census, *, certain: bool = False) -> int:
    """Of a first base; `certain` counts no optimizer slot that settings may leave out."""
    total = sum(atom.bytes for atom in census.atoms)
    for spec in census.optimizers:
        known = _CERTAIN_SLOTS.get(spec.path.rpartition(":")[2], 0)
        slots = known if certain else known or _USUAL_SLOTS
        total += slots * sum(census.atoms[atom].bytes for atom in spec.atoms)
    return total


def record_bytes(census: Census) -> int:
    """What the log takes for a step with one call of every optimizer."""
    logged = [i for i, spec in enumerate(census.optimizers) if spec.mode is not Mode.STATE]
    return sum(gradient_layout(census, i).bytes for i in logged)


def check_fits(run: str, census: Census, free_bytes: int) -> None:
    """Refuse a training whose first base cannot be written: what it would lose shows too late."""
    need = base_bytes(census, certain=True)
    if need > free_bytes:
        raise NotEnoughDisk(
            f"attach {run}: a base takes {size(need)} at least, {size(free_bytes)} are free",
            hint="free space, raise tuning=Tuning(store_quota=…) if it is set, give another run=, or "
            "everystep prune older runs on this disk",
        )


def forecast(
    options: Options,
    rules: Rules,
    *,
    free_bytes: int,
    present_bytes: int,
    base_bytes: int,
    record_bytes: int,
    seconds_per_step: float | None = None,
) -> Forecast:
    """`present_bytes` is what the run holds already. `seconds_per_step` is not known when training begins:
    what hangs on it is left open then."""
    interval = seconds_between_bases(options, seconds_per_step)
    logged = record_bytes if options.durable_log else 0
    if interval is None or (logged and not seconds_per_step):
        return Forecast(free_bytes, base_bytes, None, None, None)
    log_rate = logged / seconds_per_step if seconds_per_step else 0.0
    rate = base_bytes / interval + log_rate
    # one more than stays is there while it is written
    kept = (_bases_kept(rules) + 1) * base_bytes + rules.keep_last * interval * log_rate
    growth = 0.0
    if rules.keep_every and seconds_per_step:
        growth = base_bytes / max(rules.keep_every * seconds_per_step, interval)
    days: float | None = None
    room = free_bytes + present_bytes
    if kept > room:
        days = free_bytes / rate / _DAY_SECONDS
    elif growth:
        days = (room - kept) / growth / _DAY_SECONDS
    warning = _warning(room, kept, days)
    return Forecast(free_bytes, base_bytes, rate * _DAY_SECONDS, kept, days, warning)


def _bases_kept(rules: Rules) -> int:
    best = best_of(rules.keep_best)[0] if rules.keep_best else 0
    return rules.keep_last + rules.keep_hourly + rules.keep_daily + best


def _warning(room: int, kept: float, days: float | None) -> str:
    if days is None or (kept <= room and days > _SHORT_DAYS):
        return ""
    time = f"{days:.1f} days" if days >= 1 else f"{24 * days:.1f} hours"
    if kept > room:
        return (
            f"the disk is full in {time}: the rules let {size(kept)} stay, "
            f"there is room for {size(room)}; keep fewer bases, or write them less often (durable_every)"
        )
    return (
        f"the disk is full in {time}: keep=Keep(every=…) grows without end; raise it, or free space"
    )
