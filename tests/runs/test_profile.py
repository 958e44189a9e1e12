import gzip
import json

import pytest

from tests.support.command import facetrain


@pytest.mark.slow
def test_a_profiled_run_leaves_traces_and_says_where_its_time_went(describe, tmp_path):
    folder = tmp_path / "run"
    options = ("--profile", "--nproc-per-node", 2, "--set", "eval.targets=[]")
    done = facetrain("train", "--config", describe(), "--run-dir", folder, *options)
    assert done.returncode == 0, done.stderr
    traces = sorted((folder / "profile").glob("*.pt.trace.json.gz"))
    assert [path.name[:10] for path in traces] == ["rank_00000", "rank_00001"]
    with gzip.open(traces[0], "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"facetrain:data", "facetrain:head", "ProfilerStep#5", "ProfilerStep#9"} <= names
    summary = (folder / "profile" / "summary.txt").read_text()
    assert summary.startswith("5 steps on cpu")
    assert all(line.strip() in done.stderr for line in summary.splitlines())
    assert f"profile written to {folder / 'profile'}" in done.stderr
    share = {line.split()[0]: float(line.split()[-1].strip("ms%")) for line in summary.splitlines()[1:9]}
    assert abs(sum(share.values()) - 100) < 1 and min(share[name] for name in ("forward", "collectives")) > 0


@pytest.mark.slow
def test_a_run_of_too_few_steps_says_that_nothing_was_profiled(describe, tmp_path):
    done = facetrain(
        "train", "--config", describe(), "--set", "train.max_steps=3", "--run-dir", tmp_path / "run", "--profile"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "nothing was profiled: that takes 11 steps" in done.stderr
