import pytest

from facetrain.training.trace_timeline import seconds_by_range

TRAINS, AUTOGRAD, SENDS = 1, 2, 3


def event(category, name, start, stop, thread=TRAINS, **args):
    microseconds = {"ts": start * 1e6, "dur": (stop - start) * 1e6}
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "args": args} | microseconds


def noted(name, start, stop, thread=TRAINS):
    return event("user_annotation", name, start, stop, thread)


def launched(number, at, kernel, start, stop, thread=TRAINS):
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, at + 0.1, thread, correlation=number),
        event("kernel", kernel, start, stop, 99, correlation=number),
    ]


def test_on_the_cpu_each_moment_belongs_to_the_innermost_range():
    seconds = seconds_by_range(
        [
            noted("ProfilerStep#5", 0, 10),
            noted("facetrain:data", 0, 1),
            noted("facetrain:teacher", 1.5, 2),
            noted("facetrain:forward", 2, 4),
            noted("facetrain:backward", 4, 9),
            noted("facetrain:head", 5, 7),
            noted("facetrain:collectives", 6, 7),
            noted("facetrain:optimizer", -3, -1),  # of the step before
            noted("facetrain:optimizer", 9, 9.5),
        ]
    )
    # Half a second after the batch came and half a second at the end belong to nothing.
    assert seconds == {
        "data": 1, "forward": 2, "backward": 3, "head": 1, "teacher": 0.5, "collectives": 1, "optimizer": 0.5,
        "idle": 1,
    }  # fmt: skip


def test_on_the_cpu_a_collective_counts_only_where_the_thread_that_trains_waits_for_it():
    seconds = seconds_by_range(
        [
            noted("ProfilerStep#5", 0, 10),
            noted("facetrain:backward", 0, 8),
            event("cpu_op", "aten::convolution_backward", 0, 5),
            noted("gloo:all_reduce", 3, 7, SENDS),
        ]
    )
    assert seconds["collectives"] == 2 and seconds["backward"] == 6 and seconds["idle"] == 2


def test_on_cuda_a_kernel_belongs_to_the_range_that_launched_it_not_to_the_one_it_runs_in():
    seconds = seconds_by_range(
        [
            noted("ProfilerStep#5", 0, 10),
            noted("facetrain:forward", 0, 1),
            noted("facetrain:backward", 1, 3),
            noted("facetrain:head", 1.5, 2, AUTOGRAD),
            noted("facetrain:data", 7, 9),
            *launched(1, 0.5, "implicit_gemm", 1, 3),
            *launched(2, 1.2, "implicit_gemm", 3, 4, AUTOGRAD),  # autograd's thread, within the backward pass
            *launched(3, 1.6, "softmax", 4, 6, AUTOGRAD),
        ]
    )
    assert {name: value for name, value in seconds.items() if value} == pytest.approx(
        {"forward": 2, "backward": 1, "head": 2, "data": 2, "idle": 3}
    )


def test_on_cuda_a_collective_counts_where_no_other_kernel_runs():
    seconds = seconds_by_range(
        [
            noted("ProfilerStep#5", 0, 10),
            noted("facetrain:backward", 0, 1),
            *launched(1, 0.1, "implicit_gemm", 0.5, 4),
            *launched(2, 0.2, "ncclDevKernel_AllReduce", 2, 7),
        ]
    )
    assert seconds["backward"] == 3.5 and seconds["collectives"] == 3 and seconds["idle"] == 3.5


def test_steps_in_a_row_are_one_window():
    seconds = seconds_by_range(
        [noted("ProfilerStep#5", 0, 2), noted("ProfilerStep#6", 2, 5), noted("facetrain:forward", 1, 4)]
    )
    assert seconds["forward"] == 3 and sum(seconds.values()) == 5
