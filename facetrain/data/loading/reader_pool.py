"""Pool of reading processes that fill batch slots.

Processes, not threads: decoding a 112 × 112 JPEG takes about as long as the Python code between two
of them, so threads would wait for Python's global lock half of the time.
"""

from __future__ import annotations

import contextlib
import selectors
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import NoReturn

import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.loading.reader import BatchSlots, ImageReader, ReadRequest, ReadResult, run_reader
from facetrain.distributed.spawn import GROUP_SIGNALS, HelperContext, HelperProcess, signals_blocked
from facetrain.errors import DataError, RunError

REQUEST_ROWS = 64
"""Images per request: few enough to spread a batch over many processes, enough to keep messages rare."""
_MOST_QUEUED = 128
"""Requests of one process at a time. About 170 fit into a connection, and as many results: with more of both, this
process would wait for the reading process to take a request, and that one for this process to take a result."""
_JOIN_S = 5
"""Seconds that a process may take to end before it is killed."""


class ReaderPool:
    """Reading processes: `submit` starts filling a slot, `wait` blocks until the slot is full.

    With `workers=0`, `wait` reads in the calling process.
    """

    def __init__(self, dataset: FaceDataset, slots: BatchSlots, *, workers: int, skip_bad: bool) -> None:
        self._dataset = dataset
        self._reader = ImageReader(dataset, slots, skip_bad=skip_bad)
        self._num_open: dict[int, int] = {}
        self._results: dict[int, list[ReadResult]] = {}
        self._in_process: dict[int, list[ReadRequest]] = {}
        context = HelperContext()  # fork would copy CUDA state and locks of threads
        self._workers: list[tuple[HelperProcess, Connection]] = []
        # Kept open: multiprocessing.connection.wait registers all connections again in each call.
        self._selector = selectors.DefaultSelector()
        # Before the first start, which Ctrl-C may interrupt. It runs before multiprocessing's exit handler, which would
        # wait forever: readers ignore its SIGTERM.
        self.close = Finalize(self, _stop_workers, args=(self._workers, self._selector), exitpriority=10)
        """End the processes; can be called twice."""
        for number in range(workers):
            connection, remote = context.Pipe()
            process = context.Process(
                target=run_reader,
                args=(remote, dataset, slots, skip_bad),
                name=f"reader-{number}",
                daemon=True,
            )
            with signals_blocked(*GROUP_SIGNALS):
                process.start()
            remote.close()
            self._workers.append((process, connection))
            self._selector.register(connection, selectors.EVENT_READ, number)
        # Of each process, in the order in which it answers them.
        self._queued: list[deque[ReadRequest]] = [deque() for _ in range(workers)]
        self._waiting: deque[ReadRequest] = deque()

    def submit(self, slot: int, indices: np.ndarray) -> None:
        """Start reading images, int64 (rows,), into rows 0, 1, … of a slot.

        Raises:
            RunError: if a reading process has ended.
        """
        requests = [
            ReadRequest(slot, row, tuple(indices[row : row + REQUEST_ROWS].tolist()))
            for row in range(0, len(indices), REQUEST_ROWS)
        ]
        self._results[slot], self._num_open[slot] = [], len(requests)
        if not self._workers:
            self._in_process[slot] = requests
            return
        self._waiting += requests
        # Results first: they make room in the connections for the new requests.
        while self._receive(0):
            pass
        self._send_waiting()

    def wait(self, slot: int) -> Sequence[str]:
        """Wait until a slot is full; return messages about the bad images that were replaced.

        Raises:
            Exception: the error of the first failed request, in the order of rows.
            RunError: a reading process has ended. A stopped one is found by the watchdog.
        """
        for request in self._in_process.pop(slot, []):
            self._add_result(self._reader.read(request))
        while self._num_open[slot]:
            self._receive(None)  # without a limit: a disk may be slow
            self._send_waiting()
        # Sorted, so that the same error is raised whatever process was faster.
        results = sorted(self._results.pop(slot), key=lambda result: result.request.row)
        for result in results:
            if result.error is not None:
                raise result.error
        return [message for result in results for message in result.skipped]

    def _send_waiting(self) -> None:
        """Send each waiting request to the process with the fewest, until all processes have enough."""
        while self._waiting:
            # Not in turn: a process may be held up by a slow disk or a large photo.
            idlest = min(range(len(self._queued)), key=lambda number: len(self._queued[number]))
            if len(self._queued[idlest]) == _MOST_QUEUED:
                return
            self._queued[idlest].append(self._waiting.popleft())
            try:
                self._workers[idlest][1].send(self._queued[idlest][-1])
            except ConnectionError:
                self._raise_worker_exited(idlest)

    def _receive(self, timeout_s: float | None) -> bool:
        """Receive one result of each process that has one; return whether there was one before the time was over."""
        events = self._selector.select(timeout_s)
        for ready, _ in events:
            worker = ready.data
            try:
                self._add_result(self._workers[worker][1].recv())
            except (EOFError, ConnectionError):
                self._raise_worker_exited(worker)
            self._queued[worker].popleft()
        return bool(events)

    def _add_result(self, result: ReadResult) -> None:
        self._results[result.request.slot].append(result)
        self._num_open[result.request.slot] -= 1

    def _raise_worker_exited(self, worker: int) -> NoReturn:
        process = self._workers[worker][0]
        process.join(1)  # its connection ends a moment before its exit code is known
        place = ""
        if self._queued[worker]:
            with contextlib.suppress(DataError):
                place = f" at or after {self._dataset.location(self._queued[worker][0].indices[0])}"
        raise RunError(
            f"reading process {process.pid} ended unexpectedly (exit code {process.exitcode}){place}; -9 usually "
            "means that the machine ran out of memory: add memory, or lower data.workers; with another code, a "
            "library crashed on an image there"
        )


def _stop_workers(workers: list[tuple[HelperProcess, Connection]], selector: selectors.BaseSelector) -> None:
    selector.close()
    for _, connection in workers:
        connection.close()
    for process, _ in workers:
        process.join(_JOIN_S)
        if process.is_alive():
            process.kill()
            process.join()
