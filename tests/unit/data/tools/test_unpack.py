from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.unpack import unpack
from tests.support.datasets import write_records
from tests.unit.data.tools.helpers import grouped_images


def test_unpacked_files_have_the_bytes_of_the_records(tmp_path):
    data = write_records(tmp_path / "data", [0, 0, 1, 1, 1, 2, 3, 3, 3, 3])
    written = unpack(data, tmp_path / "out")
    assert (written.identities, written.images) == (4, 10)
    assert grouped_images(tmp_path / "out") == grouped_images(data)
    assert (tmp_path / "out" / "3" / "9.png").read_bytes() == open_dataset(data).read(9)
