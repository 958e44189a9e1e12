"""Tables of class centers and their moments: initial values, shards, placement and number formats."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from benchmarks.common import memory_bytes
from facetrain.errors import ConfigError, RunError
from facetrain.head.class_centers import RowTable, draw_centers
from facetrain.head.class_shard import shard_classes
from facetrain.head.row_optimizer import CenterUpdate, RowOptimizer
from facetrain.head.sampling import Stage
from tests.support.heads import combined, make_head
from tests.support.ranks import PRELOADED
from tests.unit.head.helpers import batch, small_head

BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64]
)  # whole blocks in float32 are drawn in place
def test_initial_centers_do_not_depend_on_the_number_of_ranks(dtype, monkeypatch):
    # Several blocks, inside of which the shards of 3 ranks begin and end.
    monkeypatch.setattr("facetrain.head.class_centers._INIT_BLOCK", 5)
    whole = small_head(seed=5, weight_dtype=dtype).weight.data
    parts = [small_head(seed=5, weight_dtype=dtype, rank=r, world_size=3).weight.data for r in range(3)]
    assert torch.equal(torch.cat(parts), whole)
    assert len(whole.unique(dim=0)) == len(whole)
    assert not torch.equal(small_head(seed=6, weight_dtype=dtype).weight.data, whole)


def require_equal_steps(here, there, step):
    """Take a step of both heads, which must have the same loss."""
    losses = []
    for head in (here, there):
        head.begin_step(step, lr=0.1)
        loss = head(*batch(step))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_a_stage_begins_with_the_centers_of_the_last_step_before_it(placement, tmp_path, monkeypatch):
    monkeypatch.setattr("facetrain.head.settings.CLASSES_PER_READ", 1)  # the same sample in each placement
    stages = tuple(Stage(step, rate, "off") for step, rate in enumerate((0.4, 1.0, 0.5)))
    here, there = small_head(stages=stages), small_head(stages=stages, placement=placement, folder=tmp_path)
    for step in range(3):
        require_equal_steps(here, there, step)
    torch.testing.assert_close(here.row_state(), there.row_state())


@pytest.mark.parametrize("rate", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("placement", ["host", "disk"])
def test_centers_in_host_memory_or_on_disk_give_the_same_numbers(
    placement, optimizer, rate, tmp_path, monkeypatch
):
    monkeypatch.setattr("facetrain.head.settings.CLASSES_PER_READ", 1)  # the same sample in each placement
    options = {"sample_rate": rate, "optimizer": optimizer}
    here, there = small_head(**options), small_head(**options, placement=placement, folder=tmp_path)
    # Cases of the prefetcher: consecutive steps, a flush by row_state, skipped step 4, and step 6 twice.
    for step in (0, 1, 2, 3, 5, 6, 6, 7):
        require_equal_steps(here, there, step)
        if step in (2, 7):
            for name, table in here.row_state().items():
                torch.testing.assert_close(there.row_state()[name], table)
    assert [path.name for path in tmp_path.rglob("*")] == (["rank_00000"] if placement == "disk" else [])


def test_a_write_that_failed_once_ends_training_and_gives_no_checkpoint(tmp_path, monkeypatch):
    head = small_head(sample_rate=0.4, placement="disk", folder=tmp_path)
    write, calls = head._tables.write_rows, []

    def fail_once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise RunError("the disk failed")
        write(*arguments)

    monkeypatch.setattr(head._tables, "write_rows", fail_once)
    for step in range(3):
        head.begin_step(step, lr=0.1)
        head(*batch(step)).backward()
    head.begin_step(3, lr=0.1)
    with pytest.raises(RunError, match="the disk failed"):
        head(*batch(3))  # the rows of step 1 were written back during step 2
    with pytest.raises(RunError, match="the disk failed"):
        head.row_state()


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_8_bit_momentum_and_its_scales_share_a_row_on_disk(weight_dtype, tmp_path):
    head = make_head(
        embedding_size=256, num_classes=50, margin=combined(scale=64.0, m2=0.5), placement="disk", folder=tmp_path,
        weight_dtype=weight_dtype, momentum_dtype=torch.int8, sample_rate=0.3,
    )  # fmt: skip
    head.begin_step(0, lr=0.1)
    before = {name: table.clone() for name, table in head.row_state().items()}
    label = torch.arange(12)
    head(torch.randn(12, 256, requires_grad=True), label).backward()
    after = head.row_state()
    file = os.fstat(head._tables._file._descriptor)
    assert file.st_size == 50 * (256 * weight_dtype.itemsize + 256 + 64)
    assert file.st_nlink == 0, "its space is free when the process ends"
    for name in ("weight", "momentum", "momentum_scale"):
        assert (after[name] != before[name])[label].any(1).all()
    untouched = (after["momentum_scale"] == 0).all(1)
    assert untouched.any() and torch.equal(after["weight"][untouched], before["weight"][untouched])


def loss_after_training(head):
    """Train a head for 20 steps; return the loss of the last one."""
    for step in range(20):
        head.begin_step(step, lr=0.1)
        embedding, label = batch(step % 4)
        loss = head(embedding.float(), label)
        loss.backward()
    return loss.item()


@pytest.mark.parametrize(
    ("weight", "momentum", "rate"),
    [(BF16, BF16, 1.0), (FP32, INT8, 1.0), (FP32, INT8, 0.4)],
)
def test_training_with_few_bits_stays_close_to_float32_and_saves_its_scales(weight, momentum, rate):
    exact = small_head(weight_dtype=FP32, momentum_dtype=FP32, sample_rate=rate)
    small = small_head(weight_dtype=weight, momentum_dtype=momentum, sample_rate=rate)
    scales = {"momentum_scale": FP32} if momentum == INT8 else {}
    dtypes = {name: table.dtype for name, table in small.row_state().items()}
    assert dtypes == {"weight": weight, "momentum": momentum} | scales
    assert loss_after_training(small) == pytest.approx(loss_after_training(exact), rel=0.05)


def test_8_bit_moments_are_an_error_with_adamw():
    with pytest.raises(ConfigError, match="bfloat16.*adamw"):
        small_head(optimizer="adamw", momentum_dtype=torch.int8)


@pytest.mark.slow
def test_drawing_centers_in_16_bits_leaves_a_buffer_per_thread():
    multiprocessing.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        left = pool.submit(_bytes_left_by_drawing, threads=2).result()
    assert left < 3 * 4096 * 512 * 4  # the C library may keep the buffers; 144 MiB with one per block


def _bytes_left_by_drawing(threads: int) -> int:
    torch.set_num_threads(threads)
    table, few = torch.zeros(80_000, 512, dtype=torch.bfloat16), shard_classes(8192, 0, 1)
    draw_centers(table[:8192], few, seed=0)  # the generator's code
    before = memory_bytes("VmRSS")
    draw_centers(table, shard_classes(len(table), 0, 1), seed=0)
    return memory_bytes("VmRSS") - before


def test_an_update_in_one_pass_copies_its_own_tables_alone(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("facetrain.head.kernels.center_update.update_centers", lambda *_, **__: None)
    copied = []

    class Elsewhere(RowTable):
        is_elsewhere = True

        def read(self, rows):
            copied.append(next(name for name, table in tables.items() if table is self))
            return super().read(rows)

    names = ("weight", "momentum", "momentum_scale", "expectation")
    tables = {name: Elsewhere(torch.zeros(8, 4), torch.device("cpu")) for name in names}
    optimizer = RowOptimizer(CenterUpdate(), torch.device("cpu"))
    optimizer.one_pass = True
    optimizer.update(tables, slice(0, 8), torch.zeros(8, 4), torch.tensor(True))
    assert copied == ["weight", "momentum", "momentum_scale"]
