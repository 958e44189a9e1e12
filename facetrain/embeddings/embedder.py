"""Embedding of many encoded images, with the work shared by all ranks."""

# N images   M distinct images   B batch   D embedding

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from facetrain.data.formats.landmark_file import without_gaps
from facetrain.data.images.augment import mirror_landmarks
from facetrain.data.images.decode import decode_rgb, resize_square
from facetrain.data.images.normalize import normalize
from facetrain.data.tools.parallel import map_in_order
from facetrain.distinct import dense_ids
from facetrain.distributed import collectives
from facetrain.embeddings.image_inputs import image_location
from facetrain.errors import UnreadableError
from facetrain.face_landmarks import NORMALIZED_TEMPLATE
from facetrain.models.inference_network import BLOCK
from facetrain.progress import ProgressCallback

Network = Callable[..., Tensor]
"""Maps a prepared image batch (B, 3, H, W) to embeddings (B, D). If its attribute `takes_landmarks` is true, it also
takes their landmarks (B, 5, 2)."""
EncodedImage = bytes | np.ndarray
"""Bytes of an image file, or RGB pixels uint8 (H, W, 3)."""
Crop = Callable[[np.ndarray, int, int], np.ndarray]
"""Maps a decoded image uint8 (H, W, 3), its index and `size` to uint8 (size, size, 3)."""
Landmarks = np.ndarray | Sequence[np.ndarray]
"""Landmarks of each image (5, 2), as fractions of its sides; NaN for an image without a face."""


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
    """Called on the first rank after each batch, with the number of images that all ranks have embedded and their
    total."""
    check_stop: Callable[[], None] | None = None
    """Called after each batch, on every rank the same number of times. It may raise to end the embedding, but
    then it must raise on all ranks, because the others would wait in the next collective."""
    on_unreadable: Callable[[int, UnreadableError], None] | None = None
    """Called with the index of an image that cannot be decoded or cropped, which gets the embedding of a black one; by
    many threads, and on the rank that has the image. None: the error is raised."""
    alone: bool = False
    """Whether this process embeds all images itself, also if it is one of several ranks."""

    @property
    def _pads_last_batch(self) -> bool:
        """Whether all batches have the same size: for another one, cuDNN would search its algorithms again."""
        return self.device.type == "cuda"

    def _least_batch(self, images: int) -> int:
        """Return the smallest number of images that the network gets at a time, if it embeds so many in total."""
        # The embeddings then do not depend on the number of ranks, see BLOCK; a few images are not worth it.
        return BLOCK if self.device.type == "cpu" and min(images, self.batch_size) >= BLOCK else 1

    def embed_plain_and_mirrored(
        self, images: Sequence[bytes], *, name: str, landmarks: Landmarks | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the embeddings of encoded images and of their mirror images: float32 (N, D) each.

        Images with equal bytes are embedded once. Collective: every rank embeds a share, and all ranks get
        all rows. `name` is the name of the set in error messages. A network that takes landmarks gets the
        landmarks of aligned faces if they are None.

        Raises:
            ImageError: an image cannot be decoded; the message has its index.
        """
        first_M, distinct_N = np.unique(dense_ids(images), return_index=True, return_inverse=True)[1:]
        embedding_M2D = self.embed_rows(
            images, name=name, mirrored=True, indices=first_M.tolist(), landmarks=landmarks
        )
        return embedding_M2D[distinct_N, 0], embedding_M2D[distinct_N, 1]

    def embed(
        self,
        images: Sequence[EncodedImage],
        *,
        name: str,
        flip: bool = True,
        crop: Crop = crop_aligned,
        indices: Sequence[int] | None = None,
        landmarks: Landmarks | None = None,
    ) -> np.ndarray:
        """Return the embeddings of encoded images: float32 (N, D), not normalized.

        With `flip`, the embedding of the mirror image is added. Needs half the memory of
        `embed_plain_and_mirrored`. `indices` selects a part of the images; by default all are embedded.
        Collective, like `embed_plain_and_mirrored`, with the same `landmarks`.

        Raises:
            ImageError: an image cannot be decoded; the message has its index.
        """
        selected = range(len(images)) if indices is None else indices
        return self.embed_rows(
            images, name=name, mirrored=flip, indices=selected, landmarks=landmarks, crop=crop, added=True
        )

    def embed_rows(
        self,
        images: Sequence[EncodedImage],
        *,
        name: str,
        mirrored: bool,
        indices: Sequence[int],
        landmarks: Landmarks | None,
        crop: Crop = crop_aligned,
        added: bool = False,
    ) -> np.ndarray:
        """Return the embeddings of encoded images: float32 (N, R, D), not normalized; (N, D), their sum, if `added`.

        Row 0 belongs to the image. With `mirrored`, row 1 belongs to its mirror image. Collective, like
        `embed_plain_and_mirrored`, with the same `landmarks`.

        Raises:
            ImageError: an image cannot be decoded; the message has its index.
        """
        assert len(indices), "no images"
        rank, world_size = (0, 1) if self.alone else (collectives.rank(), collectives.world_size())
        # A gather needs shares of equal size: the last ranks repeat the last image.
        share = -(-len(indices) // world_size)
        mine = [indices[min(n, len(indices) - 1)] for n in range(rank * share, (rank + 1) * share)]
        if not getattr(self.network, "takes_landmarks", False):
            landmarks = None
        elif landmarks is None:
            landmarks = np.broadcast_to(NORMALIZED_TEMPLATE, (len(images), *NORMALIZED_TEMPLATE.shape))
        shard: Tensor | None = None
        with torch.no_grad():
            least = self._least_batch(len(indices))
            for start, image_BHWC in self._decode_batches(images, mine, name, crop, least):
                image = self.prepare(image_BHWC.to(self.device, non_blocking=True))
                points = None
                if landmarks is not None:
                    points = self._points(landmarks, mine[start : start + self.batch_size], len(image))
                rows = self._embed_batch(image, points, mirrored)[: share - start]
                rows = (rows.sum(1) if added else rows).cpu()
                if shard is None:  # only the network knows the length of an embedding
                    shard = rows.new_empty((share, *rows.shape[1:]))
                shard[start : start + len(rows)] = rows
                if self.progress and rank == 0:  # the others have embedded as many
                    self.progress(min((start + len(rows)) * world_size, len(indices)), len(indices))
                if self.check_stop:
                    self.check_stop()
        assert shard is not None, "a share has at least one batch"
        gathered = shard if world_size == 1 else collectives.gather(shard).flatten(0, 1)
        return gathered[: len(indices)].numpy()

    def _embed_batch(self, image: Tensor, points: Tensor | None, mirrored: bool) -> Tensor:
        """Return the embeddings of prepared images, and of their mirror images: float32 (B, R, D)."""
        inputs = [[image] if points is None else [image, points]]
        if mirrored:
            inputs.append([image.flip(3)] if points is None else [image.flip(3), mirror_landmarks(points)])
        # In float32, also if the network computes in bfloat16: the two may be added.
        return torch.stack([self.network(*each).float() for each in inputs], 1)

    def _points(self, landmarks: Landmarks, indices: Sequence[int], count: int) -> Tensor:
        """Return the landmarks of a batch (count, 5, 2), the last ones repeated for the images that fill it up."""
        point_B52 = without_gaps(np.stack([landmarks[index] for index in indices]))
        return torch.from_numpy(point_B52[np.minimum(np.arange(count), len(point_B52) - 1)]).to(self.device)

    def _decode_batches(
        self, images: Sequence[EncodedImage], indices: list[int], name: str, crop: Crop, least: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the position of each batch in `indices` and its images, uint8 (B, size, size, 3).

        The last batch may be filled up with copies of its last image, to `least` images or to the size of the others.
        """

        def decode(index: int) -> np.ndarray:
            try:
                image = images[index]
                if isinstance(image, bytes):
                    image = decode_rgb(image, location=image_location(images, index, name))
                return crop(image, index, self.image_size)
            except UnreadableError as error:
                if self.on_unreadable is None:
                    raise
                self.on_unreadable(index, error)
                return np.zeros((self.image_size, self.image_size, 3), np.uint8)

        # The threads decode one batch ahead of the network.
        with closing(map_in_order(decode, indices, max(self.workers, 1), self.batch_size)) as decoded:
            for start in range(0, len(indices), self.batch_size):
                batch = list(islice(decoded, self.batch_size))
                filled = self.batch_size if start and self._pads_last_batch else least
                batch += [batch[-1]] * (filled - len(batch))
                yield start, torch.from_numpy(np.stack(batch))
