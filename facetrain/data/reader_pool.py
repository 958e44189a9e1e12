"""Processes that fill slots of shared memory, or this process where none are wanted.

Processes, not threads: a 112 × 112 JPEG takes about as long to decode as Python needs between two of
them, so that threads wait for Python's lock half of the time (benchmarks/loader.py).
"""

from __future__ import annotations

import multiprocessing
import selectors
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize

import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.reader import Done, Filler, Slots, Task, serve
from facetrain.errors import RunError

TASK_ROWS = 64
"""Images a task: few enough to spread a batch over many processes, enough to make messages rare."""


class ReaderPool:
    """Fills slots: `submit` the numbers of a slot's images, `wait` until its rows stand."""

    def __init__(
        self, source: FaceDataset, slots: Slots, *, workers: int, skip: bool, leave_jpeg: bool = False
    ) -> None:
        self._filler = Filler(source, slots, skip=skip, leave_jpeg=leave_jpeg)
        self._open: dict[int, int] = {}
        self._answers: dict[int, list[Done]] = {}
        self._mine: dict[int, list[Task]] = {}
        context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[SpawnProcess, Connection]] = []
        # Kept: multiprocessing's own wait asks the system to watch every connection anew each time.
        self._answering = selectors.DefaultSelector()
        for number in range(workers):
            here, there = context.Pipe()
            process = context.Process(
                target=serve,
                args=(there, source, slots, skip, leave_jpeg),
                name=f"reader-{number}",
                daemon=True,
            )
            process.start()
            there.close()
            self._workers.append((process, here))
            self._answering.register(here, selectors.EVENT_READ, number)
        self._load = [0] * workers
        # Before multiprocessing's own end, which would wait for processes that ignore its SIGTERM.
        self.close = Finalize(self, _hang_up, args=(self._workers, self._answering), exitpriority=10)
        """End the processes."""

    def submit(self, slot: int, numbers: np.ndarray) -> None:
        """Have rows 0, 1, … of a slot filled with these images."""
        tasks = [
            Task(slot, row, tuple(numbers[row : row + TASK_ROWS].tolist()))
            for row in range(0, len(numbers), TASK_ROWS)
        ]
        self._answers[slot], self._open[slot] = [], len(tasks)
        if not self._workers:
            self._mine[slot] = tasks
            return
        for task in tasks:
            idlest = self._load.index(min(self._load))
            self._load[idlest] += 1
            try:
                self._workers[idlest][1].send(task)
            except ConnectionError:
                self._tell_of_death(idlest)

    def wait(self, slot: int) -> Sequence[str]:
        """Wait until a slot is full; return what was skipped in it.

        Raises:
            Exception: what went wrong in the task with the lowest row, as it was raised there.
            RunError: a process has ended.
        """
        for task in self._mine.pop(slot, []):
            self._note(self._filler.fill(task))
        while self._open[slot]:
            for ready, _ in self._answering.select():
                worker = ready.data
                try:
                    self._note(self._workers[worker][1].recv())
                except (EOFError, ConnectionError):
                    self._tell_of_death(worker)
                self._load[worker] -= 1
        answers = sorted(self._answers.pop(slot), key=lambda answer: answer.task.row)
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return [message for answer in answers for message in answer.skipped]

    def _note(self, answer: Done) -> None:
        self._answers[answer.task.slot].append(answer)
        self._open[answer.task.slot] -= 1

    def _tell_of_death(self, worker: int) -> None:
        process = self._workers[worker][0]
        process.join(1)
        raise RunError(
            f"reading process {process.pid} ended by itself (exit code {process.exitcode}); -9 mostly means "
            "that "
            "the machine ran out of memory: give it more, or set data.workers lower"
        )


def _hang_up(workers: list[tuple[SpawnProcess, Connection]], answering: selectors.BaseSelector) -> None:
    answering.close()
    for _, connection in workers:
        connection.close()
    for process, _ in workers:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
