"""What happens to the processes and the store. `placed` runs in life `$life`, in turn `$at`; a part that
gives `ends` ends that life; `between` names a function of `disasters.py` that runs when the life is over."""

from __future__ import annotations

from typing import Any

from storm.program import Part, part

_KILL = "os.kill(os.getpid(), signal.SIGKILL)"
_PLACES = ["stepped", "start", "backward", "end", "over"]
_EARLY = [1, 2, 3, 4, 5, 6]
_SHADOW = 'shadow = run.status().get("pid")'


def _in_turn(
    name: str,
    what: str,
    *,
    gives: str = "ends",
    needs: str = "",
    likes: str = "",
    weight: float = 1.0,
    **params: list[Any],
) -> Part:
    params = {"at": [], "place": _PLACES, **params}  # the turn is drawn from those there are
    text = {"placed": _in_life(what)}
    return part(name, text, weight=weight, gives=gives, needs=needs, likes=likes, **params)


def _in_life(what: str) -> str:
    body = "\n".join(f"    {line}" for line in what.splitlines())
    return f"if life == $life and step == $at:\n{body}"


_PLANTED = """
def planted(run_dir, text):
    place = Path(f"{run_dir}.planted")  # every shadow that starts from here on runs it first
    place.mkdir(exist_ok=True)
    code = place / "sitecustomize.py"
    if text not in (before := code.read_text() if code.exists() else ""):
        code.write_text(before + text)
    sys.path.insert(0, str(place))
    return place

def put(path, text):
    path.with_suffix(".soon").write_text(text)
    path.with_suffix(".soon").rename(path)  # who sees it reads all of it
"""
_CLOCK = '''
CLOCK = """
import pathlib, time
def jumped(real=time.time, by=pathlib.Path(__file__).with_name("by")):
    return real() + (float(by.read_text()) if by.exists() else 0)
time.time = jumped
"""
'''
_STUCK = '''
STUCK = """
import os, pathlib, signal, subprocess
def stuck(real, armed):
    seen = []
    def write(*args, **more):
        if armed.exists():
            nth, seconds = armed.read_text().split()
            seen.append(args)
            if len(seen) == int(nth):
                os.rename(armed, f"{armed}-done")
                subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args, **more)
    return write
for name in ("fsync", "replace", "unlink"):
    setattr(os, name, stuck(getattr(os, name), pathlib.Path(__file__).with_name(name)))
"""
'''
_SLOW = '''
SLOW = """
import os, time
def slow(*args, real=os.fsync):
    time.sleep(0.05)
    return real(*args)
os.fsync = slow
"""
'''
_FAILS = '''
FAILS = """
import importlib, pathlib
def failing(owner, name, armed):
    def work(self, *args, real=getattr(owner, name), **more):
        if armed.exists():
            armed.unlink()
            raise ZeroDivisionError("planted")
        return real(self, *args, **more)
    setattr(owner, name, work)
for where in (
    "intake.Intake.take", "tuning.Tuner.on_record",
    "base_scheduler.BaseScheduler.persist_if_due", "replica.Replica.write",
):
    module, kind, name = where.split(".")
    owner = getattr(importlib.import_module(f"everystep.shadow.{module}"), kind)
    failing(owner, name, pathlib.Path(__file__).with_name(name))
"""
'''
_GET_STUCK = f"""if life == $life and step == $at:
    put(place / "$operation", "$nth $seconds")
elif life == $life and step > $at:
    time.sleep(0.05)  # let it write
    if not (place / "$operation").exists():
        {_KILL}"""


def _stuck(name: str, *, weight: float, tags: str = "", **options: str) -> Part:
    """A host hangs in the midst of a write, and comes to itself when another one has gone on with the run."""
    text = {
        "defs": _PLANTED + _STUCK,
        "before": "place = planted(run_dir, STUCK)",
        "placed": _GET_STUCK,
        "between": "elsewhere",
    }
    return part(
        name,
        {**text, **options},
        weight=weight,
        gives=f"ends shadow_hit {tags}",
        bars=tags,
        at=_EARLY,
        place=_PLACES,
        operation=["replace", "replace", "replace", "unlink", "fsync"],
        nth=[1, 2, 3, 4],
        seconds=[3.0, 0.3],
    )


_JUMP = """
deadline = time.monotonic() + 1  # ages are of something that has been written
while run.status().get("durable_step") is None and time.monotonic() < deadline:
    time.sleep(0.01)
put(place / "by", "$by")
time.sleep(0.2)  # the shadow writes its status
tell("status", run.step, run.status())
""".strip()
_HOST = (
    'tell("status", run.step, status := run.status())\n'
    f'if status.get("pid"):\n    os.kill(status["pid"], signal.SIGKILL)\n{_KILL}'
)
_SETTLED = """
deadline = time.monotonic() + 1
while (run.status().get("durable_step") or 0) < run.step and time.monotonic() < deadline:
    time.sleep(0.01)
""".lstrip()

FAULTS = [
    _in_turn("kill", _KILL, weight=5),
    _in_turn("host", _HOST, gives="ends host", weight=4),
    _in_turn(  # training is so fast here that the disk would hold little of its log
        "host_settled", _SETTLED + _HOST, gives="ends host", needs="log", likes="forgets", weight=10
    ),
    part(  # before the shadow of this life has written what it was handed
        "host_soon",
        {
            "placed": "first = vars().get('first', step)\n"
            "if life == $life and step >= min($at, first + $after):\n"
            + "".join(f"    {line}\n" for line in _HOST.splitlines())
        },
        gives="ends host",
        needs="log",
        at=[],
        place=_PLACES,
        after=[0, 1, 2],
        weight=6,
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
    _stuck("stuck", weight=0.5),
    _stuck(
        "stuck_pruning", option="durable_every=1", keep="last=1", tags="cadence prunes", weight=3
    ),
    part(
        "shadow_fails",  # something of ours, at any place: it starts over from a new base
        {
            "defs": _PLANTED + _FAILS,
            "before": "place = planted(run_dir, FAILS)",
            "placed": 'if life == $life and step == $at:\n    put(place / "$where", "")\n'
            "if life == $life and $at <= step < $at + 4:\n"
            "    time.sleep($pause)  # who is in step fails at the newest record",
        },
        gives="shadow_hit shadow_fails",
        at=[],
        place=_PLACES,
        where=["on_record", "on_record", "take", "persist_if_due", "write"],
        pause=[0.05, 0.0],
        weight=2.5,
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
            "defs": _PLANTED + _CLOCK,
            "before": "place = planted(run_dir, CLOCK)",
            "placed": _in_life(_JUMP),
        },
        gives="clock_hit",
        at=[],
        place=["start"],
        by=[-86400, -86400, 86400],
        weight=1.5,
    ),
    part(
        "flip",
        {"between": "flip_bytes"},
        needs="ends",
        gives="store_hit",
        which=[1, 2, 3, 4],
        weight=1,
    ),
    part("moved", {"between": "move"}, needs="ends", gives="moved", weight=2),
    part("deleted", {"between": "delete"}, needs="ends", bars="moved", gives="deleted", weight=0.8),
    part("elsewhere", {"between": "elsewhere"}, needs="ends", weight=1.5),
    part(
        "symlink",  # last words take their time: who does not find the shadow finds less in the store
        {
            "defs": _PLANTED + _SLOW,
            "before": "place = planted(run_dir, SLOW)",
            "between": "reach_through_link",
        },
        needs="ends",
        gives="moved",
        weight=2,
    ),
]
