"""Compares the Triton kernels with float64 and prints the errors. Run it with TRITON_INTERPRET=1, or on a GPU."""

import json
import math

import torch
import torch.nn.functional as F

from facetrain.head.class_chunk import Chunk, FusedChunk
from facetrain.head.kernels.margin_softmax import add_statistics, slopes
from facetrain.head.margins import CombinedMargin
from tests.support.dense_head import MARGINS
from tests.support.heads import make_head

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter multiplies the bit patterns of bfloat16 numbers as integers; a GPU does not.
NARROW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16


def on_device(*tensors):
    return [tensor.to(DEVICE) for tensor in tensors]


def kernel_errors(rows, classes, size, dtype, scale, threshold):
    """Return the errors of both kernels. Sizes are not multiples of the tiles."""
    torch.manual_seed(rows + classes)
    unit = F.normalize(torch.randn(rows, size)).to(dtype)
    weight = (torch.randn(classes, size) * torch.rand(classes, 1)).to(dtype)
    inverse = 1 / weight.double().norm(dim=1)
    target = torch.randint(-classes, classes, (rows,)).clamp_min(-1)
    logit = unit.double() @ weight.double().T * inverse * scale
    trusted = logit <= threshold * scale if threshold else torch.ones_like(logit, dtype=torch.bool)
    logit = torch.where(trusted, logit, 0.0)
    is_local = target >= 0
    logit[is_local, target[is_local]] = -math.inf
    # Statistics of earlier chunks; empty for every third sample.
    before = torch.stack([torch.randn(rows).mul(5), torch.rand(rows)])
    before[:, ::3] = torch.tensor([[-math.inf], [0.0]])
    log_total = torch.logaddexp(torch.logsumexp(logit, 1), before[0].double() + before[1].double().log())
    slope = torch.where(trusted, (logit - log_total[:, None]).exp(), 0.0) * inverse
    options = {"scale": scale, "threshold": threshold}
    given = on_device(unit, weight)
    options |= dict(zip(("inverse_norm_C", "target_G"), on_device(inverse.float(), target), strict=True))
    statistics = add_statistics(before.to(DEVICE), *given, **options)
    found = slopes(log_total.float().to(DEVICE), *given, **options)
    return {
        "log_total": (statistics[1].log() + statistics[0]).cpu().double().sub(log_total).abs().max().item(),
        "slopes": ((found.cpu().double() - slope).abs().max() / slope.abs().max()).item(),
    }


def head_errors(margin, rate):
    """Return the largest relative differences between training with the kernels and without, in float32."""
    results = []
    for fused in (False, True):
        head = make_head(
            embedding_size=24, num_classes=203, margin=CombinedMargin(**MARGINS[margin]), sample_rate=rate, seed=1,
            chunk_size=70, weight_decay=0.01, device=DEVICE,
        )  # fmt: skip
        head.chunk_type = FusedChunk if fused else Chunk
        head.lr = 0.1
        generator = torch.Generator().manual_seed(0)
        losses, gradients = [], []
        for step in range(2):
            embedding = torch.randn(40, 24, generator=generator).to(DEVICE).requires_grad_()
            head.begin_step(step)
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


def at_the_end(cosine, scale):
    """Return log Σ exp of 150 equal logits at an end of the range of cosines, and its exact value."""
    direction = F.normalize(torch.ones(1, 16))
    unit, weight = direction.expand(20, 16).contiguous(), (cosine * direction).expand(150, 16).contiguous()
    empty = torch.stack([torch.full((20,), -math.inf), torch.zeros(20)])
    options = {"scale": scale, "threshold": 0.0, "inverse_norm_C": torch.ones(150, device=DEVICE)}
    given = on_device(empty, unit, weight)
    statistics = add_statistics(*given, target_G=torch.full((20,), -1, device=DEVICE), **options)
    return (statistics[1].log() + statistics[0])[0].item(), cosine * scale + math.log(150)


def main() -> None:
    kernels = {
        f"{rows} x {classes} x {size} {dtype} {threshold}": kernel_errors(
            rows, classes, size, dtype, scale, threshold
        )
        for rows, classes, size, dtype, scale, threshold in (
            (37, 300, 24, torch.float32, 64.0, 0.0),
            (130, 129, 64, torch.float32, 16.0, 0.2),
            (16, 5, 100, torch.float32, 128.0, 0.0),
            (140, 260, 128, NARROW, 16.0, 0.0),
            (37, 300, 24, NARROW, 16.0, 0.2),
        )
    }
    head = {
        f"{margin} {rate}": head_errors(margin, rate)
        for margin in ("arcface", "filtered")
        for rate in (1.0, 0.4)
    }
    ends = {
        f"{cosine} {scale}": at_the_end(cosine, scale) for cosine in (-1.0, 1.0) for scale in (64.0, 128.0)
    }
    print(json.dumps({"kernels": kernels, "head": head, "ends": ends}))


if __name__ == "__main__":
    main()
