"""What happens to the processes and the store. `placed` runs in life `$life`, in turn `$at`; a part that
gives `ends` ends that life; `between` names a function of `disasters.py` that runs when the life is over."""

from __future__ import annotations

from typing import Any

from storm.program import Part, part

_KILL = "os.kill(os.getpid(), signal.SIGKILL)"
_PLACES = ["stepped", "start", "backward", "end", "over"]
_SHADOW = 'shadow = run.status().get("pid")'


def _in_turn(
    name: str, what: str, *, gives: str = "ends", weight: float = 1.0, **params: list[Any]
) -> Part:
    body = "\n".join(f"    {line}" for line in what.splitlines())
    text = {"placed": f"if life == $life and step == $at:\n{body}"}
    params = {"at": [], "place": _PLACES, **params}  # the turn is drawn from those there are
    return part(name, text, weight=weight, gives=gives, **params)


_CLOCK = '''
def clock_of(run_dir):
    place = Path(f"{run_dir}.clock")  # how far it is off, for every process that starts from here on
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(f"""
import pathlib, time
def jumped(real=time.time, by=pathlib.Path({str(place / "by")!r})):
    return real() + (float(by.read_text()) if by.exists() else 0)
time.time = jumped
""")
    sys.path.insert(0, str(place))
    return place / "by"
'''

FAULTS = [
    _in_turn("kill", _KILL, weight=5),
    _in_turn(
        "host",
        f'tell("status", run.step, status := run.status())\n'
        f'if status.get("pid"):\n    os.kill(status["pid"], signal.SIGKILL)\n{_KILL}',
        gives="ends host",
        weight=5,
    ),
    _in_turn("raise", 'raise ZeroDivisionError("planned")', weight=1),
    _in_turn("close", "return", weight=1.5, place=["over"]),
    _in_turn(
        "kill_soon",
        "signal.setitimer(signal.ITIMER_REAL, $after)",
        after=[0.0002, 0.002, 0.01],
        place=["start"],
    ),
    part(
        "kill_in_attach",
        {"before": "if life == $life:\n    signal.setitimer(signal.ITIMER_REAL, $after)"},
        gives="ends in_attach",
        after=[0.005, 0.02, 0.05],
        weight=0.7,
    ),
    part(
        "kill_shadow",
        {
            "placed": "if life == $life and step == $at and (shadow := run.status().get('pid')):\n"
            "    os.kill(shadow, signal.SIGKILL)\n"
            "if life == $life and $at < step < $at + 4:\n"
            "    time.sleep(0.1)  # a new one starts beside training"
        },
        gives="shadow_hit",
        at=[],
        place=_PLACES,
        weight=1.5,
    ),
    _in_turn(
        "stop_shadow",
        f"{_SHADOW}\n"
        'subprocess.Popen(["sh", "-c", f"kill -STOP {shadow}; sleep $seconds; kill -CONT {shadow}"])',
        gives="shadow_hit",
        seconds=[0.3, 1.0],
        weight=1.2,
    ),
    _in_turn(
        "zombie",  # it comes to itself when a new life has begun
        f"{_SHADOW}\nif shadow:\n    os.kill(shadow, signal.SIGSTOP)\n"
        '    subprocess.Popen(["sh", "-c", f"sleep $seconds; kill -CONT {shadow}"])\n'
        f"{_KILL}",
        gives="ends shadow_hit",
        seconds=[0.3, 1.0],
        weight=0.8,
    ),
    _in_turn(
        "disk_full",
        f"{_SHADOW}\nif shadow:\n    import resource\n"
        "    resource.prlimit(shadow, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))",
        gives="disk_hit",
        weight=0.8,
    ),
    part(
        "clock",
        {
            "defs": _CLOCK,
            "before": "clock = clock_of(run_dir)",
            "placed": 'if life == $life and step == $at:\n    clock.write_text("$by")',
        },
        gives="clock_hit",
        at=[],
        place=["start"],
        by=[-86400, 86400],
        weight=0.8,
    ),
    part(
        "flip",
        {"between": "flip_bytes"},
        needs="ends",
        gives="store_hit",
        which=[1, 2, 3, 4],
        weight=1,
    ),
    part("moved", {"between": "move"}, needs="ends", gives="moved", weight=0.8),
    part("deleted", {"between": "delete"}, needs="ends", bars="moved", gives="deleted", weight=0.6),
    part("symlink", {"between": "reach_through_link"}, needs="ends", gives="moved", weight=0.8),
]
