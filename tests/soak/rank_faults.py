"""Fault in one rank of a run at a given place, for `tests.soak.clock`. Loaded by `sitecustomize` in every process.

The environment variable CLOCK has the place, the fault, and the file that gets the time of the fault, as JSON.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

PLACES = {
    "start-up": ("facetrain.run.prepare", "open_data", 1),
    "loading": ("facetrain.data.loading.reader_pool", "ReaderPool.wait", 6),
    "forward": ("torch.nn.parallel.distributed", "DistributedDataParallel.forward", 6),
    "head": ("facetrain.head.margin_head", "MarginHead.__call__", 6),
    "head, sampled": ("facetrain.head.margin_head", "MarginHead.__call__", 6),
    "gather": ("facetrain.distributed.collectives", "GatheredRows.wait", 6),
    "update": ("facetrain.optim.stepper", "Stepper.finish", 6),
    "verification": ("facetrain.embeddings.embedder", "ImageEmbedder._embed_shared", 2),
    "save": ("facetrain.checkpoint.save", "CheckpointWriter._write_file", 1),
    "end": ("facetrain.run.train_prepared", "write_results", 1),
}
"""Module, function and number of the call at which the fault happens."""


def hang_in_python() -> None:
    while True:
        time.sleep(0.05)


def hang_in_c() -> None:
    """Block without Python's lock and without seeing signals, as a collective that another rank has not joined."""
    mutex = ctypes.create_string_buffer(256)
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


FAULTS: dict[str, Callable[[], object]] = {
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hangs in Python": hang_in_python,
    "hangs in a collective": hang_in_c,
    "loses its network": lambda: subprocess.run(
        ["ip", "link", "set", os.environ["CLOCK_INTERFACE"], "down"], check=True
    ),
    "loses its disk": lambda: Path(os.environ["LOST_DISK_WHEN"]).touch(),
}


class _PatchAfterImport(MetaPathFinder):
    """Finder that replaces a function when its module has been imported."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._module, self._name, self._call = PLACES[settings["place"]]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the module, with a loader that patches it."""
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            self._patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec

    def _patch(self, module: Any) -> None:
        owner_name, _, name = self._name.rpartition(".")
        owner = operator.attrgetter(owner_name)(module) if owner_name else module
        original, calls = getattr(owner, name), 0

        @wraps(original)
        def faulty(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self._call:
                Path(self._settings["injected"]).write_text(str(time.time()))
                FAULTS[self._settings["fault"]]()
            return original(*args, **options)

        setattr(owner, name, faulty)


def install() -> None:
    """Patch the function of the fault, in the rank that is to fail."""
    settings = json.loads(os.environ.get("CLOCK", "{}"))
    is_reader = any("multiprocessing" in argument for argument in sys.orig_argv)
    if settings and os.environ.get("RANK") == "1" and not is_reader:
        sys.meta_path.insert(0, _PatchAfterImport(settings))
