"""Early end of a run whose verification no longer improves (`train.stop_early`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from facetrain.text import count_text
from facetrain.training.settings import StopEarlySettings


class EarlyStop(BaseModel, frozen=True):
    """Best value of a metric, and how many verifications followed it. Part of every checkpoint; equal on all ranks."""

    metric: str = ""
    """Metric, named `set/metric`; empty before the first verification."""
    best: float | None = None
    """Value of the last gain; None as long as no value was finite."""
    best_step: int = 0
    waited: int = 0
    """Verifications since the last gain."""

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> EarlyStop:
        """Return the state in the metadata of a checkpoint; the state before the first verification without one."""
        try:
            return cls.model_validate(meta.get("early_stop"))
        except ValueError:
            return cls()

    def after(self, step: int, metrics: Mapping[str, float], settings: StopEarlySettings) -> EarlyStop:
        """Return the state after a verification. A metric that is absent or not finite is no gain.

        The verification before the first step does not count: fine-tuning often begins with a loss of accuracy, and is
        not over as long as it makes up for it.
        """
        if step == 0:
            return self
        name = settings.metric
        if name != self.metric:  # the config of a resumed run may name another one
            return EarlyStop(metric=name).after(step, metrics, settings)
        value = metrics.get(name, math.nan)
        if math.isfinite(value) and (self.best is None or value - self.best > settings.min_gain):
            return EarlyStop(metric=name, best=value, best_step=step)
        return self.model_copy(update={"waited": self.waited + 1})

    def reason(self, settings: StopEarlySettings | None) -> str:
        """Return why the run ends after this verification; empty if it goes on."""
        if settings is None or settings.metric != self.metric or self.waited < settings.patience:
            return ""
        best = "" if self.best is None else f" over {self.best:.6g} at step {self.best_step:,}"
        return f"stopped early: no gain of {self.metric} in {count_text(self.waited, 'verification')}{best}"
