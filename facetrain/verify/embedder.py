"""Embed many images with the work shared by all ranks."""

# N images   M distinct images   B batch   D embedding

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from facetrain.data.augment import normalize
from facetrain.data.decode import decode_rgb, resize_square
from facetrain.distributed import collectives
from facetrain.progress import ProgressCallback
from facetrain.verify.subjects import numbers_of

Embedder = Callable[[Tensor], Tensor]
"""Maps normalized images (B, 3, H, W) to embeddings (B, D)."""
Crop = Callable[[np.ndarray, int, int], np.ndarray]
"""Makes uint8 (size, size, 3) of a decoded image (H, W, 3), its number, and the size."""


def middle(image: np.ndarray, number: int, size: int) -> np.ndarray:
    """Take the middle of an aligned image."""
    return resize_square(image, size)


def autocast(device: torch.device, bf16: bool) -> Callable[[], AbstractContextManager[object]]:
    """Return what a network is run in: bfloat16 where its operations allow it, or as it is."""
    return partial(torch.autocast, device.type, torch.bfloat16) if bf16 else nullcontext


@dataclass(frozen=True)
class ImageEmbedder:
    """A network, and how its images are read. `prepare` brings uint8 (B, H, W, 3) to what it takes."""

    embed: Embedder
    image_size: int
    batch_size: int
    device: torch.device
    workers: int = 2
    prepare: Callable[[Tensor], Tensor] = normalize
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    progress: ProgressCallback | None = None
    """Called with the number of this rank's images of a set that are done, and their total."""

    def both(self, images: Sequence[bytes], *, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the embeddings of encoded images and of their mirror images: float32 (N, D) each.

        Collective: every rank embeds a share, and all get the whole. An image that stands in several pairs
        is embedded once.

        Raises:
            ImageError: an image cannot be decoded; the message has its number.
        """
        first_M, distinct_N = np.unique(numbers_of(images), return_index=True, return_inverse=True)[1:]
        both_M2D = self._shared(
            images,
            first_M.tolist(),
            name,
            middle,
            lambda image: torch.stack([self.embed(image), self.embed(image.flip(3))], 1),
        )
        return both_M2D[distinct_N, 0], both_M2D[distinct_N, 1]

    def summed(
        self,
        images: Sequence[bytes],
        *,
        name: str,
        flip: bool = True,
        crop: Crop = middle,
        chosen: range | None = None,
    ) -> np.ndarray:
        """Return the embeddings of encoded images, with `flip` added to those of their mirror images.

        As `both`, and half as large where there are millions; of all images, or of those `chosen`.
        """

        def embed(image: Tensor) -> Tensor:
            # Added in float32, also where the network works in bfloat16.
            plain = self.embed(image).float()
            return plain + self.embed(image.flip(3)).float() if flip else plain

        if chosen is None:
            chosen = range(len(images))
        return self._shared(images, chosen, name, crop, embed)

    def _shared(
        self,
        images: Sequence[bytes],
        chosen: Sequence[int],
        name: str,
        crop: Crop,
        embed: Embedder,
    ) -> np.ndarray:
        """Return what `embed` makes of the chosen images."""
        rank, world_size = collectives.rank(), collectives.world_size()
        # As many on each rank, so that they can be gathered; the surplus repeats the last image.
        share = -(-len(chosen) // world_size)
        mine = [chosen[min(n, len(chosen) - 1)] for n in range(rank * share, (rank + 1) * share)]
        found: Tensor | None = None
        with torch.no_grad(), self.autocast():
            for start, image_BHWC in self._decoded(images, mine, name, crop):
                image = self.prepare(image_BHWC.to(self.device, non_blocking=True))
                rows = embed(image).float().cpu()
                if found is None:
                    found = rows.new_empty((share, *rows.shape[1:]))
                found[start : start + len(rows)] = rows
                if self.progress:
                    self.progress(start + len(rows), share)
        assert found is not None, "no images"
        return collectives.gather(found).flatten(0, 1)[: len(chosen)].numpy()

    def _decoded(
        self, images: Sequence[bytes], numbers: list[int], name: str, crop: Crop
    ) -> Iterator[tuple[int, Tensor]]:
        def load(number: int) -> np.ndarray:
            image = decode_rgb(images[number], location=f"{name}: image {number}")
            return crop(image, number, self.image_size)

        starts = range(0, len(numbers), self.batch_size)
        with ThreadPoolExecutor(max(self.workers, 1)) as pool:
            # One batch ahead: the next is decoded while the network works.
            batches = (pool.map(load, numbers[start : start + self.batch_size]) for start in starts)
            pending = next(batches, None)
            for start in starts:
                assert pending is not None, "as many batches as starts"
                coming = next(batches, None)
                yield start, torch.from_numpy(np.stack(list(pending)))
                pending = coming
