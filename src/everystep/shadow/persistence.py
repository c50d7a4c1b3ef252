"""What makes steps durable: bases, the log behind them, and the bucket behind both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everystep.core.cadence import until_tuned
from everystep.core.events import Event, Seal
from everystep.core.limits import limits_of
from everystep.core.retention import rules_of
from everystep.process.config import ShadowConfig
from everystep.shadow.base_scheduler import BaseScheduler
from everystep.shadow.base_writer import BaseWriter
from everystep.shadow.directory_watch import DirectoryState, DirectoryWatch
from everystep.shadow.disk_forecast import DiskForecast
from everystep.shadow.intake import Intake
from everystep.shadow.logkeeper import LogKeeper
from everystep.shadow.report import describe_store
from everystep.shadow.shipper import Shipper
from everystep.shadow.tuning import Tuner, first_batch
from everystep.store.disk.meter import Meter

_LAST_SECONDS = 5.0
_SHIP_LAST_SECONDS = 20.0


class Persistence:
    """Owned by the main thread."""

    def __init__(self, config: ShadowConfig, intake: Intake) -> None:
        self._config = config
        run, options = Path(config.run), until_tuned(config.options)
        meter = Meter(limits_of(options))
        self.base_writer = BaseWriter(
            run, config.continues, rules_of(options), config.run_id, meter, config.known
        )
        self.directory_watch = DirectoryWatch(self._look)
        self.base_writer.on_failure = self.directory_watch.look
        self.base_writer.disk_forecast = self.disk_forecast = DiskForecast(
            run, config.census, options
        )
        self.base_scheduler = BaseScheduler(options, intake, self.base_writer)
        self.log: LogKeeper | None = None
        if options.durable_log:
            self.log = LogKeeper(run, config.census, first_batch(options), meter)
            self.base_writer.ended_log = self.log.ended
        self.tuning = Tuner(config, intake, self.base_writer, self.base_scheduler, self.log)
        rate = options.tuning.bucket_bytes_per_second
        self.shipper = Shipper(run, options.bucket, rate, config.log_is_resumed)
        self.shipper.check_directory = self.base_writer.check_directory

    def _look(self) -> DirectoryState:
        return DirectoryState(self.base_writer.what_is_lost(), self.shipper.has_all_tags())

    def on_record(self, seal: Seal, entries: list[tuple[list[Event], memoryview]]) -> None:
        self.tuning.on_record(seal, entries)
        if self.log is not None:
            self.log.offer(seal, entries)

    def look_after_log_and_bucket(self, *, leaving: bool) -> None:
        """Write and ship what is due. `leaving`: nothing more comes, so that nothing is waited for."""
        state = self.base_writer.state
        if self.log is not None:
            lost = self.directory_watch.state.lost
            self.log.nowhere = lost or self.base_writer.why_no_term
            if not lost:
                self.log.look_after(
                    self.base_writer.run_id,
                    state.term,
                    state.durable,
                    reached=state.reached,
                    fits=self.base_writer.base_fits(self._config.census),
                    now=leaving,
                    base_bytes=lambda: self.base_scheduler.base_bytes,
                    clears_up=self.base_writer.clears_up,
                )
        self.shipper.look_after(state.term, self.log)

    def has_durable(self, step: int) -> bool:
        state = self.base_writer.state
        return bool(state.term) and state.durable is not None and state.durable.step >= step

    @property
    def shipped(self) -> bool:
        return self.shipper.settled(
            self.base_writer.state, tagged=self.directory_watch.state.tagged
        )

    @property
    def owes(self) -> bool:
        """Something is not in the store, or not in the bucket."""
        return self.base_scheduler.has_news or not self.shipped

    def describe(self) -> dict[str, Any]:
        resumed = self._config.log_is_resumed
        return {
            **describe_store(self.base_writer, self.log, self.shipper, resumed),
            "disk_forecast": self.disk_forecast.latest,
            **self.tuning.describe(),
        }

    def finish(self, *, retired: bool, ended_well: bool) -> None:
        """What is being written is written to its end. `retired`: the rest is another shadow's."""
        if self.log is not None:
            self.log.wait(_LAST_SECONDS)
        if not retired:
            self.base_writer.wait(_LAST_SECONDS)  # old bases and logs are still being removed
        if ended_well:
            self.base_writer.say_closed()

    def ship_the_rest(self) -> None:
        self.shipper.finish(self.base_writer.state, _SHIP_LAST_SECONDS)
