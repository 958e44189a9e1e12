import pickle

import numpy as np
import pytest

from facetrain.data.shared_array import SharedArray
from facetrain.distributed.spawn import HelperContext
from facetrain.errors import RunError
from tests.support.faults import files_limited_to


def add(numbers, step):
    """Add to shared numbers in a process of its own."""
    numbers.array[...] += step


def test_a_process_that_is_started_has_the_memory_and_a_pickled_array_is_a_copy():
    numbers = SharedArray.of(np.arange(6).reshape(2, 3), "int32")
    copy = pickle.loads(pickle.dumps(numbers))
    process = HelperContext().Process(target=add, args=(numbers, 10))
    process.start()
    process.join()
    assert process.exitcode == 0 and numbers.array.dtype == copy.array.dtype == np.int32
    assert numbers.array.tolist() == [[10, 11, 12], [13, 14, 15]]
    assert copy.array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_array_may_be_empty():
    assert pickle.loads(pickle.dumps(SharedArray((0, 3), "int64"))).array.shape == (0, 3)


def test_a_limit_of_the_system_is_named_with_the_memory_that_it_refuses():
    with (
        files_limited_to(1000),
        pytest.raises(RunError, match=r"^8\.0 MB of memory for .*: File too large; .*ulimit -f"),
    ):
        SharedArray((1000, 1000), "int64")
