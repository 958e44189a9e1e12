"""JPEGs decoded by NVIDIA DALI, a batch at once. It comes with `facetrain[dali]`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from facetrain.errors import DataError


def require_dali() -> None:
    """Look whether DALI is installed, without loading it.

    Raises:
        DataError: it is not.
    """
    if find_spec("nvidia") is None or find_spec("nvidia.dali") is None:
        raise DataError(
            "data.decode: dali: NVIDIA DALI is not installed; `pip install facetrain[dali]`, or set "
            "data.decode to cpu"
        )


class DaliDecoder:
    """Decodes images that are all of one size: on CUDA with nvJPEG, else on the host's cores."""

    def __init__(self, device: torch.device, *, batch_size: int, threads: int) -> None:
        require_dali()
        self._device = device
        self._size = {"batch_size": batch_size, "num_threads": threads}
        self._pipeline: Any = None

    def __call__(self, encoded: list[Tensor]) -> Tensor:
        """Return uint8 (B, H, W, 3), RGB, on the device, for B JPEGs, each uint8 (bytes,) on the host.

        Raises:
            RuntimeError: DALI refuses one of them.
        """
        # A pipeline in which something went wrong cannot be used again: it is let go unless all goes well.
        pipeline, self._pipeline = self._pipeline or self._build(), None
        # As NumPy's arrays: for tensors of the host, too, DALI asks torch for a stream of CUDA. It is given none here
        # either: only pipelines that run ahead take one. So it has done when this returns.
        (image,) = pipeline.run(jpeg=[each.numpy() for each in encoded])
        image_BHWC = from_dlpack(image.as_tensor()).clone()
        if self._device.type == "cuda":
            # DALI's own memory is free again when this function is left.
            torch.cuda.current_stream(self._device).synchronize()
        self._pipeline = pipeline
        return image_BHWC

    def _build(self) -> Any:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline

        on_cuda = self._device.type == "cuda"
        device_id = (self._device.index or 0) if on_cuda else None
        # One batch at a time: which images the next one has is told only when it is asked for.
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
