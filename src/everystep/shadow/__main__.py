"""Entry of the shadow process: detach, then run until there is nobody left to serve."""

from __future__ import annotations

import logging
import os
import sys

from everystep.errors import ProtocolMismatch
from everystep.process.config import read_config
from everystep.process.oom_score import spare_from_oom
from everystep.shadow.process import Shadow


def main() -> None:
    try:
        config = read_config(sys.stdin.buffer.read())
    except ProtocolMismatch as error:
        sys.exit(str(error))  # the trainer reads the end of our log
    if os.fork():
        os._exit(0)  # the trainer's child ends here; the shadow belongs to init, not to the trainer
    os.nice(15)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    code = 1
    try:
        Shadow(spare_from_oom(config)).run()
        code = 0
    except Exception:
        logging.getLogger("everystep.shadow").exception("shadow_died")
    finally:
        logging.shutdown()
        os._exit(code)  # nothing is left to do, and tearing torch down takes half a second


main()
