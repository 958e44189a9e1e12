#!/usr/bin/env python3
"""Training and evaluation of the recipes on real faces, and the table of their results.

    python recipes/real_faces/run.py --data data/real --seeds 1 2 3

Each finished training and evaluation is kept in `--output`; a second call continues after the last one, and repeats
those whose config, data or inputs have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from facetrain.config.loading import load_config

FOLDER = Path(__file__).resolve().parent
RECIPES = {
    "labels": None,
    "distilled": "labels",
    "shallow_labels": "labels",
    "shallow": "shallow_labels",
    "small_faces": "y1",
}
"""Names of the configs in this folder, each with the recipe that it is compared with."""
WITHOUT_TEACHER = ("labels", "shallow_labels")
FROM_TEACHER = ("shallow_labels", "shallow", "small_faces")
"""Recipes that start with weights of the teacher."""
AVERAGED = {"small_faces": 0.6}
"""Recipes whose weights are averaged with those of the teacher, and the weight of the recipe."""
SMALL = 16
"""Side of the small faces, pixels."""
LFW, SMALL_LFW = "lfw_folds1-2", f"lfw_{SMALL}px"
METRICS = ("accuracy", "eer")


@dataclass(frozen=True)
class Step:
    """Command of facetrain that writes a file."""

    output: Path
    arguments: list[str]


def steps(data: Path, output: Path, recipes: Sequence[str], seeds: Sequence[int]) -> Iterator[Step]:
    """Yield all steps in order.

    Args:
        data: folder with `faces_train`, `y1` and `lfw_verification`.
        output: folder of all results.
        recipes: names of the configs in this folder.
        seeds: seeds of the runs of each recipe.
    """
    teacher, faces = str(data / "y1" / "model-symbol.json"), str(data / "faces_train")
    lfw, small = data / "lfw_verification" / f"{LFW}.bin", output / f"{SMALL_LFW}.bin"
    cache = output / "teacher.safetensors"
    yield Step(cache, ["embed", teacher, faces, "--output", str(cache)])
    yield Step(small, ["data", "pairs", str(lfw), "--output", str(small), "--reduce-to", str(SMALL)])
    targets = ["--target", str(lfw), "--target", str(small)]
    yield evaluation(output / "y1.json", teacher, targets)
    for seed in seeds:
        for recipe in recipes:
            run = output / f"{recipe}_{seed}"
            values = {"seed": seed, "data.train": faces, "eval.targets": "[]"}
            if recipe not in WITHOUT_TEACHER:
                values |= {"distill.teacher": teacher, "distill.cache": cache}
            if recipe in FROM_TEACHER:
                values |= {"model.init_from": teacher}
            settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
            start = ["train", "--config", str(FOLDER / f"{recipe}.yaml"), "--run-dir", str(run), "--resume"]
            yield Step(run / "model.safetensors", [*start, *settings])
            # The difference from the model that the recipe is compared with, on the same bootstrap draws.
            other = RECIPES[recipe]
            against = ["--against", teacher if other == "y1" else str(output / f"{other}_{seed}")]
            if other != "y1" and other not in recipes:
                against = []
            model = run
            if recipe in AVERAGED:
                model = output / f"{run.name}.safetensors"
                weights = [f"{weight:g}" for weight in (AVERAGED[recipe], 1 - AVERAGED[recipe])]
                options = [word for weight in weights for word in ("--weight", weight)]
                yield Step(model, ["average", str(run), teacher, *options, "--output", str(model)])
            yield evaluation(output / f"{run.name}.json", str(model), [*targets, *against])


def evaluation(report: Path, model: str, options: list[str]) -> Step:
    """Return the step that evaluates a model and writes its metrics as JSON."""
    return Step(report, ["eval", model, *options, "--json", str(report)])


def take(made: Iterable[Step], record: Path) -> None:
    """Take the steps that are not done yet, or were done with another command, config or input.

    `record` is a file with a digest of these for each output.
    """
    kept: dict[str, str] = _read(record) if record.exists() else {}
    digests: dict[str, str] = {}
    for step in made:
        is_training = step.arguments[0] == "train"
        place = step.output.parent if is_training else step.output
        inputs = [digests.get(word.rpartition("=")[2], "") for word in step.arguments]
        config = load_config(Path(step.arguments[2])).model_dump_json() if is_training else ""
        digest = hashlib.sha256(json.dumps([step.arguments, inputs, config]).encode()).hexdigest()
        digests[str(place)] = digest
        if kept.get(str(place)) != digest:
            if is_training:
                shutil.rmtree(place, ignore_errors=True)
            place.unlink(missing_ok=True)
            # Before the step: an interrupted training is continued.
            kept[str(place)] = digest
            record.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        if not step.output.exists():
            print("facetrain", *step.arguments, flush=True)
            subprocess.run([sys.executable, "-m", "facetrain", *step.arguments], check=True)


def table(output: Path, recipes: Sequence[str], seeds: Sequence[int]) -> str:
    """Return the results as a Markdown table, all values in percent.

    A cell has the mean of the seeds, the smallest and the largest value, and the mean of the bounds of the 95 %
    intervals over people.
    """
    rows = [
        f"| model | {' | '.join(f'{target} {metric}' for target in (LFW, SMALL_LFW) for metric in METRICS)} |",
        "|---" * (1 + 2 * len(METRICS)) + "|",
    ]
    rows.append(_row("y1", [_read(output / "y1.json")["sets"]]))
    for recipe in recipes:
        reports = [_read(output / f"{recipe}_{seed}.json") for seed in seeds]
        rows.append(_row(recipe, [report["sets"] for report in reports]))
        differences = [report["differences"] for report in reports if report.get("differences")]
        if differences:
            rows.append(_row(f"{recipe} − {RECIPES[recipe]}", differences))
    return "\n".join(rows)


def _row(name: str, results: list[dict[str, Any]]) -> str:
    cells = (
        _cell([result[target] for result in results], metric)
        for target in (LFW, SMALL_LFW)
        for metric in METRICS
    )
    return f"| {name} | {' | '.join(cells)} |"


def _cell(results: list[dict[str, Any]], metric: str) -> str:
    # Of a difference, the metric is itself a table.
    found = [result[metric] for result in results]
    values = [one["difference"] if isinstance(one, dict) else one for one in found]
    intervals = [
        one["interval"] if isinstance(one, dict) else result["intervals"][metric]
        for one, result in zip(found, results, strict=True)
    ]
    low, high = (mean(interval[end] for interval in intervals) for end in (0, 1))
    spread = f" ({100 * min(values):.2f} to {100 * max(values):.2f})" if len(values) > 1 else ""
    return f"{100 * mean(values):.2f}{spread} [{100 * low:.2f}, {100 * high:.2f}]"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Run the steps that are not done yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help=f"folder with faces_train, y1/model-symbol.json and lfw_verification/{LFW}.bin",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/real_faces"),
        help="folder of the results; default %(default)s",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default 1 2 3")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="default: all")
    options = parser.parse_args()
    for path in ("faces_train", "y1/model-symbol.json", f"lfw_verification/{LFW}.bin"):
        if not (options.data / path).exists():
            parser.error(f"--data: {options.data / path} does not exist")
    options.output.mkdir(parents=True, exist_ok=True)
    take(steps(options.data, options.output, options.recipes, options.seeds), options.output / "steps.json")
    print(table(options.output, options.recipes, options.seeds))


if __name__ == "__main__":
    main()
