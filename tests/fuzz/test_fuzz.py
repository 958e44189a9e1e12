"""A short run of every fuzz target; long ones are `make fuzz`."""

import itertools

import pytest

from facetrain.distributed.user_environment import user_cache_folder
from tests.fuzz import corpus as corpora
from tests.fuzz.run import TooSlow, fuzz
from tests.fuzz.target import FOLDER
from tests.fuzz.targets import TARGETS

EXECUTIONS = 500
SLOW = {"config": 50, "peer_config": 100, "mixture": 70, "mxnet_network": 35}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_mutated_input_raises_nothing_but_the_documented_error(name):
    corpus = [*TARGETS[name].seeds(), *corpora.load(name)]
    fuzz(TARGETS[name], corpus, executions=SLOW.get(name, EXECUTIONS), seed=1)


def test_catalogs_are_in_a_folder_of_the_fuzzer_while_it_runs():
    folders = set()
    fuzz(lambda data: folders.add(user_cache_folder()) or "", [b"seed"], executions=1, seed=1)
    assert folders == {FOLDER / "cache" / "facetrain"} and user_cache_folder() not in folders


def test_an_input_that_takes_too_long_is_a_failure(tmp_path, monkeypatch):
    def read(data):
        if data != b"seed":
            try:
                for _ in itertools.count():
                    pass
            except Exception:  # as readers do
                pass
        return ""

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tests.fuzz.run.MOST_SECONDS", 0.2)
    with pytest.raises(TooSlow, match=r"more than 0\.2 s"):
        fuzz(read, [b"seed"], executions=10, seed=1)
    assert (tmp_path / "fuzz-crash").exists()
