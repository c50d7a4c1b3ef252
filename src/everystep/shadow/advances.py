"""What replays steps in this process: twins at once, torch when it has loaded. Main thread only, but for the
import of torch."""

from __future__ import annotations

import importlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from everystep.core.census import Mode
from everystep.process.config import ShadowConfig
from everystep.shadow.intake import Intake
from everystep.shadow.replica import Replica


class Advances:
    """Gives the intake one for each optimizer whose steps are replayed here."""

    def __init__(self, config: ShadowConfig, replica: Replica, intake: Intake) -> None:
        self._config, self._replica, self._intake = config, replica, intake
        self._by_twins = self._replayed(twins=True)
        self._by_torch = self._replayed(twins=False)
        self._loading: Future[Any] | None = None

    def _replayed(self, *, twins: bool) -> set[int]:
        specs = enumerate(self._config.census.optimizers)
        return {i for i, s in specs if s.mode is Mode.REPLAY and bool(s.twins) is twins}

    def load_torch(self) -> None:
        """Beside the loop, and only where it is needed: it takes seconds."""
        if self._by_torch:
            loader = ThreadPoolExecutor(1, "everystep-torch")
            self._loading = loader.submit(self._import)
            loader.shutdown(wait=False)

    def use_twins(self) -> None:
        """Twins need no torch: where they do everything, this process never loads it."""
        if self._by_twins:
            module = importlib.import_module("everystep.shadow.twin_advance")
            for index in self._by_twins:
                advance = module.twin_advance(self._config, self._replica, index)
                self._intake.state.advances[index] = advance

    def use_torch_if_loaded(self) -> None:
        if self._loading is not None and self._loading.done():
            module = self._loading.result()  # raises what went wrong there
            advance = module.Advance(self._config.census, self._replica)
            self._intake.state.advances |= dict.fromkeys(self._by_torch, advance)
            self._loading = None

    @property
    def complete(self) -> bool:
        return self._by_twins | self._by_torch <= self._intake.state.advances.keys()

    def _import(self) -> Any:
        module = importlib.import_module("everystep.shadow.advance")
        module.torch.set_num_threads(self._config.replay_threads)
        return module
