"""Jobs of a GPU session that check results: self-test, kernels beside float64, tests on the device."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_session.rows import Rows, row
from facetrain.head.dense import dense_loss
from facetrain.head.partial_fc import PartialFC
from facetrain.head.row_optimizer import CenterUpdate
from facetrain.training.kernel_self_test import KernelWork
from facetrain.training.kernel_verdicts import agree_on_kernels

_LINES_OF_ERRORS = 30
_ROUNDING = 5e-2
"""Error that rounding to 16 bits explains."""


def self_test(device: str, embeddings: int, embedding_size: int, chunk: int, failures: list[str]) -> Rows:
    """Yield the verdict of the self-test with which a run decides whether it uses the kernels."""
    reason = agree_on_kernels(torch.device(device), KernelWork(embedding_size, embeddings, chunk))
    yield row("head", "verdict", reason or "usable")
    if reason:
        failures.append(f"head: {reason}")


def compare_head(
    device: str, classes: int, embeddings: int, embedding_size: int, failures: list[str]
) -> Rows:
    """Yield the errors of a step of the head with its kernels, beside PyTorch's operations in float64.

    Relative to the largest value: of the loss, of the gradient of the embeddings, and of the change of the centers.
    """
    margin, scale, lr = 0.4, 64.0, 1.0
    head = PartialFC(
        "cosface", embedding_size, classes, fp16=True, device=device,
        update=CenterUpdate(momentum=0.0, weight_decay=0.0),
    )  # fmt: skip
    head.use_kernels()
    generator = torch.Generator().manual_seed(0)
    label_G = torch.randint(classes, (embeddings,), generator=generator).to(device)
    before_KD = head.row_state()["weight"].detach().double().clone()
    # Near their centers, as in training, where the slopes of the margin count.
    noise_GD = torch.randn(embeddings, embedding_size, generator=generator).to(device)
    near_GD = (
        torch.nn.functional.normalize(before_KD[label_G]).float() + noise_GD / embedding_size**0.5
    ).detach()
    found_GD, true_GD = near_GD.clone().requires_grad_(), near_GD.double().requires_grad_()
    center_KD = before_KD.clone().requires_grad_()
    head.begin_step(0, lr=lr)
    loss = head(found_GD, label_G)
    loss.backward()
    true = dense_loss(true_GD, center_KD, label_G, lambda cos: cos - margin, scale=scale)
    true.backward()
    moved_KD = before_KD - head.row_state()["weight"].double()
    what = f"{embeddings:,} embeddings of {embedding_size}, {classes:,} classes"
    # Not `uses_kernels`, which those of the update suffice for.
    fused = head.chunk_type is not None
    yield row(what, "kernels", "used" if fused else "not used")
    if device == "cuda" and not fused:
        failures.append(f"{what}: the kernels are not used")
    for quantity, found, expected in (
        ("loss", loss.detach(), true.detach()),
        ("gradient of the embeddings", found_GD.grad, true_GD.grad),
        ("change of the centers", moved_KD, lr * center_KD.grad),  # type: ignore[operator]
    ):
        assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor), (
            "backward has computed it"
        )
        error = float((found.double() - expected).abs().max() / expected.abs().max())
        yield row(what, f"error of the {quantity}", error)
        if not error < _ROUNDING:
            failures.append(f"{what}: the error of the {quantity} is {error:.3g}")


def run_test(device: str, test: str, failures: list[str]) -> Rows:
    """Run a test function and yield its outcome, with the reason if it is skipped."""
    # -W default: warnings of packages that this machine happens to have are no errors.
    options = ("-q", "-rs", "-p", "no:cacheprovider", "-W", "default")
    command = [sys.executable, "-m", "pytest", test, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    *lines, last = done.stdout.strip().splitlines() or ["no output"]
    reasons = {line.rpartition(": ")[2] for line in lines if line.startswith("SKIPPED")}
    yield row(test, "outcome", ": ".join([last, *sorted(reasons)]))
    if done.returncode:
        failures.append(_end_of(done.stdout))


def compare_kernels(device: str, module: str, failures: list[str]) -> Rows:
    """Run a module that prints errors as JSON; yield the largest of each case."""
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
    if done.returncode:
        failures.append(_end_of(done.stderr))
        return
    for case, errors in json.loads(done.stdout.strip().splitlines()[-1]).items():
        what = f"{module.split('.')[-1]}: {case}"
        largest = float(np.max(_differences(errors)))  # NaN if any is
        yield row(what, "largest error", largest)
        if not largest <= _ROUNDING:
            failures.append(f"{what}: {json.dumps(errors)}")


def _differences(errors: Any) -> list[float]:
    """Return all errors in nested values.

    A list of two numbers is a result beside its true value, and true is an error of 1, as is a text that says what is
    wrong. `different` is no error: the share of numbers that PyTorch's operations round in the other direction.
    """
    if isinstance(errors, str):
        return [float(bool(errors))]
    if isinstance(errors, dict):
        return [found for key, value in errors.items() if key != "different" for found in _differences(value)]
    return [abs(errors[0] - errors[1])] if isinstance(errors, list) else [abs(errors)]


def _end_of(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-_LINES_OF_ERRORS:])
