"""Whether a process still lives. The kernel tells at once through a descriptor (pidfd); where it refuses
that, as old kernels and some sandboxes do, its entry in /proc is looked at again and again."""

from __future__ import annotations

import os
import time

from everystep.lane.host import is_readable, process_start

_LOOK_SECONDS = 0.01


class ProcessWatch:
    """Exactly the process that started then: its pid may be another's by now."""

    def __init__(self, pid: int, start: int = 0) -> None:
        self._pid = pid
        self._start = start or process_start(pid)
        self.fd = -1  # readable once it has ended, if there is one
        self.refused = ""  # why there is none
        try:
            self.fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except (
            OSError,
            AttributeError,
        ) as error:  # a Python built for old kernels has no such call
            self.refused = (
                f"pidfd_open is refused here ({getattr(error, 'strerror', None) or error}): "
                "whether trainer and shadow live is polled in /proc"
            )
        if process_start(pid) != self._start:
            self.close()

    @property
    def gone(self) -> bool:
        if self.fd >= 0:
            return is_readable(self.fd)
        return not self._start or process_start(self._pid) != self._start

    def wait_gone(self, seconds: float) -> bool:
        if self.fd >= 0:
            return is_readable(self.fd, seconds)
        deadline = time.monotonic() + seconds
        while not self.gone and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return self.gone

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
