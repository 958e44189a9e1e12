"""Environment of a run."""

from facetrain.config.schema import Config
from facetrain.run.folder.environment import describe_environment, launchers_in
from facetrain.run.folder.run_files import write_run_files
from tests.support.world import ONE_RANK


def test_all_agents_of_a_job_are_listed_because_each_may_start_its_ranks_without_the_others(tmp_path):
    config = Config.model_validate({"data": {"train": "x"}})
    for launchers in (("node7:1", "node8:2"), ("node8:2", "node9:3")):
        write_run_files(tmp_path, "0" * 16, config, describe_environment(tmp_path, ONE_RANK, (), launchers))
    assert launchers_in(tmp_path) == ["node7:1", "node8:2", "node9:3"]
