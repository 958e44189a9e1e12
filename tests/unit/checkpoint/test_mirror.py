"""Checkpoints in an object store: complete or absent, whatever happens to an upload; training does not wait."""

import os
import re
import tempfile
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from facetrain.checkpoint import mirror as mirror_module
from facetrain.checkpoint import uploads as uploads_module
from facetrain.checkpoint.commit import complete_steps, step_folder
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.mirror import Mirror
from facetrain.checkpoint.mirror_store import MirrorStore
from facetrain.config.schema import Config
from facetrain.distributed import collectives
from facetrain.errors import CheckpointError, DamagedCheckpointError, UsageError
from facetrain.remote.filesystem import open_filesystem
from facetrain.remote.ranges import download_ranges
from tests.support.checkpoints import flip_a_bit
from tests.support.faults import files_limited_to, full, small_disk
from tests.support.mirrored import RUN_ID, URL, save, upload, uploads_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("store")


def fetched(folder, step):
    """Return a checkpoint of the mirror after its download, compared with its checksums."""
    Mirror(URL).fetch(step, folder / "checkpoints")
    checkpoint = Checkpoint.open(folder, step)
    checkpoint.verify()
    return checkpoint


def test_a_checkpoint_comes_back_from_the_mirror_with_the_files_of_its_run(tmp_path):
    assert upload(tmp_path, save(tmp_path, 2)) == "" and Mirror(URL).steps() == [2]
    other = tmp_path / "other"
    other.mkdir()
    assert fetched(other, 2).manifest == Checkpoint.open(tmp_path).manifest
    Mirror(URL).fetch_files(other, replace=False)
    Mirror(URL).fetch(2, tmp_path / "third" / "checkpoints", records_to=tmp_path / "third")
    assert (tmp_path / "third" / "run_id.txt").exists()
    assert (other / "run_id.txt").read_text() == RUN_ID and not (other / "claim").exists()


def test_the_records_of_a_run_are_there_before_the_checkpoint_after_which_nothing_more_is_fetched(
    tmp_path, monkeypatch
):
    assert upload(tmp_path, save(tmp_path, 2)) == ""
    other = tmp_path / "other"
    other.mkdir()

    def publish(scratch, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(mirror_module, "publish", publish)
    with pytest.raises(KeyboardInterrupt):
        Mirror(URL).fetch(2, other / "checkpoints", records_to=other)
    assert (other / "run_id.txt").exists() and not complete_steps(other / "checkpoints")


@pytest.mark.parametrize(("replace", "expected"), [(False, ["old", "new"]), (True, ["new", "new"])])
def test_files_that_a_host_has_stay_but_its_records_unless_the_run_has_gone_on_elsewhere(
    tmp_path, replace, expected
):
    names = ("config.yaml", "metrics.jsonl")
    for folder, text in ((tmp_path / "theirs", "new"), (tmp_path / "ours", "old")):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(text)
    models = [tmp_path / "theirs" / name for name in ("model.safetensors", "model.onnx")]
    for model in models:
        model.write_bytes(b"of a run that has ended")
    Mirror(URL).upload_files([*models, *(tmp_path / "theirs" / name for name in names)])
    Mirror(URL).fetch_files(tmp_path / "ours", replace=replace)
    assert [(tmp_path / "ours" / name).read_text() for name in names] == expected
    assert not any((tmp_path / "ours" / model.name).exists() for model in models)


def test_a_host_downloads_only_the_files_that_it_lacks_or_has_damaged(tmp_path, store):
    upload(tmp_path, save(tmp_path, 2))
    folder = Checkpoint.open(tmp_path).folder
    (folder / "replicated.safetensors").unlink()
    flip_a_bit(next(folder.glob("rows_*")))
    store.requests.clear()
    fetched(tmp_path, 2)
    files = {path for method, path, _ in store.requests if method == "GET" and "safetensors" in path}
    assert len(files) == 2 and all("rows_" in path or "replicated" in path for path in files)
    assert not list((tmp_path / "checkpoints").glob(".*")), "nothing is left of the download"


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step with other content"])
def test_an_upload_that_ends_after_any_request_leaves_complete_checkpoints_only(tmp_path, monkeypatch, again):
    upload(tmp_path, save(tmp_path, 2), keep=1)
    second = save(tmp_path, 2 if again else 4, note="second")
    do, left, seen = MirrorStore._do, [0], []

    def limited(store, name, operation):
        if left[0] == 0:
            raise CheckpointError("the process has ended")
        left[0] -= 1
        return do(store, name, operation)

    for count in range(100):
        left[0] = count
        with monkeypatch.context() as patch:
            patch.setattr(MirrorStore, "_do", limited)
            upload(tmp_path, second, keep=1)
        newest = fetched(tmp_path / str(count), Mirror(URL).steps()[-1])
        seen.append((newest.step, newest.meta["note"]))
        if left[0]:
            break
    before, after = (2, "a"), (second.step, "second")
    assert seen == sorted(seen, key=[before, after].index), "the newest checkpoint never goes back"
    assert set(seen) == {before, after} and Mirror(URL).steps() == [second.step]


@pytest.mark.slow
def test_the_mirror_keeps_the_newest_checkpoints_and_the_best_and_removes_remains(tmp_path):
    store, path = open_filesystem(URL)
    outcomes = [
        save(tmp_path, step, metrics={"lfw/accuracy": accuracy})
        for step, accuracy in ((2, 0.5), (4, 0.9), (6, 0.6), (8, 0.7))
    ]
    store.pipe_file(f"{path}/checkpoints/step_00000003/rows.0123.safetensors", b"of a killed upload")
    upload(tmp_path, *outcomes, keep=2, best_metric="lfw/accuracy")
    assert Mirror(URL).steps() == [4, 6, 8]
    names = {name.split("/")[-2] for name in store.find(f"{path}/checkpoints")}
    assert names == {"step_00000004", "step_00000006", "step_00000008"}


def test_steps_go_on_while_the_store_is_slow_and_a_newer_checkpoint_takes_the_place_of_one_that_waits(
    tmp_path, monkeypatch, capsys
):
    may_go_on, upload_files = threading.Event(), Mirror.upload

    def slow(mirror, *arguments):
        may_go_on.wait()
        upload_files(mirror, *arguments)

    monkeypatch.setattr(Mirror, "upload", slow)
    uploads = uploads_of(tmp_path)
    for step in (2, 4, 6):  # none of these calls returns if it waits for the store
        uploads.add(save(tmp_path, step))
        uploads.poll()
    assert uploads.steps_in_use == {2, 6} and Mirror(URL).steps() == []
    may_go_on.set()
    assert uploads.finish() == "" and Mirror(URL).steps() == [2, 6]
    assert uploads.steps_in_use == set(), "a checkpoint that is uploaded may be removed"
    assert capsys.readouterr().err.count("step 4 is left out") == 1


def test_an_upload_that_hangs_is_given_up_at_the_end_of_the_time(tmp_path, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(Mirror, "upload", lambda *_: may_end.wait())
    uploads = uploads_of(tmp_path)
    uploads.add(save(tmp_path, 2))
    try:
        assert "had not ended" in uploads.finish(limit_s=0.01)
    finally:
        may_end.set()
        uploads.finish()  # its thread would warn while another test runs


def test_a_full_store_is_one_warning_and_a_later_upload_succeeds(tmp_path, store, capsys):
    outcomes, uploads = [save(tmp_path, step) for step in (2, 4)], uploads_of(tmp_path)
    store.full = True
    uploads.add(outcomes[0])
    assert "507" in uploads.finish()
    error = capsys.readouterr().err
    assert error.count("warning") == 1 and f"step 2 was not uploaded: {URL}" in error
    store.full = False
    uploads.add(outcomes[1])
    assert uploads.finish() == "" and Mirror(URL).steps() == [4]


def test_an_error_of_this_disk_in_an_upload_names_its_file_and_not_the_store(tmp_path, monkeypatch):
    outcome, disk = save(tmp_path, 2), tmp_path / "disk"
    file = step_folder(tmp_path / "checkpoints", 2) / outcome.files[0].name
    content = file.read_bytes()
    file.unlink()
    assert upload(tmp_path, outcome) == f"{file}: No such file or directory"
    file.write_bytes(content)
    with small_disk(disk, size_kib=64), full(disk):
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        failure = upload(tmp_path, outcome)
    assert re.match(rf"{disk}/.+/run_id.txt: No space left on device; free space", failure)


def test_an_object_that_the_store_loses_after_its_upload_ends_the_wait(tmp_path, store, monkeypatch):
    put = MirrorStore.upload

    def lose_rows(store, path, name):
        if not path.name.startswith("rows_"):
            put(store, path, name)

    with monkeypatch.context() as patch:
        patch.setattr(MirrorStore, "upload", lose_rows)
        saved = save(tmp_path, 2)
        assert "rows_" in upload(tmp_path, saved) and Mirror(URL).steps() == []
    store.requests.clear()
    assert upload(tmp_path, saved) == "" and Mirror(URL).steps() == [2]
    uploaded = [path for method, path, _ in store.requests if method == "PUT" and ".safetensors" in path]
    assert len(uploaded) == 1 and "rows_" in uploaded[0], "the others are there"


def test_the_leader_waits_at_every_upload_for_the_files_of_the_others(tmp_path, monkeypatch):
    checkpoints, missing = [save(tmp_path, step) for step in (2, 4, 6)], Mirror.missing
    other = ["the store refuses", False]  # what another rank reports, which has all files but one
    monkeypatch.setattr(collectives, "gather_json", lambda own: [own, list(other)])
    uploads = uploads_of(tmp_path)

    def missing_before_its_upload(mirror, step, files):
        found = missing(mirror, step, files)
        if len(files) > 1 and other == ["", False]:
            other[1] = True
            mirror.upload(step_folder(tmp_path / "checkpoints", step), step, files)
            wait_until(uploads._others_ended.is_set)
        return found

    monkeypatch.setattr(Mirror, "missing", missing_before_its_upload)
    for saved, failure in zip(checkpoints, ("the store refuses", "", ""), strict=True):
        uploads.add(replace(saved, files=saved.files[:1]))
        assert uploads.finish() == failure
        other[:] = "", False
    assert Mirror(URL).steps() == [4, 6]


def test_the_leader_looks_less_and_less_often_for_files_that_do_not_come(tmp_path, monkeypatch):
    pauses = []

    class Waiting(threading.Event):
        def wait(self, timeout):
            pauses.append(timeout)
            if len(pauses) == 4:
                self.set()

    monkeypatch.setattr(uploads_module, "_POLL_S", 10)
    uploads, saved = uploads_of(tmp_path), save(tmp_path, 2)
    uploads._others_ended = Waiting()
    with pytest.raises(CheckpointError, match="was uploaded, and is not there"):
        uploads._wait_for_all(2, saved.manifest)
    assert pauses == [10, 20, 30, 30]


def test_a_rank_reports_no_upload_before_its_own_has_ended(tmp_path, monkeypatch):
    may_go_on, reports, upload_files = threading.Event(), [], Mirror.upload
    first, second = (save(tmp_path, step) for step in (2, 4))
    monkeypatch.setattr(collectives, "gather_json", lambda own: reports.append(own) or [own])
    uploads = uploads_of(tmp_path)
    uploads.add(first)
    assert uploads.finish() == "" and reports[-1] == ["", True]

    def slow(mirror, *arguments):
        may_go_on.wait()
        upload_files(mirror, *arguments)

    monkeypatch.setattr(Mirror, "upload", slow)
    uploads.add(second)
    uploads.finish(limit_s=0)
    may_go_on.set()
    assert reports[-1] == ["", False]
    assert uploads.finish() == "" and reports[-1] == ["", True]


def test_a_store_that_lists_new_objects_late_keeps_the_checkpoint_that_was_committed_last(
    tmp_path, monkeypatch, capsys
):
    upload(tmp_path, save(tmp_path, 2))
    find = MirrorStore.find

    def find_late(store, place):
        found = find(store, place)
        found.pop("checkpoints/step_00000004/manifest.json", None)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(MirrorStore, "find", find_late)
        assert upload(tmp_path, save(tmp_path, 4), keep=1) == "" and not capsys.readouterr().err
    assert Mirror(URL).steps() == [4] and fetched(tmp_path / "other", 4).step == 4


def test_a_damaged_object_is_refused_and_leaves_no_checkpoint(tmp_path):
    saved = save(tmp_path, 2)
    upload(tmp_path, saved)
    store, path = open_filesystem(URL)
    (rows,) = (name for name in store.find(path) if "rows_" in name)
    content = store.cat_file(rows)
    store.pipe_file(rows, content[:-1] + b"?")
    with pytest.raises(DamagedCheckpointError, match=r"rows_.*checksum differs"):
        Mirror(URL).fetch(2, tmp_path / "other" / "checkpoints")
    assert not list((tmp_path / "other" / "checkpoints").iterdir())
    store.pipe_file(rows, content[:-1])
    assert upload(tmp_path, saved) == "" and fetched(tmp_path / "other", 2), "one of another size is replaced"


def test_files_are_downloaded_side_by_side_and_the_first_error_waits_for_none_that_hangs(
    tmp_path, monkeypatch
):
    upload(tmp_path, save(tmp_path, 2))
    have_begun, has_failed, ended = threading.Barrier(3, timeout=60), threading.Event(), []

    def download(url, path, size, scratch, *, report, **options):
        if "manifest" in path:
            return download_ranges(url, path, size, scratch, report=report, **options)
        scratch.write_bytes(b"the first part")
        have_begun.wait()
        if "rows_" in path:
            raise CheckpointError("the store refuses")
        assert has_failed.wait(60)
        with pytest.raises(CancelledError) as cancelled:
            report(1)
        ended.append(path)
        raise cancelled.value

    monkeypatch.setattr("facetrain.checkpoint.mirror_store.download_ranges", download)
    with pytest.raises(CheckpointError, match="the store refuses"):
        Mirror(URL).fetch(2, tmp_path / "other" / "checkpoints")
    has_failed.set()
    wait_until(lambda: len(ended) == 2)
    assert not list((tmp_path / "other" / "checkpoints").iterdir())


def test_a_download_that_writes_while_its_folder_is_removed_leaves_none(tmp_path, monkeypatch):
    upload(tmp_path, save(tmp_path, 2))
    checkpoints, rmdir, scratch = tmp_path / "other" / "checkpoints", os.rmdir, []

    def download(url, path, size, target, **options):
        scratch.append(target.parent)
        if "manifest" not in path:
            raise CheckpointError("the store refuses")
        return download_ranges(url, path, size, target, **options)

    def remove(path, **options):
        # As a thread that has passed its last check: it writes by the name that it knows.
        with suppress(FileNotFoundError):
            (scratch[0] / "late").write_bytes(b"late")
        rmdir(path, **options)

    monkeypatch.setattr("facetrain.checkpoint.mirror_store.download_ranges", download)
    monkeypatch.setattr(os, "rmdir", remove)
    with pytest.raises(CheckpointError, match="the store refuses"):
        Mirror(URL).fetch(2, checkpoints)
    assert not list(checkpoints.iterdir())


def test_an_error_of_the_store_names_the_object(tmp_path):
    upload(tmp_path, save(tmp_path, 2))
    with pytest.raises(CheckpointError, match=f"^{URL}/checkpoints/step_00000004/manifest.json: not found"):
        Mirror(URL).fetch(4, tmp_path / "other" / "checkpoints")


def test_a_damaged_manifest_of_the_newest_checkpoint_does_not_hide_the_others(tmp_path):
    upload(tmp_path, save(tmp_path, 2), save(tmp_path, 4))
    store, path = open_filesystem(URL)
    (name,) = (
        name for name in store.find(path) if "step_00000004/" in name and name.endswith("manifest.json")
    )
    store.pipe_file(name, store.cat_file(name).replace(b'"note": "a"', b'"note": "b"'))
    Mirror(URL).check_run(RUN_ID)
    assert fetched(tmp_path / "other", 2).meta["note"] == "a"
    with pytest.raises(DamagedCheckpointError, match=rf"^{URL}/.*step_00000004/.*--checkpoint STEP"):
        Mirror(URL).manifest(4)
    upload(tmp_path, save(tmp_path, 6), keep=2, best_metric="lfw/accuracy")
    assert Mirror(URL).steps() == [4, 6]


def test_a_start_reads_manifests_and_files_of_the_mirror_without_a_temporary_folder(tmp_path, monkeypatch):
    upload(tmp_path, save(tmp_path, 2))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert Mirror(URL).manifest(2).step == 2 and Mirror(URL).read_text("run_id.txt") == RUN_ID
    Mirror(URL).check_run(RUN_ID)


def test_an_object_in_place_of_a_manifest_is_not_read_into_the_memory(tmp_path, monkeypatch):
    upload(tmp_path, save(tmp_path, 2))
    monkeypatch.setattr("facetrain.checkpoint.mirror_store.MAX_BYTES", 9)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json: [\d,]+ bytes, more than the 9 that"):
        Mirror(URL).manifest(2)


def test_a_mirror_whose_manifests_cannot_be_read_is_not_taken_over(tmp_path):
    upload(tmp_path, save(tmp_path, 2))
    store, path = open_filesystem(URL)
    (name,) = (name for name in store.find(path) if name.endswith("manifest.json"))
    sound = store.cat_file(name)
    store.pipe_file(name, sound.replace(b'"format": 1', b'"format": 99'))  # of a later version: not damaged
    with pytest.raises(CheckpointError, match="; use that version$"):
        Mirror(URL).check_run("f" * 16)
    left = name.replace("manifest", "left_1_manifest")
    store.copy(name, left)
    with pytest.raises(CheckpointError, match=rf"^{URL}/.*/left_1_manifest\.json: .*; use that version$"):
        Mirror(URL).remove_surplus(2, keep=1, best_metric=None)
    store.rm_file(left)
    store.pipe_file(name, sound[:-9])
    with pytest.raises(
        UsageError, match=rf"another run .id {RUN_ID}.* in another folder, by `facetrain resume"
    ):
        Mirror(URL).check_run("f" * 16)
    Mirror(URL).check_run(RUN_ID)


def test_a_local_checkpoint_of_another_course_is_put_aside(tmp_path):
    upload(tmp_path, save(tmp_path, 2))
    save(tmp_path, 2, note="another course")
    assert fetched(tmp_path, 2).meta["note"] == "a"
    assert Checkpoint(tmp_path / "checkpoints" / "left_step_00000002").meta["note"] == "another course"


@pytest.mark.slow
def test_checkpoints_after_the_step_that_a_run_goes_back_to_do_not_count_but_are_kept(tmp_path):
    upload(tmp_path, *[save(tmp_path, step) for step in (2, 4, 6)])
    Mirror(URL).leave_after(2)
    assert Mirror(URL).steps() == [2]
    upload(tmp_path, save(tmp_path, 8), keep=1)
    assert Mirror(URL).steps() == [8]
    store, path = open_filesystem(URL)
    assert any("step_00000006/replicated" in name for name in store.find(path))


def test_of_two_runs_that_begin_together_only_the_later_one_writes_to_the_mirror(tmp_path, capsys):
    uploads, other = uploads_of(tmp_path, keep=1), "f" * 16
    Mirror(URL).check_run(other)  # a start that ends before its first checkpoint
    uploads.add(save(tmp_path, 2))
    assert uploads.finish() == "" and Mirror(URL).steps() == [2]
    with pytest.raises(UsageError, match="holds the checkpoints of another run"):
        Mirror(URL).claim(other)
    filesystem, root = open_filesystem(URL)
    filesystem.pipe_file(f"{root}/claim", other.encode())  # it has looked before the first checkpoint
    uploads.add(save(tmp_path, 4))
    assert f"another run of this name has begun to use it (id {other}" in uploads.finish()
    assert Mirror(URL).steps() == [2] and "was not uploaded" in capsys.readouterr().err
    assert not any("step_00000004" in name for name in filesystem.find(root)), "uploaded in vain"


def test_no_rank_uploads_before_the_leader_has_found_that_the_mirror_is_the_run_s(
    tmp_path, store, monkeypatch
):
    answers = []  # of all ranks: busy, busy, failed
    monkeypatch.setattr(collectives, "any_rank", lambda flag: flag or answers.pop(0))
    uploads = uploads_of(tmp_path)
    for step, has_failed in ((2, True), (4, False)):
        saved = replace(save(tmp_path, step), manifest=None)  # of another rank than the leader
        answers[:] = [False, True, False, has_failed]
        store.requests.clear()
        uploads.add(saved)
        wait_until(lambda: not uploads._is_busy)
        uploads.poll()
        assert not store.requests and uploads.steps_in_use == {step}, "the leader still looks"
        uploads.poll()
        wait_until(lambda: not uploads._is_busy)
        assert bool(store.requests) is not has_failed and not answers


@pytest.mark.slow
def test_of_two_processes_that_continue_one_run_only_the_later_one_writes_to_the_mirror(
    tmp_path, monkeypatch, capsys
):
    older = uploads_of(tmp_path, keep=1)
    older.add(save(tmp_path, 2))
    assert older.finish() == ""
    Mirror(URL, process="b").claim(RUN_ID)  # the later process starts
    newer = uploads_of(tmp_path, keep=1, process="b", has_claimed=True)
    older.add(save(tmp_path, 6))
    assert f"another process has continued this run (id {RUN_ID}) since" in older.finish()
    assert Mirror(URL).steps() == [2]
    newer.add(save(tmp_path, 4))
    assert newer.finish() == "" and Mirror(URL).steps() == [4]
    newer.add(save(tmp_path, 8))
    assert newer.finish() == "" and Mirror(URL).steps() == [8]

    upload_files, commit = Mirror.upload_files, Mirror.commit

    def upload_and_lose(mirror, paths):
        upload_files(mirror, paths)
        Mirror(URL, process="c").claim(RUN_ID)  # another start

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "upload_files", upload_and_lose)
        newer.add(save(tmp_path, 12))
        assert "another process has continued" in newer.finish() and Mirror(URL).steps() == [8]
    Mirror(URL, process="b").claim(RUN_ID)

    def commit_and_lose(mirror, manifest):
        commit(mirror, manifest)
        Mirror(URL, process="c").claim(RUN_ID)  # another start

    monkeypatch.setattr(Mirror, "commit", commit_and_lose)
    newer.add(save(tmp_path, 10))
    assert newer.finish() == "" and Mirror(URL).steps() == [8, 10], "what the other one may need stays"
    assert "were not removed" in capsys.readouterr().err


def test_a_mirror_of_an_earlier_version_whose_claim_is_the_id_of_the_run_is_continued(tmp_path):
    upload(tmp_path, save(tmp_path, 2))
    filesystem, root = open_filesystem(URL)
    filesystem.rm_file(f"{root}/claim")
    assert upload(tmp_path, save(tmp_path, 4)) == "" and Mirror(URL).steps() == [2, 4]


def test_a_run_goes_on_uploading_where_the_store_has_removed_its_claim(tmp_path):
    uploads = uploads_of(tmp_path)
    uploads.add(save(tmp_path, 2))
    assert uploads.finish() == ""
    filesystem, root = open_filesystem(URL)
    filesystem.rm_file(f"{root}/claim")
    uploads.add(save(tmp_path, 4))
    assert uploads.finish() == "" and Mirror(URL).steps() == [2, 4]
    Mirror(URL, process="b").claim(RUN_ID)  # the claim of another process still ends the uploads
    uploads.add(save(tmp_path, 6))
    assert "another process has continued this run" in uploads.finish()


@pytest.mark.slow
def test_steps_that_are_saved_again_free_their_place_and_keep_what_was_left(tmp_path):
    upload(tmp_path, save(tmp_path, 2), save(tmp_path, 4))
    left = {name for name in Mirror(URL)._objects() if "step_00000004" in name and "manifest" not in name}
    Mirror(URL).leave_after(2)
    again = tmp_path / "again"
    again.mkdir()
    changed = {"replicated": {"backbone.w": torch.ones(5)}}
    upload(again, *(save(again, step, note="b", **changed) for step in (4, 6, 8)), keep=2)
    assert Mirror(URL).steps() == [6, 8]
    found = {name for name in Mirror(URL)._objects() if "step_00000004" in name}
    assert found == {*left, "checkpoints/step_00000004/left_1_manifest.json"}
    filesystem, root = open_filesystem(URL)
    filesystem.pipe_file(f"{root}/checkpoints/step_00000004/left_1_manifest.json", b"{")
    Mirror(URL).remove_surplus(8, keep=1, best_metric=None)
    assert Mirror(URL).steps() == [8], "a damaged one ends no clean-up"
    assert left < set(Mirror(URL)._objects()) and not any(
        "step_00000006" in name for name in Mirror(URL)._objects()
    )


def test_a_run_that_goes_back_twice_over_a_step_keeps_both_courses(tmp_path):
    upload(tmp_path, save(tmp_path, 2))
    for course in ("a", "b", "c"):
        changed = {"replicated": {"backbone.w": torch.full((5,), float(ord(course)))}}
        upload(tmp_path, save(tmp_path, 4, note=course, **changed))
        Mirror(URL).leave_after(2)
    upload(tmp_path, save(tmp_path, 6))
    names = [name.rpartition("/")[2] for name in Mirror(URL)._objects() if "step_00000004" in name]
    assert sum(name.startswith("replicated") for name in names) == 3
    assert {f"left_{number}_manifest.json" for number in (1, 2, 3)} <= set(names)


def test_a_record_that_grows_while_it_is_uploaded_is_uploaded_as_it_was(tmp_path, monkeypatch):
    mirror, record = Mirror(URL), tmp_path / "metrics.jsonl"
    record.write_text('{"step": 1}\n')
    objects = mirror._store._objects
    put = objects.put_file

    def put_while_it_grows(source, name):
        with record.open("a") as file:
            file.write('{"step": 2}\n')
        put(source, name)

    monkeypatch.setattr(objects, "put_file", put_while_it_grows)
    mirror.upload_files([record])
    assert mirror.read_text("metrics.jsonl") == '{"step": 1}\n'


@pytest.mark.parametrize("name", ["model.safetensors", "model.onnx"])
def test_a_model_is_uploaded_without_a_copy(tmp_path, name):
    model = tmp_path / name
    model.write_bytes(b"x" * 5000)
    with files_limited_to(1000):
        Mirror(URL).upload_files([model])
    assert MirrorStore(URL).find("")[name] == 5000


@pytest.mark.parametrize("address", ["runs", "https://host/a", "s3://key:secret@bucket/a"])
def test_other_addresses_are_refused_without_their_secrets(address):
    with pytest.raises(ValueError, match="without credentials") as caught:
        Config.model_validate({"data": {"train": "a"}, "checkpoint": {"mirror": address}})
    assert "secret" not in caught.value.errors(include_input=False)[0]["msg"]
