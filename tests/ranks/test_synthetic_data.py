import time
from types import SimpleNamespace

import pytest

from facetrain.config.schema import Config
from facetrain.distributed import collectives
from facetrain.errors import DataError, FacetrainError
from facetrain.run.build import open_data
from tests.support.ranks import run_ranks


def write_slowly(folder, faces, *, image_size):
    if faces.identities == 13:
        raise DataError("unlucky")
    time.sleep(0.2)
    folder.mkdir()


def write_and_look(folder, identities):
    config = Config.model_validate({"data": {"train": str(folder), "synthetic": {"identities": identities}}})
    world = SimpleNamespace(rank=collectives.rank(), is_leader=collectives.rank() == 0)
    open_data.write_synthetic = write_slowly
    try:
        open_data.write_missing_dataset(config, world)
    except FacetrainError as error:
        return str(error)
    return str(folder.exists())


@pytest.mark.parametrize(
    ("identities", "expected"), [(12, ["True"] * 3), (13, ["unlucky", "rank 0 failed", "rank 0 failed"])]
)
def test_ranks_wait_for_the_dataset_that_the_leader_writes_and_fail_with_it(tmp_path, identities, expected):
    assert run_ranks(3, write_and_look, tmp_path / "data", identities) == expected
