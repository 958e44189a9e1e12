#!/usr/bin/env python3
"""Speedrun: train recipes with several seeds, and print the time and the accuracy of each run and their means.

    python recipes/speedrun/run.py --data data/real

The time is that of the whole command `facetrain train`: start, compilation with an empty cache, training, and writing
the model. docs/log/log.md has the rules and the history of the record.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

from facetrain.config.loading import load_config

FOLDER = Path(__file__).resolve().parent
LFW = "lfw_folds1-2"
RECIPES = ("speedrun", "best", "plain")
"""Names of the configs here: the record, the best in 20 minutes, and the recipe that the record must reach."""


@dataclass(frozen=True)
class Result:
    """Time and accuracy of one run."""

    seed: int
    seconds: float
    """Wall-clock time of `facetrain train`."""
    accuracy: float
    """Accuracy on the pairs of LFW's folds 1 and 2, from 0 to 1."""
    eer: float
    """Equal error rate on the same pairs, from 0 to 1."""


def run_seed(recipe: str, seed: int, data: Path, output: Path) -> Result:
    """Train a recipe with one seed and evaluate it, or read the result of an earlier call from `output`.

    A result of other data, or from before a change of the recipe, is made anew.
    """
    run = output / f"{recipe}_{seed}"
    finished, report = output / f"{run.name}.json", output / f"{run.name}_lfw.json"
    path, changes = FOLDER / f"{recipe}.yaml", [f"seed={seed}", f"data.train={data / 'faces_train'}"]
    config = load_config(path, changes).model_dump_json()
    if finished.exists():
        kept = json.loads(finished.read_text(encoding="utf-8"))
        if kept.get("config") == config:
            return Result(**kept["result"])
    settings = [word for change in changes for word in ("--set", change)]
    train = ["train", "--config", str(path), "--run-dir", str(run), *settings]
    shutil.rmtree(
        run, ignore_errors=True
    )  # what a call without a result has left: the time is that of a whole run
    pairs = str(data / "lfw_verification" / f"{LFW}.bin")
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        _facetrain(*train, cache=cache)
        seconds = time.perf_counter() - start
        _facetrain("eval", str(run), "--target", pairs, "--json", str(report), cache=cache)
    metrics = json.loads(report.read_text(encoding="utf-8"))["sets"][LFW]
    result = Result(seed, seconds, metrics["accuracy"], metrics["eer"])
    finished.write_text(json.dumps({"config": config, "result": asdict(result)}), encoding="utf-8")
    return result


def table(recipe: str, results: list[Result]) -> str:
    """Return the results as a Markdown table, with the mean and the standard deviation of each column."""
    rows = [f"| {recipe} | seconds | accuracy, percent | EER, percent |", "|---|---|---|---|"]
    rows += [
        f"| seed {result.seed} | {result.seconds:.0f} | {100 * result.accuracy:.2f} | {100 * result.eer:.2f} |"
        for result in results
    ]
    columns = (
        (0, [result.seconds for result in results]),
        (2, [100 * result.accuracy for result in results]),
        (2, [100 * result.eer for result in results]),
    )
    means = [
        f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
        for digits, values in columns
    ]
    return "\n".join([*rows, f"| mean | {' | '.join(means)} |"])


def _facetrain(*arguments: str, cache: str) -> None:
    """Run a command of facetrain with `cache` as the folder of compiled code."""
    print("facetrain", *arguments, flush=True)
    subprocess.run(
        [sys.executable, "-m", "facetrain", *arguments],
        check=True,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
    )


def main() -> None:
    """Run all seeds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help=f"folder with faces_train and lfw_verification/{LFW}.bin"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/speedrun"),
        help="folder of the results; default %(default)s",
    )
    parser.add_argument(
        "--recipe", choices=RECIPES, nargs="+", default=[RECIPES[0]], help=f"default {RECIPES[0]}"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="default 1 2 3 4 5")
    options = parser.parse_args()
    for path in (options.data / "faces_train", options.data / "lfw_verification" / f"{LFW}.bin"):
        if not path.exists():
            parser.error(f"--data: {path} does not exist")
    options.output.mkdir(parents=True, exist_ok=True)
    for recipe in options.recipe:
        results = [run_seed(recipe, seed, options.data, options.output) for seed in options.seeds]
        print(table(recipe, results))


if __name__ == "__main__":
    main()
