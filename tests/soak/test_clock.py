"""The most important cells of the survivors' clock: the survivor ends in time, and the cause is named."""

import importlib
import operator
import re

import pytest

from tests.soak.clock import TIMEOUT_S, Cell, compile_lost_disk, measure
from tests.soak.rank_faults import PLACES

WAITED = rf"error: rank 1 \(host, process N\) did not answer rank 0 for {TIMEOUT_S} s \(train.timeout_s\)"
EXPECTED = {
    ("dies", "gather"): r"error: rank 1 \(process N\) was ended by SIGKILL",
    ("stops", "update"): r"error: rank 1 \(process N\) was stopped \(SIGSTOP, or Ctrl-Z\) for 15 s",
    ("hangs in Python", "loading"): WAITED,
    ("hangs in a collective", "head, sampled"): WAITED,
    ("loses its network", "forward"): r"error: .*rank 1 \(\S+, process N\) cannot be reached for 15 s",
    ("loses its disk", "loading"): r"error: .*: Input/output error",
}


@pytest.mark.parametrize("place", PLACES)
def test_the_function_of_each_place_exists(place):
    module, name, _ = PLACES[place]
    assert callable(operator.attrgetter(name)(importlib.import_module(module)))


@pytest.mark.long
@pytest.mark.parametrize(("fault", "place"), EXPECTED)
def test_the_survivor_ends_in_time_and_the_cause_is_named(fault, place, tmp_path):
    cell = Cell(place, fault)
    measure(cell, tmp_path / "run", compile_lost_disk(tmp_path))
    assert not cell.is_late, cell
    assert any(re.match(EXPECTED[fault, place], line) for line in cell.lines), cell
    assert not any("Traceback" in line for line in cell.lines)
