"""The loop of a run without everystep: the reference. Its source goes into printed scripts."""

from __future__ import annotations


class Plain:
    """Counts steps, and keeps nothing."""

    def __init__(self, *given, **options):
        self.step, self.open = 0, False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def steps(self, total):
        while (self.step + self.open) < total:
            self.step, self.open = self.step + self.open, True
            yield self.step
        self.step, self.open = self.step + self.open, False

    def seal(self):
        self.step += 1

    def resume(self):
        return self.step

    def status(self):
        return {}

    def flush(self, *what):
        return self.step

    report = flush
