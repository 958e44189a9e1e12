"""JPEG decoding by NVIDIA DALI, in whole batches; needs `pip install facetrain[dali]`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from facetrain.errors import DataError


def require_dali() -> None:
    """Check that DALI is installed, without importing it.

    Raises:
        DataError: if it is not installed.
    """
    if find_spec("nvidia") is None or find_spec("nvidia.dali") is None:
        raise DataError(
            "data.decode: dali: NVIDIA DALI is not installed; `pip install facetrain[dali]`, or set "
            "data.decode to cpu"
        )


class DaliDecoder:
    """Decoder of images of one size: nvJPEG on CUDA, otherwise the CPU.

    Raises:
        DataError: if DALI is not installed.
    """

    def __init__(self, device: torch.device, *, batch_size: int, threads: int) -> None:
        require_dali()
        self._device = device
        self._size = {"batch_size": batch_size, "num_threads": threads}
        self._pipeline: Any = None

    def __call__(self, encoded: list[Tensor]) -> Tensor:
        """Return uint8 (B, H, W, 3), RGB, on the device, for B JPEGs, each uint8 (bytes,) on the host.

        Raises:
            RuntimeError: if DALI cannot decode one of them.
        """
        # A pipeline cannot be used again after an error: it is kept only if this call succeeds.
        pipeline, self._pipeline = self._pipeline or self._build(), None
        # As NumPy arrays: for torch tensors, DALI asks torch for a CUDA stream, even on the host. Without a stream,
        # `run` returns when the images are complete.
        (image,) = pipeline.run(jpeg=[each.numpy() for each in encoded])
        image_BHWC = from_dlpack(image.as_tensor()).clone()
        if self._device.type == "cuda":
            # DALI reuses its output memory after this function returns: wait until the clone is complete.
            torch.cuda.current_stream(self._device).synchronize()
        self._pipeline = pipeline
        return image_BHWC

    def _build(self) -> Any:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline

        on_cuda = self._device.type == "cuda"
        device_id = (self._device.index or 0) if on_cuda else None
        # No prefetching: the images of the next batch are known only at the next call.
        pipeline = Pipeline(
            **self._size, device_id=device_id, prefetch_queue_depth=1, exec_pipelined=False, exec_async=False
        )
        with pipeline:
            jpeg = fn.external_source(name="jpeg", dtype=types.UINT8, ndim=1)
            pipeline.set_outputs(
                fn.decoders.image(
                    jpeg,
                    device="mixed" if on_cuda else "cpu",
                    output_type=types.RGB,
                    adjust_orientation=False,
                )
            )
        pipeline.build()
        return pipeline
