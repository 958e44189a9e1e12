"""Environment of a run."""

import re

import pytest

from facetrain.config.schema import Config
from facetrain.run.folder.environment import describe_environment, environment_changes, launchers_in
from facetrain.run.folder.run_files import write_run_files
from tests.support.world import ONE_RANK


def test_all_agents_of_a_job_are_listed_because_each_may_start_its_ranks_without_the_others(tmp_path):
    config = Config.model_validate({"data": {"train": "x"}})
    for launchers in (("node7:1", "node8:2"), ("node8:2", "node9:3")):
        write_run_files(tmp_path, "0" * 16, config, describe_environment(tmp_path, ONE_RANK, (), launchers))
    assert launchers_in(tmp_path) == ["node7:1", "node8:2", "node9:3"]


NOW = {"packages": {"torch": "2.9"}, "threads": 4, "device": "cuda H100", "kernels": True}


@pytest.mark.parametrize(
    ("before", "line"),
    [
        (
            {"device": "cuda A100"},
            "computed on cuda A100 with kernels for the head before, and does on cuda H100 with",
        ),
        (
            {"kernels": False},
            "computed on cuda H100 without kernels .* before, and does on cuda H100 with kernels",
        ),
        ({"threads": 2}, "with 4 threads, and the run did with 2 before"),
        ({"packages": {"torch": "2.8"}}, "have changed: torch 2.8 → 2.9"),
    ],
)
def test_a_run_says_what_has_changed_around_it_in_one_line(before, line):
    (found,) = environment_changes(NOW | before, NOW)
    assert re.search(line, found) and "may differ in the last digits" in found


def test_what_was_not_recorded_has_not_changed():
    for before in ({}, NOW, {"packages": 1}):
        assert not list(environment_changes(before, NOW))
    (line,) = environment_changes({"device": "cpu"}, NOW)
    assert line.startswith("the run computed on cpu before, and does on cuda H100 with kernels")
