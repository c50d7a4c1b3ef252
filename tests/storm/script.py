"""A failing program as a script of its own: plain PyTorch and everystep, nothing of the storm."""

from __future__ import annotations

import inspect
import re

from storm import disasters
from storm.draw import PARTS, life_of_faults
from storm.oracle import Failure
from storm.plain import Plain
from storm.program import Program, to_json
from storm.render import IMPORTS, source

_DRIVER = """
def bits(models, optimizers, state):
    models, optimizers = (list(t.values()) if isinstance(t, dict) else [t] for t in (models, optimizers))
    named = lambda values: sorted(map(str, values.items())) if isinstance(values, dict) else values
    seen = repr([[[*m.named_parameters(), *m.named_buffers()] for m in models],
                 [([named(s) for s in o.state.values()],
                   [named({**g, "params": 0}) for g in o.param_groups]) for o in optimizers],
                 [s if isinstance(s, dict) else s.state_dict() for s in state.values()]])
    return re.sub(r",\\s*requires_grad=True", "", seen)  # the script sets it

def live(life, run_dir):
    if os.fork() == 0:
        log = open(f"{FOLDER}/{life}", "a", buffering=1)
        def tell(kind, step, seen=None, more=None):
            if kind == "status":
                seen = {k: seen.get(k) for k in ("summary", "health", "problem")}
            print(f"life {life}: {kind} {step}", seen if kind == "status" else "", flush=True)
            if kind in ("attached", "done"):
                print(repr((step - (kind == "attached"), bits(*seen))), file=log)
        train(run_dir, life, tell)
        os._exit(0)
    print(f"life {life} ended with", os.waitstatus_to_exitcode(os.wait()[1]))
    return [eval(line) for line in open(f"{FOLDER}/{life}")]

if __name__ == "__main__":
    torch.set_printoptions(precision=17, threshold=10**6)
    FOLDER = tempfile.mkdtemp()
    os.environ["EVERYSTEP_RUNTIME_DIR"], run_dir = f"{FOLDER}/rt", f"{FOLDER}/run"
    expected = dict(live(-1, ""))
    for life in range($lives):
        wrong = [step for step, seen in live(life, run_dir) if seen != expected[step]]
        print(f"life {life} differs after steps", wrong)$between
"""


def script(program: Program, failure: Failure) -> str:
    """It prints what each life does, and where its state is not the reference's."""
    lives, between, needed = 1, [], []
    for pick, life in zip(program.faults, life_of_faults(program), strict=True):
        part = PARTS["faults"][pick.name]
        lives += "ends" in part.gives
        if what := part.text.get("between"):
            needed.append(inspect.getsource(getattr(disasters, what)))
            between.append(
                f"if life == {life}: run_dir = {what}(run_dir, os.environ, {pick.values.get('which', 0)})"
            )
    driver = _DRIVER.replace("$lives", str(lives + 1))
    driver = driver.replace("$between", "".join(f"\n        {line}" for line in between))
    plain = re.sub(r'\n    """.*?"""\n', "\n", inspect.getsource(Plain)).replace("\n\n", "\n")
    plain = re.sub(
        r"(def .*:)\n +(return .*|pass|self.step \+= 1|.*= 0, False)\n", r"\1 \2\n", plain
    )
    head = f"# {failure.kind}\n# " + "\n# ".join(failure.detail.splitlines()[:8])
    made = f"# made by: python -m tests.storm --program '{to_json(program)}'"
    imports = IMPORTS.replace("random, signal", "random, re, signal")
    imports = imports.replace("sys, time", "sys, tempfile, time")
    pieces = [head, made, imports, plain, *needed, source(program), driver]
    return "\n".join(piece.strip("\n") for piece in pieces) + "\n"
