import pytest
import torch

from facetrain.device.profiler_ranges import profiler_range
from facetrain.training.profile import StepProfiler
from tests.support.faults import files_limited_to


def profile_steps(count, trace, **options):
    found = []
    with StepProfiler(trace, torch.device("cpu"), found.append, warm_up=2, **options) as profiler:
        for _ in range(count):
            profiler.begin_step()
            with profiler_range("forward"):
                torch.ones(10).sum()
    return found


def test_the_profile_has_the_steps_after_the_warm_up(tmp_path):
    (found,) = profile_steps(8, tmp_path / "one.pt.trace.json.gz")
    assert found.steps == 5 and found.seconds["forward"] > 0
    assert sum(found.shares().values()) == pytest.approx(1)
    assert "aten::sum" in found.format_summary()
    assert (tmp_path / "one.pt.trace.json.gz").exists()


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_batches_that_end_too_early_leave_no_profile(tmp_path, count):
    assert profile_steps(count, tmp_path / "one.pt.trace.json.gz") == []
    assert not any(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_does_not_end_the_training(tmp_path):
    (tmp_path / "profile").touch()
    failures = []
    assert profile_steps(8, tmp_path / "profile" / "one.pt.trace.json.gz", on_failure=failures.append) == []
    assert [type(error) for error in failures] == [FileExistsError]


def test_a_full_temporary_folder_in_which_torch_cuts_the_trace_does_not_end_the_training(tmp_path):
    failures = []
    with files_limited_to(3000):
        assert profile_steps(8, tmp_path / "one.pt.trace.json.gz", on_failure=failures.append) == []
    assert "the trace is not complete; is" in str(failures[0]) and len(failures) == 1
