"""Self-test of the head's Triton kernels: whole steps of the head, beside PyTorch's operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from facetrain.distributed.world import World
from facetrain.head.build import HeadRun, build_head, build_margin
from facetrain.head.margins.registry import MARGINS
from facetrain.head.partial_fc import PartialFC
from facetrain.head.settings import HeadSettings, MarginSettings
from facetrain.optim.settings import OptimSettings

_CHUNK = 200
"""Classes of a small chunk."""
_MOST_TIMES, _ROUNDING = 4.0, 2e-3
"""The largest error may be this many times the one of PyTorch's operations, and this much more, relative to the
largest number."""


CENTERS = "centers"
"""Begin of the names of the centers among the results of a head."""


class KernelWork(NamedTuple):
    """Sizes and dtypes of the kernels in a run, with which they are tested."""

    embedding_size: int
    batch: int
    """Embeddings of all ranks in a micro-batch."""
    chunk: int
    """Classes of a chunk."""
    weight_dtype: torch.dtype = torch.float32
    """Of the stored centers."""
    moment_dtype: torch.dtype = torch.float32
    """Of the stored momentum."""
    momentum: float = 0.9
    in_backward: bool = True
    """Whether the backward pass updates the centers."""


def check_head(device: torch.device, work: KernelWork) -> str:
    """Return what is wrong with the kernels of the head on a device, "" if nothing is.

    Every margin that they can compute, with and without sampling and kept exponentials, with the embedding size, the
    batch and the dtypes of the run; once in chunks of its size, otherwise in small ones. Triton compiles another kernel
    for another embedding size or dtype; the numbers of samples and classes do not change it.
    """
    margins = {name: MarginSettings.model_validate({"type": name}) for name in MARGINS}
    margins["filtered"] = MarginSettings(filter_threshold=0.2)
    heads = {
        name: HeadSettings(margin=settings)
        for name, settings in margins.items()
        if not build_margin(settings).changes_negatives
    }
    heads["sampled"] = HeadSettings(sample_rate=0.3)
    # The others are small: they keep their exponentials. Without that, other kernels run; with a filter, too.
    for name in ("softmax", "filtered"):
        heads[f"{name}, recomputed"] = heads[name].model_copy(update={"recompute": "on"})
    heads["in whole chunks"] = HeadSettings(chunk_size=work.chunk)
    for name, settings in heads.items():
        # In float32, in the dtype of training, and by the kernels in that dtype: the error of the second is the price
        # of rounding, by which the third is judged.
        true, plain, fused = (
            _head_results(settings, device, work, product_dtype, use_kernels=use_kernels)
            for product_dtype, use_kernels in ((None, False), (torch.bfloat16, False), (torch.bfloat16, True))
        )
        if found := difference(true, plain, fused):
            return f"{found} (head: {name})"
    return ""


def difference(true: dict[str, Tensor], plain: dict[str, Tensor], fused: dict[str, Tensor]) -> str:
    """Return which result of the kernels is wrong, "" if none is.

    Args:
        true: results in float32.
        plain: those of PyTorch's operations in the dtype of training.
        fused: those of the kernels in this dtype.
    """
    for part, tensor in true.items():
        if not tensor.numel():  # the centers of a rank without classes
            continue
        by_plain, by_fused = (
            ((found[part] - tensor).abs().max() / tensor.abs().max()).item() for found in (plain, fused)
        )
        # Not a comparison for "larger": NaN must be refused.
        if not by_fused <= _MOST_TIMES * by_plain + _ROUNDING:
            return f"{part}: a relative error of {by_fused:.2g}, and {by_plain:.2g} by PyTorch's operations"
    return ""


def _head_results(
    settings: HeadSettings,
    device: torch.device,
    work: KernelWork,
    product_dtype: torch.dtype | None,
    *,
    use_kernels: bool,
) -> dict[str, Tensor]:
    """Return the results of a head with other numbers of classes than the run's."""
    # Several chunks, the last of them smaller. No number is a multiple of a tile. Rows are aligned in memory
    # as in the chunks of the run. Of whole chunks one, which can have a gigabyte of centers, and a few classes more.
    is_whole = settings.chunk_size != "auto"
    chunk = work.chunk if is_whole else _CHUNK + work.chunk % 16
    classes = chunk + 3 if is_whole else 2 * chunk + chunk // 2 + 3
    world = World(rank=0, local_rank=0, size=1, local_size=1, device=device)
    run = HeadRun(seed=1, product_dtype=product_dtype, update_in_backward=work.in_backward)
    # Each run of this function draws the same centers, samples and noise, from the seed.
    dtypes = {"weight_dtype": _name(work.weight_dtype), "momentum_dtype": _name(work.moment_dtype)}
    settings = settings.model_copy(update={"chunk_size": chunk, **dtypes})
    optim = OptimSettings(momentum=work.momentum)
    head = build_head(settings, optim, run, world, embedding_size=work.embedding_size, num_classes=classes)
    if not use_kernels:
        head.avoid_kernels()
    return results_of_two_steps(head, work.batch, seed=0)


def results_of_two_steps(head: PartialFC, batch: int, *, seed: int) -> dict[str, Tensor]:
    """Return loss, gradient of the embeddings and centers of two steps with random embeddings. Collective.

    `batch` counts the embeddings of this rank, which `seed` draws.
    """
    device, generator = head.device, torch.Generator().manual_seed(seed)
    centers, others = {}, {}
    # Two steps: the second has momentum, and centers that the kernel has written.
    for step in range(2):
        embedding = torch.randn(batch, head.embedding_size, generator=generator).to(device).requires_grad_()
        label = torch.randint(head.num_classes, (batch,), generator=generator)
        head.begin_step(step, lr=0.1)
        head.expect_labels(label)
        loss = head(embedding, label.to(device))
        loss.backward()
        if not head.update_in_backward:
            head.step(torch.ones((), device=device), torch.zeros((), device=device))
        assert embedding.grad is not None
        # On the host: of three heads and two steps, the device of a small batch, whose chunks are long, has no room.
        centers[f"{CENTERS} after step {step + 1}"] = head.weight.data.to("cpu", torch.float32, copy=True)
        others[f"gradient of the embeddings in step {step + 1}"] = embedding.grad.float()
        others[f"loss of step {step + 1}"] = loss.detach().float()
    # The centers first: the others are sums over the ranks.
    return centers | others


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
