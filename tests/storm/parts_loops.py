"""Who asks for the next step. A line `@turn` is where the turn goes; `TOTAL` is the number of steps."""

from __future__ import annotations

from storm.program import part

_STEPS = """
for step in run.steps(TOTAL):
    @turn
"""
_SEAL = """
for step in range(run.resume(), TOTAL):
    @turn
    run.seal()
"""
_BARE = """
for step in range(run.step, TOTAL):
    @turn
    run.seal()
"""
_AGAIN = """
for _ in range(TOTAL):
    for step in run.steps(TOTAL):
        @turn
        if step % $k == 1:
            break
"""
_TERMS = """
for end in range($k, TOTAL + $k, $k):
    for step in run.steps(min(end, TOTAL)):
        @turn
"""
_INTERRUPTED = """
for attempt in range(2):
    try:
        for step in run.steps(TOTAL):
            @turn
    except KeyboardInterrupt:
        tell("again", run.step)
"""
_INTERRUPT = """
if life >= 0 and attempt == 0 and step == $at:
    raise KeyboardInterrupt
"""
_ENDS_BADLY = """
def ends_badly(armed):
    yield
    if armed:
        raise KeyboardInterrupt
"""
_INNER_INTERRUPT = """
for _ in ends_badly(life >= 0 and attempt == 0 and step == $at):
    pass
"""
_REWIND = """
rewound = life != 0
for step in run.steps(TOTAL):
    if step == $to and life >= 0:
        run.flush(60)
    if step == $to + 3 and not rewound:
        rewound = True
        tell("again", run.rewind($to))
        continue
    @turn
"""

_REWIND_LOST = """
rewound = life != 0
for step in run.steps(TOTAL):
    if step == $to and life >= 0:
        run.flush(60)
    if step == $to + $k and not rewound and (shadow := run.status().get("pid")):
        os.kill(shadow, signal.SIGKILL)
        time.sleep($wait)
    if step == $to + 3 and not rewound:  # a new shadow is being started, perhaps
        rewound = True
        tell("again", run.rewind($to))
        continue
    @turn
"""
_BREAKS = """
class Breaks:
    armed = False
    def state_dict(self):
        if self.armed and sys._getframe(1).f_globals["__name__"].startswith("everystep"):
            self.armed = False
            raise KeyboardInterrupt
        return {}
    def load_state_dict(self, stored):
        pass
"""

LOOPS = [
    part("steps", {"loop": _STEPS}, weight=5),
    part("seal", {"loop": _SEAL}, weight=2),
    part("seal_bare", {"loop": _BARE}, weight=0.5, excused_by="resume", tells="resume"),
    part("again", {"loop": _AGAIN}, weight=1.5, bars="skips", k=[3, 2]),
    part("terms", {"loop": _TERMS}, k=[3, 4]),
    part(
        "interrupted",
        {"loop": _INTERRUPTED, "placed": _INTERRUPT},
        gives="goes_back",
        bars="scaler",
        tells="left in its midst",
        place=["stepped", "backward"],
        at=[2, 4, 5],
    ),
    part(
        "inner_interrupted",  # by the iterator of a loop inside the turn, as a DataLoader that waits
        {"defs": _ENDS_BADLY, "loop": _INTERRUPTED, "placed": _INNER_INTERRUPT},
        weight=0.7,
        gives="goes_back",
        bars="scaler",
        tells="left in its midst",
        place=["stepped", "backward"],
        at=[2, 4, 5],
    ),
    part(
        "interrupted_group",  # the broken turn has added a param group: it goes, and comes again
        {
            "params": "held = params.pop().requires_grad_(False)",
            "start": "held.requires_grad_(step >= $at)\nif step == $at:\n"
            '    opts[0].add_param_group({"params": [held], "lr": 0.03})',
            "loop": _INTERRUPTED,
            "placed": _INTERRUPT,
        },
        weight=0.8,
        needs="module one",
        gives="goes_back popped",
        bars="strange lazy single closure_only own scaler",
        tells="left in its midst",
        place=["stepped"],
        at=[2, 4, 5],
    ),
    part(
        "seal_interrupted",
        {
            "defs": _BREAKS,
            "state": 'state["breaks"] = breaks = Breaks()',
            "loop": _INTERRUPTED,
            "placed": "if life >= 0 and attempt == 0 and step == $at:\n    breaks.armed = True",
        },
        weight=0.7,
        gives="goes_back",
        bars="scaler",
        tells="left in its midst",
        place=["stepped", "backward"],
        at=[2, 4, 5],
    ),
    part(
        "rewind_lost",
        {"loop": _REWIND_LOST},
        weight=0.6,
        gives="goes_back shadow_hit rewinds",
        to=[2, 3],
        k=[1, 2, 2],
        wait=[0.0, 0.1, 0.3],
    ),
    part("rewind", {"loop": _REWIND}, weight=0.6, gives="goes_back rewinds", to=[2, 3]),
]
