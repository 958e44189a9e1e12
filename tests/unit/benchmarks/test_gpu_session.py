"""State, slices and page of a GPU session, with jobs that take no time; and its programs on the CPU."""

import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_session import expected, measure, memory, oracles, speed, wheels
from benchmarks.gpu_session.jobs import GROUPS, SESSION_S, Job, list_jobs
from benchmarks.gpu_session.memory import largest_that_fits
from benchmarks.gpu_session.page import write_page
from benchmarks.gpu_session.session import Session, run_in_process
from facetrain.errors import UsageError
from tests.support.command import ROOT
from tests.support.processes import wait_until_gone
from tests.support.waiting import set_time

ROW = {"what": "r50", "quantity": "images/s", "expected": 2000.0, "measured": 3000.0}


class Clock:
    """Time that passes only while a job runs."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        set_time(monkeypatch, "benchmarks.gpu_session.session", monotonic=lambda: self.now)


def runner(clock, takes, **records):
    """Return a function that stands for jobs of given durations, and the list of those it ran."""
    ran = []

    def run(job, limit):
        ran.append(job.name)
        clock.now += min(takes[job.name], limit)
        if takes[job.name] > limit:
            return {"status": "timed out", "error": ["stopped"]}
        done = {"status": "done", "result": {"rows": [ROW], "machine": {"device": "H"}}}
        return records.get(job.name, done)

    return run, ran


def jobs(**seconds):
    """Jobs with so many expected seconds; each is stopped after three times as long."""
    return [Job(name, "backbone", expected) for name, expected in seconds.items()]


def test_slices_continue_where_the_last_one_ended(tmp_path, monkeypatch):
    clock, all_jobs = Clock(monkeypatch), jobs(a=100, b=100, c=70, d=20)
    run, ran = runner(clock, {"a": 250, "b": 200, "c": 200, "d": 20})
    session = Session(tmp_path / "s.json", all_jobs)
    session.run_slice(540, run, lambda line: None)
    assert clock.now <= 540
    # c begins, as there is its expected time, and is cut by the end of the slice.
    assert ran == ["a", "b", "c"] and [job.name for job in session.unfinished()] == ["c", "d"]
    session = Session(tmp_path / "s.json", all_jobs)  # another process
    session.run_slice(540, run, lambda line: None)
    assert ran == ["a", "b", "c", "c", "d"] and not session.unfinished() and not session.failed()
    assert session.state["machine"] == {"device": "H"}


def test_jobs_that_fail_or_take_too_long_do_not_stop_the_others(tmp_path, monkeypatch):
    clock, all_jobs = Clock(monkeypatch), jobs(bad=33, slow=33, endless=300, good=33)
    record = {"status": "failed", "error": ["exit code 1", "boom | bang"], "result": {"rows": [ROW]}}
    run, ran = runner(clock, {"bad": 1, "slow": 101, "endless": 1e9, "good": 1}, bad=record)
    for _ in range(3):
        session = Session(tmp_path / "s.json", all_jobs)
        session.run_slice(540, run, lambda line: None)
    # `endless` is cut once by the end of a slice, and then has a whole slice.
    assert ran == ["bad", "slow", "endless", "endless", "good"] and not session.unfinished()
    assert [job.name for job in session.failed()] == ["bad", "slow", "endless"]
    page = write_page(session.state, all_jobs)
    assert "1 of 4 jobs have results" in page and "| r50 | images/s | 2,000 | 3,000 | 1.50 |" in page
    assert "bad: failed" in page and "boom | bang" in page and "slow: timed out" in page
    session.forget_failed()
    assert [job.name for job in session.unfinished()] == ["bad", "slow", "endless"]


def test_a_job_during_which_the_session_dies_is_tried_twice(tmp_path, monkeypatch):
    clock, all_jobs = Clock(monkeypatch), jobs(fatal=33, good=33)
    run, ran = runner(clock, {"good": 1})

    def dies(job, limit):
        if job.name == "fatal":
            raise KeyboardInterrupt
        return run(job, limit)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            Session(tmp_path / "s.json", all_jobs).run_slice(540, dies, lambda line: None)
    session = Session(tmp_path / "s.json", all_jobs)
    session.run_slice(540, dies, lambda line: None)
    assert ran == ["good"] and not session.unfinished()
    assert "ended during this job 2 times" in session.state["jobs"]["fatal"]["error"][0]


def record_of(job, limit, checkout, *lines):
    """Run a job in a process, in a checkout in which its program has these lines; return the record."""
    if lines:
        package = checkout / "benchmarks" / "gpu_session"
        package.mkdir(parents=True)
        for folder in (package.parent, package):
            (folder / "__init__.py").touch()
        (package / "measure.py").write_text("\n".join(lines))
    return run_in_process(job, limit, checkout=checkout, packages=[], environment=os.environ)


@pytest.mark.slow
def test_a_process_and_its_children_end_at_the_jobs_limit(tmp_path):
    note = tmp_path / "child"
    record = record_of(
        Job("j", "backbone", 10), 10, tmp_path,
        "import json, pathlib, subprocess, sys, time",
        "pathlib.Path(sys.argv[2]).write_text(json.dumps({'rows': [1]}))",
        f"pathlib.Path({str(note)!r}).write_text(str(subprocess.Popen(['sleep', '60']).pid))",
        "print('begun', flush=True); time.sleep(60)",
    )  # fmt: skip
    # Rows that were written before the end are kept.
    assert record["status"] == "timed out" and record["result"] == {"rows": [1]}
    assert record["error"] == ["stopped after 10 s", "begun"]
    assert not wait_until_gone([int(note.read_text())])


def test_a_job_that_fails_is_recorded_with_its_last_lines(tmp_path):
    lines = ("import sys", "print(*range(99), sep='\\n')", "sys.exit('out of memory')")
    record = record_of(Job("j", "memory", 60), 60, tmp_path, *lines)
    assert record["status"] == "failed" and record["error"][0] == "exit code 1"
    assert record["error"][-1] == "out of memory" and len(record["error"]) == 16


@pytest.mark.slow
def test_a_rehearsed_job_measures_in_a_process_of_its_own():
    job = next(job for job in list_jobs(ROOT, gpus=0) if job.group == "rates")
    record = record_of(job, 240, ROOT)
    assert record["status"] == "done", record
    assert all(row["measured"] is not None for row in record["result"]["rows"]) and record["result"]["rows"]
    assert record["result"]["machine"]["device"] == "CPU (rehearsal)"


def test_a_job_has_the_allocator_and_the_folder_of_compiled_code_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path)})
    found = {}

    def program(device, failures):
        found.update(os.environ)
        yield ROW

    monkeypatch.setitem(measure._MEASURES, "rates", program)
    job = json.dumps({"group": "rates", "options": {"device": "cpu"}})
    monkeypatch.setattr(sys, "argv", ["measure", job, str(tmp_path / "result.json")])
    assert measure.main() == 0
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "facetrain" / "compiled" / "triton")


@pytest.mark.slow
@pytest.mark.parametrize("group", ["oracle", "sync"])
def test_the_program_of_a_rehearsed_job_measures(group):
    job = next(job for job in list_jobs(ROOT, gpus=0) if job.group == group)
    failures = []
    rows = list(measure._MEASURES[group](**job.options, failures=failures))
    assert rows and all(row["measured"] is not None for row in rows) and not failures


@pytest.mark.long
@pytest.mark.parametrize("group", ["self-test", "run", "backbone", "steps", "head"])
def test_a_rehearsed_job_of_minutes_measures(group):
    job = next(job for job in list_jobs(ROOT, gpus=0) if job.group == group)
    record = record_of(job, 400, ROOT)
    assert record["status"] == "done", record


def test_every_group_has_jobs_and_those_that_decide_take_40_minutes_on_one_gpu():
    for gpus in (0, 1, 8):
        all_jobs = list_jobs(ROOT, gpus=gpus, everything=True)
        assert {job.group for job in all_jobs} == GROUPS.keys()
        assert len({job.name for job in all_jobs}) == len(all_jobs)
        assert all(json.loads(json.dumps(job.options)) == job.options for job in all_jobs)
    deciding = list_jobs(ROOT, gpus=1)
    assert sum(job.seconds for job in deciding) <= SESSION_S == 2400
    assert all(
        job.seconds < 9 * 60 for job in all_jobs
    )  # a slice of a machine whose commands end after ten minutes
    assert list_jobs(ROOT, gpus=1, everything=True)[: len(deciding)] == deciding
    assert [job.group for job in deciding if job.group != "tests"] == sorted(
        (job.group for job in deciding if job.group != "tests"), key=list(GROUPS).index
    )


def test_every_job_has_a_program_that_takes_its_options_and_files_that_exist():
    for gpus in (0, 1, 8):
        for job in list_jobs(ROOT, gpus=gpus, everything=True):
            inspect.signature(measure._MEASURES[job.group]).bind(**job.options, failures=[])
            if "config" in job.options:
                expected.run_config(job.options["config"], job.options["device"])
            if "test" in job.options:
                file, name = job.options["test"].split("::")
                assert f"def {name}(" in (ROOT / file).read_text()
            if "module" in job.options:
                assert importlib.util.find_spec(job.options["module"])


def test_what_decides_fits_into_two_slices_of_a_lease_of_15_minutes(tmp_path, monkeypatch):
    clock, all_jobs = Clock(monkeypatch), list_jobs(ROOT, gpus=1)
    run, ran = runner(clock, {job.name: job.seconds for job in all_jobs})
    # A command there ends after ten minutes, and the start of the machine counts.
    for minutes in (9, 4):
        Session(tmp_path / "s.json", all_jobs).run_slice(60 * minutes, run, lambda line: None)
    groups = {job.group for job in all_jobs if job.name in ran}
    assert groups >= {"rates", "self-test", "oracle", "sync", "steps", "run"}


def test_a_rehearsal_has_more_time_than_a_gpu():
    on_gpu, on_cpu = (list_jobs(ROOT, gpus=gpus)[0] for gpus in (1, 0))
    assert on_gpu.limit == 3 * on_gpu.seconds and on_cpu.limit >= 300


def test_a_test_that_is_skipped_says_why(monkeypatch):
    output = "s\nSKIPPED [2] tests/gpu/test_head.py:30: needs a CUDA device\n2 skipped in 1.0s\n"
    done = SimpleNamespace(returncode=0, stdout=output)
    monkeypatch.setattr("benchmarks.gpu_session.oracles.subprocess.run", lambda *args, **options: done)
    (row,) = oracles.run_test("cpu", "tests/gpu/test_head.py::test_x", [])
    assert row["measured"] == "2 skipped in 1.0s: needs a CUDA device"


def test_jobs_for_more_gpus_than_there_are_do_not_appear():
    for gpus, counts in ((0, {1}), (1, {1}), (3, {1, 2}), (8, {1, 2, 4, 8})):
        jobs = list_jobs(ROOT, gpus=gpus, everything=True)
        assert {job.options["gpus"] for job in jobs if job.group == "steps"} == counts
        assert any("test_two_gpus" in job.name for job in jobs) == (gpus > 1)


def test_the_largest_number_that_fits_is_found_near_the_planned_one():
    tried = []

    def fits(number):
        tried.append(number)
        return number <= 1_100_000

    assert largest_that_fits(1_000_000, fits) == pytest.approx(1_100_000, rel=0.02)
    assert len(tried) == 6
    assert largest_that_fits(1_000_000, lambda number: False) == 0


def test_the_peak_of_memory_is_of_the_steps_after_the_first_one(monkeypatch):
    world, events = SimpleNamespace(device=torch.device("cuda", 0)), []
    run = SimpleNamespace(take_steps=lambda batches, steps: events.append(steps))
    monkeypatch.setattr(memory, "join", lambda *_, **__: nullcontext(world))
    monkeypatch.setattr(memory, "build_run", lambda *_: run)
    monkeypatch.setattr(memory, "repeated_batch", lambda *_: iter(range(9)))
    monkeypatch.setattr(memory, "synchronize", lambda device: None)
    monkeypatch.setattr(memory, "peak_gib", lambda device: 2.5)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: events.append("reset"))
    assert memory._take_steps(expected.run_config({}, "cuda"), 1000, None) == 2.5
    assert events == [1, "reset", 3]


def test_wheels_are_unpacked_without_pip_and_those_of_another_python_are_refused(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    with pytest.raises(UsageError, match="has no wheels"):
        wheels.unpack(folder, tmp_path / "site")
    with zipfile.ZipFile(folder / "some-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("some/__init__.py", "NUMBER = 7")
    with zipfile.ZipFile(folder / "stable-1.0-cp37-abi3-manylinux1_x86_64.whl", "w") as archive:
        archive.writestr("stable.py", "")
    site = wheels.unpack(folder, tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", "import some, stable; print(some.NUMBER)"],
        env={"PYTHONPATH": str(site)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "7\n", done.stderr
    (folder / "other-1.0-cp39-cp39-manylinux1_x86_64.whl").touch()
    with pytest.raises(UsageError, match="cp39.*cp3"):
        wheels.unpack(folder, tmp_path / "site")


def test_the_packages_to_carry_are_pinned_and_need_no_others():
    lock = (ROOT / "requirements.lock").read_text()
    assert all(f"\n{name}==" in f"\n{lock}" for name in wheels.CARRIED)


def test_the_script_needs_only_the_standard_library_to_list_its_jobs(tmp_path):
    # -I -S: without installed packages, as on a machine that lacks them.
    script = [ROOT / "scripts" / "gpu_session", "--cpu", "--list", "--out", tmp_path]
    done = subprocess.run([sys.executable, "-I", "-S", *script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()
    assert names[0] == "rates" and names[-1].startswith("tests/gpu/test_")


def test_gpus_that_are_hidden_are_not_counted(tmp_path):
    # Like the real one, it lists all GPUs of the machine, whatever CUDA shows.
    lister = tmp_path / "nvidia-smi"
    lister.write_text("#!/bin/sh\nseq 8\n")
    lister.chmod(0o755)
    script = [ROOT / "scripts" / "gpu_session", "--all", "--only", "steps", "--list", "--out", tmp_path]
    hidden = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *script], capture_output=True, text=True, env=os.environ | hidden, check=True
    )
    assert {name.split()[1] for name in done.stdout.splitlines()} == {"1"}


def test_the_variants_of_a_backbone_take_turns(monkeypatch):
    calls, variants = [], ["facetrain", "facetrain_in_ddp"]

    def measured(workload, labels, turns):
        calls.append((labels, turns))
        if "broken" in labels:
            raise RuntimeError("the compiler")
        found = {"images_per_s": 9.0, "peak_gib": 1.0, "first_step_s": 2.0}
        return {"variants": dict.fromkeys(labels, found)}

    monkeypatch.setattr(speed, "measure_backbone_steps", measured)
    turns = {"steps": 2, "rounds": 3}
    rows = list(speed.measure_backbone("cpu", "mbf", 2, 16, turns, variants, []))
    assert calls == [(variants, speed.Turns(**turns))] and len(rows) == 6
    failures = []
    rows = list(speed.measure_backbone("cpu", "mbf", 2, 16, turns, [*variants, "broken"], failures))
    assert len(rows) == 6 and len(failures) == 2, "one that fails takes no other along"


@pytest.mark.parametrize(("without_memory", "fails"), [("plain_bf16", False), ("head_bf16", True)])
def test_logits_that_do_not_fit_at_once_are_a_result_but_a_head_that_does_not_fit_is_a_failure(
    monkeypatch, without_memory, fails
):
    def measured(name, workload):
        if name == without_memory:
            raise torch.OutOfMemoryError("249 GiB")
        return {"step_s": 0.1, "peak_bytes": 1e9}

    monkeypatch.setattr(speed, "measure_plain", measured)
    monkeypatch.setattr(speed, "measure_variant", measured)
    failures = []
    rows = list(speed.measure_head("cpu", 1000, "bf16", 16, 1, failures))
    assert bool(failures) == fails
    found = [row["measured"] for row in rows if row["what"].startswith(f"{without_memory},")]
    assert found == ([] if fails else ["more than the GPU has"])


@pytest.mark.parametrize(
    ("errors", "fails"),
    [
        ({"error": 1e-6, "different": 0.2, "changes_others": False}, False),
        ({"error": 1e-6, "different": 0.0, "changes_others": True}, True),
        ({"error": 0.2, "different": 0.0, "changes_others": False}, True),
        ([5.0, 5.01], False),
        ([5.0, 5.1], True),
        ({"loss": 1e-6, "gradient": math.nan}, True),
    ],
)
def test_kernels_fail_by_their_errors_and_by_what_they_may_not_change(monkeypatch, errors, fails):
    done = SimpleNamespace(returncode=0, stdout=json.dumps({"kernels": {"case": errors}}))
    monkeypatch.setattr("benchmarks.gpu_session.oracles.subprocess.run", lambda *args, **options: done)
    failures = []
    rows = list(oracles.compare_kernels("cpu", "tests.support.kernels", failures))
    assert rows and bool(failures) == fails
