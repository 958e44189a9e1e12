import errno
import gc
import hashlib
import json
import os
import resource
import shutil
import threading
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from facetrain.checkpoint import commit
from facetrain.checkpoint import snapshot as snapshot_module
from facetrain.checkpoint.commit import (
    LATEST,
    complete_steps,
    publish,
    put_aside,
    remove_surplus,
    remove_unfinished,
)
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.manifest import MANIFEST
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.checkpoint.snapshot import ClassRows, HostCopy
from facetrain.checkpoint.tensor_file import write_tensors
from facetrain.errors import CheckpointError
from facetrain.files import sync_folder
from facetrain.head.row_file import DiskRows
from facetrain.torch_private import FakeTensorMode
from tests.support import faults
from tests.support.checkpoints import saved
from tests.support.ranks import run_ranks
from tests.support.snapshots import snapshot
from tests.support.waiting import wait_until


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_saved_checkpoint_loads_with_the_same_values(tmp_path, asynchronous):
    writer, state = CheckpointWriter(tmp_path, asynchronous=asynchronous), snapshot(7)
    writer.save(state)
    state.replicated["backbone.w"].fill_(99)  # training goes on
    state.rows[0].tables["weight"].fill_(99)
    outcome = writer.finish()
    assert not writer.in_flight and (asynchronous is False or not outcome.failure)
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.step, checkpoint.meta) == (7, {"note": "a"})
    assert checkpoint.replicated("backbone.")["w"].tolist() == [7, 7, 7]
    assert checkpoint.rows("weight", 3, 6)[:, 0].tolist() == [10, 11, 12]
    assert checkpoint.rank_state(0)["cpu"].tolist() == [0]
    assert (tmp_path / LATEST).read_text() == "step_00000007\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000007"]


# Steps with the step of their verification and its accuracy, and the steps that are kept.
BEST = {
    "of five": (2, [(1, 1, 0.5), (2, 2, 0.9), (3, 3, 0.7), (4, 4, 0.8), (5, 5, 0.6)], [2, 4, 5]),
    # Of the checkpoints since a verification, the first has the weights that were verified, or the nearest.
    "the verified one": (1, [(3, None, 0), (4, 4, 0.99), (5, 4, 0.99), (8, 8, 0.91), (9, 8, 0.91)], [4, 9]),
    "the newest of equal ones": (1, [(1, 1, 0), (2, 1, 0), (3, 3, 0), (4, 3, 0), (5, 3, 0)], [3, 5]),
}


@pytest.mark.parametrize("case", BEST)
def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path, case):
    keep, saves, kept = BEST[case]
    writer = CheckpointWriter(tmp_path, keep=keep, asynchronous=False, best_metric="lfw/accuracy")
    for step, verified_step, accuracy in saves:
        metrics = {} if verified_step is None else {"lfw/accuracy": accuracy}
        writer.save(snapshot(step, metrics=metrics, meta={"verified_step": verified_step}))
        writer.finish()
    assert complete_steps(tmp_path) == kept


def test_the_best_checkpoint_stays_while_its_manifest_cannot_be_read(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=1, asynchronous=False, best_metric="lfw/accuracy")
    manifest, hidden = tmp_path / "step_00000001" / MANIFEST, tmp_path / "hidden"
    for step, accuracy in ((1, 0.9), (2, 0.5), (3, 0.4)):
        if step == 3:
            manifest.rename(hidden)
        writer.save(snapshot(step, metrics={"lfw/accuracy": accuracy}))
        writer.finish()
    hidden.rename(manifest)
    assert complete_steps(tmp_path) == [1, 2, 3]
    remove_surplus(tmp_path, keep=1, best_metric="lfw/accuracy")
    assert complete_steps(tmp_path) == [1, 3]


def test_a_checkpoint_is_saved_even_if_the_name_of_the_newest_cannot_be_written(tmp_path, monkeypatch):
    writer = CheckpointWriter(tmp_path, asynchronous=False)
    writer.save(snapshot(1))

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(commit, "_write_latest", refuse)
    synced, errors = [], StringIO()
    monkeypatch.setattr(commit, "sync_folder", synced.append)
    with redirect_stderr(errors):
        assert not writer.save(snapshot(2)).failure
    assert synced[-1] == tmp_path, "a power cut does not undo the commit"
    assert "latest: No space left on device; it was not updated to step_00000002" in errors.getvalue()
    assert Checkpoint.open(tmp_path).step == 2


@pytest.mark.parametrize("free", [1 << 40, 0])
def test_a_save_waits_for_a_removal_on_a_full_disk_only_and_its_commit_always(tmp_path, monkeypatch, free):
    writer, goes_on, events = CheckpointWriter(tmp_path, keep=1), threading.Event(), []
    remove, begin, publish = commit.remove_surplus, commit.make_scratch_folder, commit.publish

    def slow_removal(*args, **options):
        goes_on.wait(60)
        remove(*args, **options)
        events.append("removed")

    def disk_usage(folder):
        if not free:
            goes_on.set()
        return SimpleNamespace(free=free)

    monkeypatch.setattr(commit, "remove_surplus", slow_removal)
    monkeypatch.setattr(commit, "make_scratch_folder", lambda path: events.append("begun") or begin(path))
    monkeypatch.setattr(commit, "publish", lambda *paths: events.append("committed") or publish(*paths))
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    writer.save(snapshot(1))
    assert writer.save(snapshot(2)).step == 1
    writer._thread.join()
    assert (writer.poll() is None) == bool(free), "training goes on"
    goes_on.set()
    writer.finish()
    saved = ["begun", "committed", "removed"]
    assert events == (["begun", "committed", "begun", "removed", *saved[1:]] if free else saved * 2)
    assert complete_steps(tmp_path) == [2]


def test_after_a_failed_save_the_next_one_knows_how_much_room_it_needs(tmp_path, monkeypatch):
    writer, goes_on, removals = CheckpointWriter(tmp_path, asynchronous=False), threading.Event(), []
    begin = commit.make_scratch_folder
    monkeypatch.setattr(commit, "remove_surplus", lambda *_, **__: goes_on.wait(60))
    writer.save(snapshot(1))
    with monkeypatch.context() as patch:
        patch.setattr("facetrain.checkpoint.save.write_tensors", Mock(side_effect=OSError("full")))
        assert "full" in writer.save(snapshot(2)).failure
    monkeypatch.setattr(shutil, "disk_usage", lambda _: goes_on.set() or SimpleNamespace(free=5))
    monkeypatch.setattr(
        commit, "make_scratch_folder", lambda path: removals.append(writer._removal) or begin(path)
    )
    writer.save(snapshot(3))
    assert removals == [None], "the removal has ended"


def test_a_run_folder_may_have_the_name_of_a_checkpoint(tmp_path):
    run = tmp_path / "step_20261123"
    run.mkdir()
    CheckpointWriter(run / "checkpoints", asynchronous=False).save(snapshot(7))
    assert Checkpoint.open(run).step == Checkpoint.open(run / "checkpoints" / "step_00000007").step == 7


def test_saving_a_step_again_replaces_it(tmp_path):
    writer = CheckpointWriter(tmp_path, asynchronous=False)
    for note in ("first", "second"):
        writer.save(snapshot(3, meta={"note": note}))
    writer.finish()
    assert Checkpoint.open(tmp_path).meta == {"note": "second"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000003"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("prepare", "repair", "message"),
    [
        (lambda folder: 30_000, lambda folder: None, "No space left on device"),
        (lambda folder: faults.make_read_only(folder) or 11, faults.make_writable, "Read-only file system"),
    ],
    ids=["full", "read-only"],
)
def test_a_full_or_read_only_disk_fails_the_save_and_keeps_the_previous_checkpoint(
    tmp_path, asynchronous, prepare, repair, message
):
    folder = tmp_path / "disk"
    with faults.small_disk(folder, size_kib=256):
        writer = CheckpointWriter(folder, keep=1, asynchronous=asynchronous)
        writer.save(snapshot(1))
        writer.finish()
        outcome = writer.save(snapshot(2, num_classes=prepare(folder)))
        outcome = writer.finish() if asynchronous else outcome
        assert not writer.in_flight
        assert outcome.failure.startswith("rank 0: ") and message in outcome.failure
        assert Checkpoint.open(folder).step == 1
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_00000001"]
        repair(folder)
        writer.save(snapshot(3))
        writer.finish()
        assert complete_steps(folder) == [3]


def test_a_save_that_fails_raises_nothing_and_the_next_one_succeeds(tmp_path):
    writer = CheckpointWriter(tmp_path / "checkpoints", asynchronous=False)
    with faults.files_limited_to(5000):
        assert "File too large" in writer.save(snapshot(1, num_classes=1000)).failure
    assert list((tmp_path / "checkpoints").iterdir()) == []
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("in the way")
    assert "File exists" in writer.save(snapshot(1)).failure
    (tmp_path / "checkpoints").unlink()
    assert not writer.save(snapshot(2, num_classes=1000)).failure


def test_a_folder_removed_during_a_save_fails_the_save_and_the_next_save_succeeds(tmp_path):
    folder = tmp_path / "checkpoints"
    writer = CheckpointWriter(folder)
    writer.save(snapshot(1))
    writer._thread.join()
    shutil.rmtree(folder)
    outcome = writer.finish()
    assert outcome.failure and "No such file" in outcome.failure
    writer.save(snapshot(2))
    assert not writer.finish().failure


def test_tables_that_must_not_be_copied_are_written_before_save_returns(tmp_path):
    rows = DiskRows(tmp_path / "rows.bin", 11, {"weight": (4, torch.float32), "momentum": (4, torch.int8)})
    table = rows.tables["weight"].copy_(torch.arange(44.0).view(11, 4))
    assert not table.is_contiguous()
    writer = CheckpointWriter(tmp_path / "checkpoints")
    state = replace(snapshot(1), copy_rows=False)
    state.rows[0].tables["weight"] = table
    writer.save(state)
    table.zero_()
    assert writer._host_copy._buffers == {}
    assert not writer.poll().failure
    assert Checkpoint.open(tmp_path / "checkpoints").rows("weight", 0, 11).tolist() == [
        [4.0 * row + column for column in range(4)] for row in range(11)
    ]


def save_with_little_memory(folder):
    writer = CheckpointWriter(folder)
    rows = ClassRows(0, 1 << 14, {"weight": torch.full((1 << 14, 1 << 12), 7.0)})
    with faults.memory_limited_to(1 << 26), redirect_stderr(StringIO()) as stderr:
        writer.save(replace(snapshot(1, num_classes=1 << 14), rows=(rows,)))
    return not writer.poll().failure, stderr.getvalue()


@pytest.mark.slow
def test_a_snapshot_is_written_without_a_copy_where_the_copy_does_not_fit_into_memory(tmp_path):
    # In a new process: this one may hold freed memory that the limit does not count.
    ((written_at_once, warning),) = run_ranks(1, save_with_little_memory, tmp_path)
    assert written_at_once and "warning: rank 0: " in warning and "without a copy" in warning
    assert Checkpoint.open(tmp_path).rows("weight", 5, 6).unique().tolist() == [7.0]


@pytest.mark.parametrize(("left", "waits"), [(100, True), (1 << 20, False), (None, False)])
def test_a_host_without_memory_for_the_copy_writes_each_checkpoint_before_training_goes_on(
    tmp_path, monkeypatch, capsys, left, waits
):
    monkeypatch.setattr("facetrain.checkpoint.save.available_bytes", lambda: left)
    writer = CheckpointWriter(tmp_path)
    writer.prepare(snapshot(0))
    outcomes = [writer.save(snapshot(step)) for step in (1, 2)]
    assert [outcome and outcome.step for outcome in outcomes] == ([1, 2] if waits else [None, 1])
    assert capsys.readouterr().err.count("checkpoint.async: false") == waits
    writer.finish()
    assert complete_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize(("left", "warnings"), [(120, 0), (119, 1)])
def test_the_ranks_of_a_host_share_its_memory(tmp_path, monkeypatch, capsys, left, warnings):
    # Hosts of images may all have one name.
    reports = [[0, "one", 60, left + 1], [1, "one", 60, left], [0, "one", 100, None], [0, "one", 100, 119]]
    monkeypatch.setattr("facetrain.checkpoint.save.collectives.gather_json", lambda _: reports)
    CheckpointWriter(tmp_path).prepare(replace(snapshot(0), rows=()))
    assert capsys.readouterr().err.count("warning: one: the copy of a checkpoint") == warnings


def test_the_first_save_compares_the_copy_with_the_memory_if_nothing_was_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr("facetrain.checkpoint.save.available_bytes", lambda: 100)
    assert CheckpointWriter(tmp_path).save(snapshot(1)).step == 1


def test_two_saves_reuse_the_buffers_of_the_copy():
    copy = HostCopy()
    first, second = (copied_rows(copy, snapshot(step)) for step in (1, 2))
    assert second["weight"].data_ptr() == first["weight"].data_ptr()
    assert copied_rows(copy, snapshot(3, num_classes=12))["weight"].shape == (12, 4)


def test_the_copy_of_a_run_on_the_cpu_of_a_machine_with_a_gpu_does_not_start_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("this starts CUDA"))
    assert copied_rows(HostCopy(), snapshot(1))["weight"].shape == (11, 4)


def copied_rows(copy, state):
    return copy.take(state.files(0, 1))[0].tensors


class Cudart:
    """Stand-in for CUDA's runtime that notes the page-locked memory."""

    def __init__(self):
        self.locked = {}

    def cudaHostRegister(self, address, size, flags):
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address):
        maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        assert any(int(start, 16) <= address < int(stop, 16) for start, stop in maps), "released too early"
        del self.locked[address]
        return 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list mapped memory")
def test_the_copy_of_a_gpu_tensor_locks_its_own_size_and_not_the_next_power_of_two(monkeypatch):
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    with FakeTensorMode():
        table = torch.empty(1100, 1024, dtype=torch.bfloat16, device="cuda")
    buffer = snapshot_module._buffer_like(table, None)
    assert list(cudart.locked.values()) == [1100 * 1024 * 2], "2,200 KiB, not 4 MiB"
    assert (buffer.shape, buffer.dtype, buffer.device.type) == (table.shape, table.dtype, "cpu")
    buffer.fill_(3)
    assert snapshot_module._buffer_like(table, buffer) is buffer
    assert buffer[-1, -1] == 3
    del buffer
    gc.collect()
    assert not cudart.locked


def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_a_copy_uses_the_buffers_that_were_prepared():
    state, size = snapshot(1, num_classes=1 << 22), 5 << 24
    copy = HostCopy()
    copy.prepare(state.files(0, 1))
    wait_until(lambda: all(thread.name != "checkpoint-buffers" for thread in threading.enumerate()))
    before = page_faults()
    rows, rank_state, _ = copy.take(state.files(0, 1))
    assert page_faults() - before < 0.1 * size / resource.getpagesize()
    assert torch.equal(rows.tensors["weight"], state.rows[0].tables["weight"])
    assert rank_state.tensors["cpu"] == 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_further_ranges_of_classes_are_copied_and_written_to_files_of_their_own(tmp_path, asynchronous):
    rows = torch.arange(20.0).view(5, 4)
    state = snapshot(1, num_classes=11)
    further = ClassRows(11, 16, {"weight": rows.clone()})
    state = replace(state, num_classes=16, rows=(*state.rows, further))
    copied = HostCopy().take(state.files(0, 1))[1]
    assert copied.tensors["weight"].data_ptr() != further.tables["weight"].data_ptr()
    writer = CheckpointWriter(tmp_path, asynchronous=asynchronous)
    writer.save(state)
    if asynchronous:
        further.tables["weight"].fill_(99)  # training goes on
    writer.finish()
    loaded = Checkpoint.open(tmp_path)
    assert torch.equal(loaded.rows("weight", 11, 16), rows)
    assert loaded.rows("weight", 9, 13)[:, 0].tolist() == [10.0, 11.0, 0.0, 4.0]
    assert "rows_00000_of_00001_head_1.safetensors" in [entry.name for entry in loaded.manifest.files]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
)
def test_every_type_and_shape_loads_with_the_safetensors_library(tmp_path, dtype):
    tensors = {
        "flat": torch.arange(7).to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "number": torch.tensor(1).to(dtype),
        "transposed": torch.arange(6).view(2, 3).t().to(dtype),
        "odd bytes": torch.arange(3, dtype=torch.uint8),
        "larger than a chunk": torch.arange((1 << 24) + 5, dtype=torch.uint8),
    }
    size, sha256 = write_tensors(tmp_path / "a.safetensors", tensors)
    data = (tmp_path / "a.safetensors").read_bytes()
    assert (size, sha256) == (len(data), hashlib.sha256(data).hexdigest())
    begin = 8 + int.from_bytes(data[:8], "little")
    places = {name: entry["data_offsets"][0] for name, entry in json.loads(data[8:begin]).items()}
    assert begin % 8 == 0 and all(
        places[name] % tensor.element_size() == 0 for name, tensor in tensors.items()
    )
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )


def test_a_failed_rename_keeps_the_previous_checkpoint(tmp_path):
    saved(tmp_path)
    scratch = tmp_path / ".step_00000001.tmp-12345678"
    with faults.small_disk(scratch, size_kib=16), pytest.raises(OSError, match="busy"):
        publish(scratch, tmp_path / "step_00000001")
    assert sorted(p.name for p in tmp_path.iterdir()) == [scratch.name, "latest", "step_00000001"]
    Checkpoint.open(tmp_path / LATEST).verify()


def test_a_file_system_that_cannot_sync_folders_is_accepted():
    folder = os.open("/proc", os.O_RDONLY)
    with pytest.raises(OSError, match="Invalid argument"):
        os.fsync(folder)
    os.close(folder)
    sync_folder(Path("/proc"))


def test_a_crash_between_two_renames_loses_no_checkpoint(tmp_path):
    saved(tmp_path)
    (tmp_path / "step_00000001").rename(tmp_path / ".step_00000001.replaced")
    (tmp_path / ".step_00000001.tmp-12345678").mkdir()
    (tmp_path / ".step_00000000.removed").mkdir()
    for _ in range(2):
        remove_unfinished(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]
        Checkpoint.open(tmp_path).verify()
        # As after a crash that follows both renames.
        shutil.copytree(tmp_path / "step_00000001", tmp_path / ".step_00000001.replaced")


def test_what_is_put_aside_again_gets_a_number(tmp_path):
    def put_aside_thrice(name):
        for _ in range(3):
            (tmp_path / name).touch()
            yield put_aside(tmp_path / name).name

    names = ["left_model.safetensors", "left_model_2.safetensors", "left_model_3.safetensors"]
    assert [*put_aside_thrice("model.safetensors")] == names


def test_checkpoints_in_use_and_the_rest_of_an_interrupted_removal_do_not_hinder_a_removal(tmp_path):
    writer = CheckpointWriter(tmp_path, asynchronous=False, steps_in_use=lambda: {1})
    for step in range(1, 5):
        writer.save(snapshot(step))
    writer.finish()
    assert complete_steps(tmp_path) == [1, 2, 3, 4]
    (tmp_path / ".step_00000002.removed" / "rest").mkdir(parents=True)
    remove_surplus(tmp_path, keep=1, best_metric=None, spared={1})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000004"]


def test_a_checkpoint_that_cannot_be_removed_is_named_once_and_keeps_no_other_one(
    tmp_path, monkeypatch, capsys
):
    rename = os.rename

    def refuse(source, target):
        if Path(source).name == "step_00000001":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(source))
        rename(source, target)

    writer = CheckpointWriter(tmp_path, keep=1, asynchronous=False)
    monkeypatch.setattr(commit.os, "rename", refuse)
    for step in range(1, 5):
        writer.save(snapshot(step))
    writer.finish()
    assert complete_steps(tmp_path) == [1, 4]
    assert capsys.readouterr().err == (
        f"warning: rank 0: {tmp_path}/step_00000001: Operation not permitted; this checkpoint stays, whatever "
        "checkpoint.keep says\n"
    )


def test_a_checkpoint_opens_by_run_folder_by_itself_and_by_latest(tmp_path):
    saved(tmp_path / "checkpoints")
    for path in (".", "checkpoints", "checkpoints/step_00000001", "checkpoints/latest"):
        assert Checkpoint.open(tmp_path / path).step == 1


def test_a_missing_checkpoint_class_or_table_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        Checkpoint.open(tmp_path)
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="step 5.* 1"):
        Checkpoint.open(tmp_path, step=5)
    with pytest.raises(CheckpointError, match="class 11"):
        Checkpoint.open(tmp_path).rows("weight", 9, 13)
    with pytest.raises(CheckpointError, match="no table velocity"):
        Checkpoint.open(tmp_path).rows("velocity", 0, 1)


def test_a_save_without_a_folder_of_its_own_removes_no_checkpoint(tmp_path, monkeypatch):
    writer = CheckpointWriter(tmp_path, asynchronous=False)
    writer.save(snapshot(1))

    def refuse(scratch):
        raise OSError(errno.ENOSPC, "No space left on device", str(scratch))

    monkeypatch.setattr(commit, "make_scratch_folder", refuse)
    assert "No space left on device" in writer.save(snapshot(2)).failure
    assert complete_steps(tmp_path) == [1]
    Checkpoint.open(tmp_path).verify()


def test_a_checkpoint_whose_run_cannot_be_synced_is_not_committed(tmp_path):
    failing = []

    def sync_run():
        if failing:
            raise OSError(errno.EIO, "Input/output error", "metrics.jsonl")

    writer = CheckpointWriter(tmp_path, asynchronous=False, sync_run=sync_run)
    writer.save(snapshot(1))
    failing.append(True)
    assert "metrics.jsonl: Input/output error" in writer.save(snapshot(2)).failure
    assert complete_steps(tmp_path) == [1]
