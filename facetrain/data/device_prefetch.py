"""How a batch comes from the memory that reading processes fill to the device that trains."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

HOLDS = 3
"""Slots beyond those that are read ahead: the batch in use or on its way, the one before it, and one to fill."""


class HostPrefetcher:
    """Lends the slots themselves, and gives out copies while others are held: a batch stays what it is."""

    def __init__(self, slots: np.ndarray) -> None:
        self._slots = slots
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}

    def begin(self) -> None:
        """Nothing is on its way."""

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Do work that makes a tensor."""
        return work()

    def send(self, array: np.ndarray) -> Tensor:
        """Return an array as a tensor."""
        return torch.from_numpy(array)

    def send_images(self, slot: int) -> Tensor:
        """Return the images of a slot."""
        held = sum(not self.has_done(other) for other in self._lent)
        if held >= HOLDS - 1:
            return torch.from_numpy(self._slots[slot].copy())
        view = self._slots[slot]
        self._lent[slot] = weakref.ref(view)
        return torch.from_numpy(view)

    def has_done(self, slot: int) -> bool:
        """Whether nobody holds the images of a slot, so that it can be filled again."""
        return slot not in self._lent or self._lent[slot]() is None

    def close(self) -> None:
        """There is nothing to give back."""


class CudaPrefetcher:
    """Copies to the device on a stream of its own, beside the training of the step before."""

    def __init__(self, slots: np.ndarray, device: torch.device) -> None:
        self._slots, self._device = slots, device
        self._stream = torch.cuda.Stream(device)
        self._address, size = slots.ctypes.data, slots.nbytes
        # Where the system forbids it, copies are slower and still right.
        self._is_locked = int(torch.cuda.cudart().cudaHostRegister(self._address, size, 0)) == 0
        if not self._is_locked:
            # CUDA remembers the refusal, and tells whoever launches a kernel next.
            with suppress(RuntimeError):
                torch.ones(1, device=device)

    def begin(self) -> None:
        """Wait for what was sent before: the slot that is filled next is that of an earlier step."""
        self._stream.synchronize()

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Do work that makes a tensor on the device, beside what runs there."""
        with torch.cuda.stream(self._stream):
            tensor = work()
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        tensor.record_stream(current)
        return tensor

    def send(self, array: np.ndarray) -> Tensor:
        """Copy an array to the device."""
        return self.run(lambda: torch.from_numpy(array).to(self._device, non_blocking=True))

    def send_images(self, slot: int) -> Tensor:
        """Copy the images of a slot to the device."""
        return self.send(self._slots[slot])

    def has_done(self, slot: int) -> bool:
        """Whether a slot can be filled again: the first in the queue of free ones always can."""
        return True

    def close(self) -> None:
        """Unlock the memory, where no work is queued: that may wait for a rank that is gone, and unlocking for it."""
        self._stream.synchronize()
        if self._is_locked and torch.cuda.current_stream(self._device).query():
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._is_locked = False


def build_prefetcher(slots: np.ndarray, device: torch.device | None) -> HostPrefetcher | CudaPrefetcher:
    """Return what brings slots, uint8 (slots, rows, H, W, 3), to a device."""
    if device is not None and device.type == "cuda":
        return CudaPrefetcher(slots, device)
    return HostPrefetcher(slots)
