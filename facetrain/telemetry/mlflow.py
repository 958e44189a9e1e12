"""MLflow as a sink of metrics."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from facetrain.errors import ConfigError
from facetrain.files import read_regular_text, write_atomically
from facetrain.telemetry.metric_names import grouped_name
from facetrain.telemetry.recorder import RunEnd, Sink

_ID_FILE = "mlflow_run_id.txt"
_STATUS: dict[RunEnd, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MAX_BATCH = 100
"""Number of parameters that MLflow takes in one request."""
_MAX_VALUE = 500
"""Characters of a parameter that every MLflow server takes."""
_SERVER = re.compile(r"https?:|databricks")
_REFUSED = re.compile(r"[^\w\-. /]")
"""Character that a name of MLflow may not have; a verification set may."""


class MLflow(Sink):
    """Writer of scalars to a run of MLflow, under the grouped names of the metrics.

    MLflow allows few characters in names: `tar@1e-03` is `tar_at_1e-03` there, and `_` replaces other characters that
    it refuses. The id of the run is kept in the run folder, so that a resumed run continues it.
    """

    def __init__(
        self, folder: Path, *, uri: str, experiment: str, name: str, config: dict[str, Any], resumed: bool
    ) -> None:
        """Open the run.

        Args:
            folder: run folder.
            uri: tracking URI of MLflow.
            experiment: name of the experiment, which is created if it does not exist.
            name: name of the run.
            config: config of the run as plain values; its keys become parameters, such as "optim.lr".
            resumed: whether to continue the run whose id is in the folder, if there is one.

        Raises:
            ConfigError: this MLflow cannot write to `uri`.
        """
        from mlflow.entities import Param

        self._client = _connect(uri)
        path = folder / _ID_FILE
        if resumed and path.exists():
            self._id = read_regular_text(path).strip()
            self._client.update_run(self._id, status="RUNNING")
            return  # parameters of MLflow cannot change
        known = self._client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known else self._client.create_experiment(experiment)
        self._id = self._client.create_run(experiment_id, run_name=name).info.run_id
        # MLflow chooses the id: a run that ends before this line stays there without a continuation.
        write_atomically(path, self._id + "\n")
        params = [Param(key, str(value)[:_MAX_VALUE]) for key, value in flatten(config)]
        for first in range(0, len(params), _MAX_BATCH):
            self._client.log_batch(self._id, params=params[first : first + _MAX_BATCH])

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the values of a step."""
        from mlflow.entities import Metric

        # All values of a report in one request: each takes a round trip.
        now_ms = int(time.time() * 1000)
        names = {name: _REFUSED.sub("_", grouped_name(name).replace("@", "_at_")) for name in values}
        metrics = [Metric(names[name], value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, end: RunEnd = "finished") -> None:
        """Mark the run as finished, killed (if it was stopped) or failed."""
        self._client.set_terminated(self._id, status=_STATUS[end])


def _connect(uri: str) -> Any:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        return MlflowClient(tracking_uri=uri)
    except MlflowException as error:
        if _SERVER.match(uri):
            raise
        # MLflow's text names a database as the way out, which the small package of `facetrain[mlflow]` does not read.
        raise ConfigError(
            "needs a server: run `mlflow server` (pip install mlflow) and set log.mlflow=http://127.0.0.1:5000; for a "
            "folder, set the environment variable MLFLOW_ALLOW_FILE_STORE=true"
        ) from error


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested values."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
