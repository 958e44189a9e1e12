"""Embedding of many encoded images, with the work shared by all ranks."""

# N images   M distinct images   B batch   D embedding

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from facetrain.data.augment import normalize
from facetrain.data.decode import decode_rgb, resize_square
from facetrain.distributed import collectives
from facetrain.models.inference_network import BLOCK
from facetrain.progress import ProgressCallback
from facetrain.verify.subjects import dense_ids

Network = Callable[[Tensor], Tensor]
"""Maps a prepared image batch (B, 3, H, W) to embeddings (B, D)."""
Crop = Callable[[np.ndarray, int, int], np.ndarray]
"""Maps a decoded image uint8 (H, W, 3), its index and `size` to uint8 (size, size, 3)."""


def crop_aligned(image: np.ndarray, index: int, size: int) -> np.ndarray:
    """Resize an aligned image to (size, size, 3); the longer side is cropped at the center."""
    return resize_square(image, size)


@dataclass(frozen=True)
class ImageEmbedder:
    """Network with the settings for decoding and batching its images."""

    network: Network
    image_size: int
    """Side of the network's input, pixels."""
    batch_size: int
    """Images per forward pass on each rank."""
    device: torch.device
    workers: int = 2
    """Threads that decode images on each rank."""
    prepare: Callable[[Tensor], Tensor] = normalize
    """Maps uint8 (B, H, W, 3) to the input of the network."""
    progress: ProgressCallback | None = None
    """Called after each batch with this rank's finished images and their total."""
    check_stop: Callable[[], None] | None = None
    """Called after each batch, on every rank the same number of times. It may raise to end the embedding, but
    then it must raise on all ranks, because the others would wait in the next collective."""

    @property
    def _pads_last_batch(self) -> bool:
        """Whether all batches have the same size: for another one, cuDNN would search its algorithms again."""
        return self.device.type == "cuda"

    def _least_batch(self, images: int) -> int:
        """Return the smallest number of images that the network gets at a time, if it embeds so many in total."""
        # The embeddings then do not depend on the number of ranks, see BLOCK; a few images are not worth it.
        return BLOCK if self.device.type == "cpu" and min(images, self.batch_size) >= BLOCK else 1

    def embed_plain_and_mirrored(
        self, images: Sequence[bytes], *, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the embeddings of encoded images and of their mirror images: float32 (N, D) each.

        Images with equal bytes are embedded once. Collective: every rank embeds a share, and all ranks get
        all rows. `name` is the name of the set in error messages.

        Raises:
            ImageError: an image cannot be decoded; the message has its index.
        """

        def embed_batch(image: Tensor) -> Tensor:
            return torch.stack([self.network(image), self.network(image.flip(3))], 1)

        first_M, distinct_N = np.unique(dense_ids(images), return_index=True, return_inverse=True)[1:]
        embedding_M2D = self._embed_shared(images, first_M.tolist(), name, crop_aligned, embed_batch)
        return embedding_M2D[distinct_N, 0], embedding_M2D[distinct_N, 1]

    def embed(
        self,
        images: Sequence[bytes],
        *,
        name: str,
        flip: bool = True,
        crop: Crop = crop_aligned,
        indices: range | None = None,
    ) -> np.ndarray:
        """Return the embeddings of encoded images: float32 (N, D), not normalized.

        With `flip`, the embedding of the mirror image is added. Needs half the memory of
        `embed_plain_and_mirrored`. `indices` selects a part of the images; by default all are embedded.
        Collective, like `embed_plain_and_mirrored`.

        Raises:
            ImageError: an image cannot be decoded; the message has its index.
        """

        def embed_batch(image: Tensor) -> Tensor:
            # Add in float32, even if the network computes in bfloat16.
            plain = self.network(image).float()
            return plain + self.network(image.flip(3)).float() if flip else plain

        selected = range(len(images)) if indices is None else indices
        return self._embed_shared(images, selected, name, crop, embed_batch)

    def embed_rows(self, images: Sequence[bytes], *, name: str, mirrored: bool, indices: range) -> np.ndarray:
        """Return the embeddings of encoded images: float32 (N, R, D), not normalized.

        Row 0 is that of the image. With `mirrored` there is a row 1, that of its mirror image. Collective, like
        `embed_plain_and_mirrored`.

        Raises:
            ImageError: an image cannot be decoded; the message has its index.
        """

        def embed_batch(image: Tensor) -> Tensor:
            views = [image, image.flip(3)] if mirrored else [image]
            return torch.stack([self.network(view).float() for view in views], 1)

        return self._embed_shared(images, indices, name, crop_aligned, embed_batch)

    def _embed_shared(
        self, images: Sequence[bytes], indices: Sequence[int], name: str, crop: Crop, embed_batch: Network
    ) -> np.ndarray:
        """Apply `embed_batch` to this rank's share of the images, and gather the rows of all ranks."""
        assert len(indices), "no images"
        rank, world_size = collectives.rank(), collectives.world_size()
        # A gather needs shares of equal size: the last ranks repeat the last image.
        share = -(-len(indices) // world_size)
        mine = [indices[min(n, len(indices) - 1)] for n in range(rank * share, (rank + 1) * share)]
        shard: Tensor | None = None
        with torch.no_grad():
            least = self._least_batch(len(indices))
            for start, image_BHWC in self._decode_batches(images, mine, name, crop, least):
                image = self.prepare(image_BHWC.to(self.device, non_blocking=True))
                rows = embed_batch(image).float().cpu()[: share - start]
                if shard is None:
                    shard = rows.new_empty((share, *rows.shape[1:]))
                shard[start : start + len(rows)] = rows
                if self.progress:
                    self.progress(start + len(rows), share)
                if self.check_stop:
                    self.check_stop()
        assert shard is not None, "a share has at least one batch"
        return collectives.gather(shard).flatten(0, 1)[: len(indices)].numpy()

    def _decode_batches(
        self, images: Sequence[bytes], indices: list[int], name: str, crop: Crop, least: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the position of each batch in `indices` and its images, uint8 (B, size, size, 3).

        The last batch may be filled up with copies of its last image, to `least` images or to the size of the others.
        """

        def decode(index: int) -> np.ndarray:
            image = decode_rgb(images[index], location=f"{name}: image {index}")
            return crop(image, index, self.image_size)

        starts = range(0, len(indices), self.batch_size)
        with ThreadPoolExecutor(max(self.workers, 1)) as pool:
            # The threads decode one batch ahead of the network.
            batches = (pool.map(decode, indices[start : start + self.batch_size]) for start in starts)
            pending = next(batches, None)
            for start in starts:
                assert pending is not None, "one batch for each start"
                following = next(batches, None)
                batch = list(pending)
                filled = self.batch_size if start and self._pads_last_batch else least
                batch += [batch[-1]] * (filled - len(batch))
                yield start, torch.from_numpy(np.stack(batch))
                pending = following
