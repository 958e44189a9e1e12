"""Transfer of batches from batch slots to the training device."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from facetrain.device.page_locked import lock_pages

EXTRA_SLOTS = 3
"""Slots besides those that are read ahead: the batch in use or in transfer, the previous one, and one to fill."""

_STILL_LOCKED: dict[int, tuple[torch.cuda.Stream, np.ndarray]] = {}
"""Slots of closed prefetchers by address, and the stream that was not idle then.

While CUDA counts these addresses as locked, no other memory may get them: a GPU would read the old pages.
"""


class HostPrefetcher:
    """Batches for training on the CPU: views of the slots, without a copy.

    A batch keeps its content as long as it is referenced: a slot is not filled again until then, and
    further batches are copied while `EXTRA_SLOTS - 1` are referenced.
    """

    def __init__(self, slots: np.ndarray) -> None:
        self._slots = slots
        self._views: dict[int, weakref.ref[np.ndarray]] = {}

    def wait_for_transfers(self) -> None:
        """Do nothing: there are no transfers."""

    def to_device(self, array: np.ndarray) -> Tensor:
        """Return an array as a tensor that shares its memory."""
        return torch.from_numpy(array)

    def slot_to_device(self, slot: int) -> Tensor:
        """Return the images of a slot: uint8 (rows, H, W, 3)."""
        in_use = sum(not self.is_free(other) for other in self._views)
        # A caller that keeps its batches, as a list of them does, gets copies: no slot would become free otherwise.
        if in_use >= EXTRA_SLOTS - 1:
            return torch.from_numpy(self._slots[slot].copy())
        view = self._slots[slot]
        self._views[slot] = weakref.ref(view)
        return torch.from_numpy(view)

    def is_free(self, slot: int) -> bool:
        """Return whether no batch refers to a slot any more, so that it can be filled again."""
        return slot not in self._views or self._views[slot]() is None

    def close(self) -> None:
        """Do nothing: there are no resources."""


class DevicePrefetcher:
    """Batches for training on CUDA: copied from page-locked memory on a separate stream."""

    def __init__(self, slots: np.ndarray, device: torch.device) -> None:
        self._slots, self._device = slots, device
        self._stream = torch.cuda.Stream(device)
        self._address = slots.ctypes.data
        # Without locked memory, copies are slower, but correct.
        self._is_locked = lock_pages(self._address, slots.nbytes) == 0

    def wait_for_transfers(self) -> None:
        """Wait until all transfers have ended, so that the slots of earlier steps can be filled again."""
        self._stream.synchronize()
        _unlock_where_idle()  # of a stage before, once the host has waited for all kernels, as before a verification

    def to_device(self, array: np.ndarray) -> Tensor:
        """Copy an array to the device on the transfer stream, asynchronously if it is page-locked."""
        with torch.cuda.stream(self._stream):
            tensor = torch.from_numpy(array).to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        tensor.record_stream(current)  # otherwise the allocator may reuse its memory too early
        return tensor

    def slot_to_device(self, slot: int) -> Tensor:
        """Copy the images of a slot to the device: uint8 (rows, H, W, 3)."""
        return self.to_device(self._slots[slot])

    def is_free(self, slot: int) -> bool:
        """Return True: `wait_for_transfers` comes before a slot is filled again."""
        return True

    def close(self) -> None:
        """Release the page-locked memory; while kernels are still queued, leave that to later prefetchers.

        A queued collective may wait forever for a lost rank, and cudaHostUnregister waits for all kernels.
        """
        self._stream.synchronize()
        if self._is_locked:
            _STILL_LOCKED[self._address] = torch.cuda.current_stream(self._device), self._slots
            self._is_locked = False
        _unlock_where_idle()


def _unlock_where_idle() -> None:
    """Release the slots of closed prefetchers whose stream has no kernels any more."""
    for address, (stream, _) in list(_STILL_LOCKED.items()):
        if stream.query():
            torch.cuda.cudart().cudaHostUnregister(address)
            del _STILL_LOCKED[address]


def build_prefetcher(slots: np.ndarray, device: torch.device) -> HostPrefetcher | DevicePrefetcher:
    """Return the prefetcher of a device for slots, uint8 (slots, rows, H, W, 3)."""
    return DevicePrefetcher(slots, device) if device.type == "cuda" else HostPrefetcher(slots)
