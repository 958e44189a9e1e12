"""The kernels that the self-test has tested are those that train: Triton compiles no other for a run."""

from itertools import product

import pytest
import torch

from facetrain.head.class_chunk import FusedChunk
from facetrain.training import choose_kernels, kernel_self_test
from facetrain.training.kernel_self_test import KernelWork
from tests.support.heads import make_head, margin_settings

triton = pytest.importorskip("triton", reason="needs Triton")
SIZE, BATCH = 128, 32
CPU = torch.device("cpu")


def specialization(kernel, arguments, options):
    """Return by what Triton compiles a kernel anew: dtypes, constants, and whether numbers are 1 or aligned."""
    names = [parameter.name for parameter in kernel.params]
    given = dict(zip(names, arguments, strict=False)) | {
        name: options[name] for name in names if name in options
    }
    key = [kernel.__name__, options["num_warps"]]
    for parameter in kernel.params:
        value = given[parameter.name]
        if isinstance(value, torch.Tensor):
            key.append((value.dtype, value.data_ptr() % 16 == 0))
        elif parameter.is_constexpr:
            key.append(value)
        elif isinstance(value, int) and not parameter.do_not_specialize:
            key.append((value == 1, value % 16 == 0))
    return tuple(key)


@pytest.fixture
def launched(monkeypatch):
    """Return the specializations of all launches; no kernel runs."""
    from facetrain.head.kernels import center_update, margin_softmax

    found = set()

    def launch(kernel, grid, *arguments, **options):
        found.add(specialization(kernel, arguments, options))

    for module in (center_update, margin_softmax):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(
        "facetrain.head.partial_fc.fused_chunks_available",
        lambda _, margin, dtype: dtype is not None and not margin.changes_negatives,
    )
    monkeypatch.setattr("facetrain.head.partial_fc.one_pass_available", lambda *_: True)
    return found


FP32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
RUNS = [
    {},
    {"chunk": 2001},
    {"weight_dtype": BF16, "moment_dtype": BF16},
    {"weight_dtype": BF16, "moment_dtype": INT8, "in_backward": False},
    {"momentum": 0.0},
]


@pytest.mark.parametrize("options", RUNS)
def test_a_step_of_training_launches_no_kernel_that_the_self_test_has_not(options, launched, monkeypatch):
    results = kernel_self_test._head_results

    def same_results(*arguments, **options):
        # What the kernels would have written is not there.
        return {name: torch.ones(()) for name in results(*arguments, **options)}

    monkeypatch.setattr(kernel_self_test, "_head_results", same_results)
    work = KernelWork(SIZE, 16, **{"chunk": 2048} | options)
    kernel_self_test.check_head(CPU, work)
    tested = set(launched)
    launched.clear()
    margins = (
        margin_settings("arcface"),
        margin_settings("adaface"),
        margin_settings("arcface", filter_threshold=0.3),
    )
    for margin, rate, recompute in product(margins, (1.0, 0.1), ("on", "off")):
        # The classes of one GPU of eight with Glint360K are an odd number, too.
        head = make_head(
            embedding_size=SIZE, num_classes=4503, chunk_size=work.chunk, product_dtype=BF16, sample_rate=rate,
            margin=margin, weight_dtype=work.weight_dtype, momentum_dtype=work.moment_dtype,
            momentum=work.momentum, update_in_backward=work.in_backward, recompute=recompute,
        )  # fmt: skip
        assert head.chunk_type is FusedChunk
        head.begin_step(0, lr=0.1)
        embedding = torch.randn(BATCH, SIZE, requires_grad=True)
        head(embedding, torch.randint(0, 4503, (BATCH,))).backward()
        head.step(torch.ones(()), torch.zeros(()))
    assert launched and not launched - tested


@pytest.mark.parametrize(("classes", "chunk"), [(100, 128), (5000, 2048)])
def test_the_self_test_has_no_longer_chunks_than_the_run(classes, chunk):
    head = make_head(embedding_size=SIZE, num_classes=classes, chunk_size=2048)
    assert choose_kernels._work_of(head, 16).chunk == chunk


@pytest.mark.parametrize("classes", [45_029, 64, 1])
def test_rows_of_exponentials_begin_at_multiples_of_64_numbers(classes, launched):
    from facetrain.head.kernels import margin_softmax

    unit, weight = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(classes, 16, dtype=torch.bfloat16)
    factors = margin_softmax.LogitFactors(
        unit, weight, torch.ones(classes), torch.zeros(3, dtype=torch.int64), 0, 64.0
    )
    found = margin_softmax.exponentials(factors)
    assert found.shape == (3, classes) and found.stride(0) % 64 == 0
