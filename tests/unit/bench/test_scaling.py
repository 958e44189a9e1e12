import argparse
import json

import pytest

from benchmarks.scaling import fitted_steps, gradient_bytes, measure_all


def test_the_model_finds_the_numbers_that_its_own_steps_were_made_from():
    size = gradient_bytes("mbf_small")
    made = {n: 0.5 * max(n / 2, 1) + 2 * (n - 1) / n * size / 1e9 for n in (1, 2, 4)}
    assert fitted_steps(made, 2, size) == pytest.approx(made)
    slower = made | {2: 1.1 * made[2]}
    assert made[2] < fitted_steps(slower, 2, size)[2] < slower[2]


def test_what_was_measured_before_is_not_measured_again(tmp_path):
    keep = tmp_path / "kept.jsonl"
    results = [{"processes": n, "images_per_s": 7.0 * n} for n in (1, 2, 1, 2)]
    keep.write_text("".join(json.dumps(result) + "\n" for result in results))
    found = measure_all(argparse.Namespace(processes=[1, 2], rounds=2, keep=keep))
    assert [result["images_per_s"] for result in found[2]] == [14.0, 14.0] and len(found[1]) == 2
