"""Compares the Triton kernels with float64 and prints the errors. Run it with TRITON_INTERPRET=1, or on a GPU."""

import json
import math

import torch
import torch.nn.functional as F

from facetrain.head import partial_fc
from facetrain.head.center_gradient import UnfinishedGradient
from facetrain.head.class_centers import RowTables, Storage, allocate_tables
from facetrain.head.class_chunk import FusedChunk
from facetrain.head.kernels import center_update, margin_softmax
from facetrain.head.kernels.center_update import update_centers
from facetrain.head.kernels.margin_softmax import (
    LogitFactors,
    add_and_keep,
    add_statistics,
    exponentials,
    narrowed,
)
from facetrain.head.row_optimizer import CenterUpdate, RowOptimizer, moment_layout
from facetrain.head.stochastic_rounding import Noise
from facetrain.training import kernel_self_test
from facetrain.training.kernel_self_test import KernelWork, check_head
from tests.support.dense_head import MARGINS
from tests.support.heads import combined, make_head

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(*tensors):
    return [tensor.to(DEVICE) for tensor in tensors]


def kernel_errors(rows, classes, size, dtype, scale, threshold):
    """Return the errors of the kernels. Sizes are not multiples of the tiles."""
    torch.manual_seed(rows + classes)
    # The kernels take the factor of the embeddings with the scale.
    unit = (F.normalize(torch.randn(rows, size)) * scale).to(dtype)
    stored = torch.randn(classes, size) * torch.rand(classes, 1)
    weight = stored.to(dtype)
    inverse = 1 / weight.double().norm(dim=1)
    target = torch.randint(-classes, classes, (rows,)).clamp_min(-1)
    logit = unit.double() @ weight.double().T * inverse
    limit = threshold * scale if threshold else math.inf
    is_local, trusted = target >= 0, logit <= limit
    negative = torch.where(trusted, logit, 0.0)
    negative[is_local, target[is_local]] = -math.inf
    # Statistics of earlier chunks; empty for every third sample.
    before = torch.stack([torch.randn(rows).mul(5), torch.rand(rows)])
    before[:, ::3] = torch.tensor([[-math.inf], [0.0]])
    total = negative.exp().sum(1) + before[1]
    largest = torch.where(trusted, negative, -math.inf).amax(1).maximum(before[0])
    kept = torch.where(trusted, negative.exp(), 0.0) * inverse
    # The chunk is not the first one: its classes have other positions than columns.
    start = 1000
    tensors = on_device(unit, weight, inverse.float(), torch.where(is_local, target + start, target))
    factors = LogitFactors(*tensors, start, limit)
    statistics, found = add_and_keep(before.to(DEVICE), factors)
    inverse_norm = torch.empty(classes, device=DEVICE)
    narrow = narrowed(stored.to(DEVICE), dtype, inverse_norm)
    return {
        "largest": (statistics[0].cpu() - largest).abs().max().item(),
        "total": (statistics[1].cpu() / total - 1).abs().max().item(),
        # Relative to each number: a small exponential is as precise as a large one.
        "exponentials": ((found.cpu().double() - kept).abs() / kept.clamp_min(1e-30)).max().item(),
        "parts": float(
            not torch.equal(add_statistics(before.to(DEVICE), factors), statistics)
            or not torch.equal(exponentials(factors), found)
        ),
        "norms": (inverse_norm.cpu() * stored.double().norm(dim=1) - 1).abs().max().item(),
        "narrow": (narrow.cpu().double() - stored).abs().max().item(),
    }


def head_errors(margin, rate):
    """Return the largest relative differences between training with all kernels and with none, in float32."""
    results = []
    for fused in (False, True):
        head = make_head(
            embedding_size=24, num_classes=203, margin=combined(**MARGINS[margin]), sample_rate=rate, seed=1,
            chunk_size=70, weight_decay=0.01, device=DEVICE,
        )  # fmt: skip
        head.chunk_type = FusedChunk if fused else None
        head._optimizer.one_pass = fused
        generator = torch.Generator().manual_seed(0)
        losses, gradients = [], []
        for step in range(2):
            embedding = torch.randn(40, 24, generator=generator).to(DEVICE).requires_grad_()
            head.begin_step(step, lr=0.1)
            loss = head(embedding, torch.randint(0, 203, (40,), generator=generator).to(DEVICE))
            loss.backward()
            losses.append(loss.detach())
            gradients.append(embedding.grad)
        results.append([torch.stack(losses), torch.stack(gradients), head.weight.data])
    names = ("loss", "gradient", "centers")
    pairs = zip(*results, strict=True)
    return {
        name: ((a - b).abs().max() / a.abs().max()).item() for name, (a, b) in zip(names, pairs, strict=True)
    }


UPDATES = {
    "float32": {},
    "float32, sampled": {"sampled": True},
    "float32, complete gradient": {"finished": True},
    "float32, no momentum": {"momentum": 0.0},
    "bfloat16": {"dtypes": (torch.bfloat16, torch.bfloat16), "product": torch.bfloat16, "size": 512},
    "bfloat16, sampled": {"dtypes": (torch.bfloat16, torch.bfloat16), "sampled": True},
    "float32 and bfloat16": {"dtypes": (torch.float32, torch.bfloat16), "product": torch.bfloat16},
    "bfloat16 and int8": {"dtypes": (torch.bfloat16, torch.int8), "size": 384, "sampled": True},
    "float32 and int8 in one block": {"dtypes": (torch.float32, torch.int8), "size": 24},
}
"""Name of a case -> the options of `update_errors` that differ from their defaults."""


def update_errors(
    *, dtypes=(torch.float32, torch.float32), product=torch.float32, size=24, momentum=0.9,
    sampled=False, finished=False,
):  # fmt: skip
    """Update centers by the kernel, by PyTorch's operations and in float64, and return the differences."""
    generator = torch.Generator().manual_seed(size)
    total, samples = 41, 9
    numbers = CenterUpdate(momentum=momentum, weight_decay=0.01, moment_dtype=dtypes[1])
    layout = {"weight": (size, dtypes[0]), **moment_layout(numbers, size)}
    tables = allocate_tables(layout, total, DEVICE, Storage())
    for name, table in tables.by_name.items():
        drawn = torch.randn(table.data.shape, generator=generator)
        drawn = drawn.abs() * 0.01 if name == "momentum_scale" else drawn * (40 if table.scale else 0.3)
        table.data.copy_(drawn.clamp(-127, 127))
    rows = torch.tensor([0, 2, 3, 7, 11, 12, 30, 40]) if sampled else slice(5, 36)
    index = rows if sampled else torch.arange(5, 36)
    centers = len(index)
    raw = torch.randn(centers, size, generator=generator).to(product)
    target_grad = torch.randn(samples, size, generator=generator)
    # Some samples share a center, some have theirs in another chunk or on another rank.
    target = torch.tensor([3, 1, 3, -1, centers, 3, centers - 1, 1, 0])[:samples]
    center, order = target.sort(stable=True)
    first = torch.searchsorted(center, torch.arange(centers + 1), out_int32=True)

    def as_centers(name):
        return tables.by_name[name].fetch(index.to(DEVICE)).cpu().double()

    before = {name: table.data.clone() for name, table in tables.by_name.items()}
    w, g = as_centers("weight"), raw.double()
    inside = (target >= 0) & (target < centers)
    g = g.index_add(0, target[inside], target_grad[inside].double())
    g -= w * ((g * w).sum(1) / w.square().sum(1))[:, None]
    complete = g.float()
    g += 0.01 * w
    if momentum:
        g += momentum * as_centers("momentum")
    expected = {"weight": w - 0.1 * g} | ({"momentum": g} if momentum else {})
    gradient = UnfinishedGradient(*on_device(raw, target_grad, order, first))
    given = complete.to(DEVICE) if finished else gradient
    by_torch = RowTables({name: table.clone() for name, table in before.items()}, DEVICE)
    on = rows.to(DEVICE) if sampled else rows
    yes = torch.tensor(True, device=DEVICE)
    plain = RowOptimizer(numbers, DEVICE)
    plain.begin_step(0, 0, lr=0.1)
    plain._noise = Noise(5, DEVICE)
    plain.update(by_torch.by_name, on, complete.to(DEVICE), yes)
    data = {name: table.data for name, table in tables.by_name.items()}
    options = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.01}
    update_centers(data, on, given, ~yes, Noise(5, DEVICE), **options)
    is_changed_if_skipped = not all(torch.equal(table, before[name]) for name, table in data.items())
    update_centers(data, on, given, yes, Noise(5, DEVICE), **options)
    others = torch.ones(total, dtype=torch.bool)
    others[index] = False
    found = {
        "is_changed_if_skipped": is_changed_if_skipped,
        "changes_others": not all(torch.equal(data[n][others], before[n][others]) for n in data),
    }
    for name, true in expected.items():
        error = (as_centers(name) - true).abs() / true.abs().mean()
        pair = data[name], by_torch.by_name[name].data
        found[name] = {
            "error": error.max().item(),
            "bias": ((as_centers(name) - true).mean() / true.abs().mean()).abs().item(),
            "different": (pair[0] != pair[1]).float().mean().item(),
        }
    return found


def at_the_end(cosine, scale):
    """Return log Σ exp of 150 equal logits at an end of the range of cosines, and its exact value."""
    direction = F.normalize(torch.ones(1, 16))
    unit = (scale * direction).expand(20, 16).contiguous()
    weight = (cosine * direction).expand(150, 16).contiguous()
    empty = torch.stack([torch.full((20,), -math.inf), torch.zeros(20)])
    empty, *factors = on_device(empty, unit, weight, torch.ones(150), torch.full((20,), -1))
    statistics = add_statistics(empty, LogitFactors(*factors, 0, math.inf))
    return statistics[1].log()[0].item(), cosine * scale + math.log(150)


def hides_a_center_that_is_not_a_number(limit):
    """Return whether the statistics of any sample are finite although a center is NaN."""
    unit, weight = F.normalize(torch.randn(20, 16)), torch.randn(150, 16)
    weight[7] = math.nan
    inverse, target = 1 / weight.norm(dim=1), torch.full((20,), -1)
    empty = torch.stack([torch.full((20,), -math.inf), torch.zeros(20)])
    empty, *factors = on_device(empty, unit, weight, inverse, target)
    return not add_statistics(empty, LogitFactors(*factors, 0, limit))[1].isnan().all().item()


def self_test():
    """Return what the self-test of a run finds wrong with the kernels under the interpreter, "" if nothing."""
    # Small chunks have one tile of columns, a whole one has two.
    kernel_self_test._CHUNK = 40
    # A run does not use the kernels on a CPU.
    partial_fc.fused_chunks_available = lambda _, margin, dtype: dtype is not None
    partial_fc.one_pass_available = lambda *_: True
    return check_head(DEVICE, KernelWork(72, 137, 170))


def main() -> None:
    if DEVICE.type == "cpu":
        # The interpreter takes as long for a small tile as for a large one.
        margin_softmax._CENTERS, center_update._TILE = 64, 64 * 128
    kernels = {
        f"{rows} x {classes} x {size} {dtype} {threshold}": kernel_errors(
            rows, classes, size, dtype, scale, threshold
        )
        for rows, classes, size, dtype, scale, threshold in (
            (37, 300, 24, torch.float32, 64.0, 0.0),
            (130, 129, 64, torch.float32, 16.0, 0.2),
            (16, 5, 100, torch.float32, 64.0, 0.0),
            (140, 260, 128, torch.bfloat16, 16.0, 0.0),
            (37, 300, 24, torch.bfloat16, 16.0, 0.2),
        )
    }
    head = {
        f"{margin} {rate}": head_errors(margin, rate)
        for margin in ("arcface", "filtered")
        for rate in (1.0, 0.4)
    }
    ends = {
        f"{cosine} {scale}": at_the_end(cosine, scale) for cosine in (-1.0, 1.0) for scale in (32.0, 64.0)
    }
    updates = {name: update_errors(**options) for name, options in UPDATES.items()}
    hidden = {str(limit): hides_a_center_that_is_not_a_number(limit) for limit in (math.inf, 3.2)}
    found = {"kernels": kernels, "head": head, "ends": ends, "updates": updates, "hidden": hidden}
    if DEVICE.type == "cpu":
        found["self-test"] = self_test()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
