import numpy as np
import pytest

from facetrain.distinct import distinct


@pytest.mark.parametrize("values", [[], [3], [2, 2, 2], [5, -1, 3, 5, -1, 0]])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_different_values_are_those_of_numpy_in_their_dtype(values, dtype):
    values = np.array(values, dtype)
    expected, found = np.unique(values), distinct(values)
    assert found.dtype == expected.dtype and found.tolist() == expected.tolist()
