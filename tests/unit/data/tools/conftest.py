import numpy as np
import pytest

from facetrain.data.images.decode import encode_jpeg
from tests.unit.data.tools.helpers import EACH, IDENTITIES, SIZE, unit


@pytest.fixture
def faces():
    """Embeddings of 40 identities, 8 images each, cosine about 0.7 inside an identity, and their identities."""
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(IDENTITIES), EACH)
    center = unit(rng.normal(size=(IDENTITIES, SIZE)))
    return unit(center[person] + 0.08 * rng.normal(size=(len(person), SIZE))), person


def jpeg(number, size=112):
    ramp = np.linspace(0, 200, size)[:, None, None] + np.array([number * 7 % 50, 0, 30])
    return encode_jpeg(np.broadcast_to(ramp, (size, size, 3)).astype(np.uint8), 90)


@pytest.fixture
def dataset(tmp_path):
    for name, count in (("ann", 3), ("bob", 1), ("cy", 2)):
        (tmp_path / "dataset" / name).mkdir(parents=True)
        for number in range(1, count + 1):
            (tmp_path / "dataset" / name / f"{name}_{number:04d}.jpg").write_bytes(
                jpeg(len(name) * 10 + number)
            )
    return tmp_path / "dataset"
