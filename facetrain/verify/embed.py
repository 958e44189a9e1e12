"""Embed many pictures with the work shared by all ranks."""

# N pictures   B batch   D embedding

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from facetrain.data.augment import normalise
from facetrain.data.decode import decode_rgb, resize_square
from facetrain.distributed import collectives

Embedder = Callable[[Tensor], Tensor]
"""Maps normalised images (B, 3, H, W) to embeddings (B, D)."""


def embed_pictures(
    embed: Embedder,
    pictures: Sequence[bytes],
    *,
    name: str,
    image_size: int,
    batch_size: int,
    device: torch.device,
    workers: int = 2,
    prepare: Callable[[Tensor], Tensor] = normalise,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the embeddings of encoded pictures and of their mirror images: float32 (N, D) each.

    Collective: every rank embeds a share, and all get the whole. `prepare` brings uint8 (B, H, W, 3)
    to what the network takes.

    Raises:
        ImageError: a picture cannot be decoded; the message has its number.
    """
    rank, world_size = collectives.rank(), collectives.world_size()
    # As many on each rank, so that they can be gathered; the surplus repeats the last picture.
    share = -(-len(pictures) // world_size)
    mine = [min(n, len(pictures) - 1) for n in range(rank * share, (rank + 1) * share)]
    rows = []
    with torch.no_grad(), autocast():
        for image_BHWC in _decoded(pictures, mine, name, image_size, batch_size, workers):
            image = prepare(image_BHWC.to(device, non_blocking=True))
            rows.append(torch.stack([embed(image).float(), embed(image.flip(3)).float()], 1).cpu())
    both_N2D = collectives.gather(torch.cat(rows)).flatten(0, 1)[: len(pictures)].numpy()
    return both_N2D[:, 0], both_N2D[:, 1]


def _decoded(
    pictures: Sequence[bytes], numbers: list[int], name: str, size: int, batch_size: int, workers: int
) -> Iterator[Tensor]:
    def load(number: int) -> np.ndarray:
        return resize_square(decode_rgb(pictures[number], where=f"{name}: picture {number}"), size)

    with ThreadPoolExecutor(max(workers, 1)) as pool:
        for start in range(0, len(numbers), batch_size):
            yield torch.from_numpy(np.stack(list(pool.map(load, numbers[start : start + batch_size]))))
