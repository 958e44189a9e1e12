import json

import pytest

from facetrain.bench.scaling import ScalingSettings, fit_step_seconds, gradient_bytes, measure_all
from facetrain.errors import UsageError


def settings(results=None):
    return ScalingSettings(
        processes=(1, 2), backbone="mbf_small", local_batch=4, steps=1, rounds=2, results=results
    )


def result_of(processes):
    return {
        "processes": processes,
        "images_per_s": 7.0 * processes,
        "share_of_time": {"collectives": 0.1},
    }


def test_the_model_recovers_the_numbers_that_its_steps_were_made_from():
    size = gradient_bytes("mbf_small")
    made = {n: 0.5 * max(n / 2, 1) + 2 * (n - 1) / n * size / 1e9 for n in (1, 2, 4)}
    assert fit_step_seconds(made, 2, size) == pytest.approx(made)
    slower = made | {2: 1.1 * made[2]}
    assert made[2] < fit_step_seconds(slower, 2, size)[2] < slower[2]


def test_results_in_the_file_are_not_measured_again(tmp_path):
    path = tmp_path / "results.jsonl"
    results = [result_of(n) for n in (1, 2, 1, 2)]
    path.write_text("".join(json.dumps(result) + "\n" for result in results))
    found = measure_all(settings(path))
    assert [result["images_per_s"] for result in found[2]] == [14.0, 14.0] and len(found[1]) == 2


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        '{"foo": 1}',
        "[1]",
        '{"processes": 1, "images_per_s": 7.0}',
        json.dumps(result_of(1) | {"images_per_s": 0}),
        json.dumps(result_of(1) | {"share_of_time": [1]}),
    ],
)
def test_a_file_of_results_that_is_none_is_refused(tmp_path, line):
    (tmp_path / "results").write_text(line)
    with pytest.raises(UsageError, match="results.*: .*bench scaling"):
        measure_all(settings(tmp_path / "results"))
