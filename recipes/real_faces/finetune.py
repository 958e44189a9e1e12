#!/usr/bin/env python3
"""Gain of `facetrain finetune` on people of the real faces, and the table of the results.

    python recipes/real_faces/finetune.py --data data/real --seeds 1 2 3 --cells 20x10@20 20x10@112

A cell `20x10@16` is 20 random people with 10 photos each, whose faces have 16 pixels; 112 is the full size. The model
is y1. The result is compared with y1 on other images of these people and on LFW, of which the command gets neither.
What is finished is kept in `--output`; a second call continues after it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import cv2
import numpy as np

from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.finetune.held_out import write_photo_pairs

FULL_SIZE = 112
MOST_OTHERS, LEAST_OTHERS = 8, 4
"""Images of a person that judge the result and are not given to the command, and the least number of them."""
LFW = "lfw_folds1-2"


def write_photos(faces: Path, cell: str, seed: int, folder: Path) -> None:
    """Write the photos of a cell as `photos/PERSON/*.png`, and other images of the people as `others/PERSON/*.png`."""
    people, images, pixels = map(int, re.split("[x@]", cell))
    source = open_dataset(faces)
    rng = np.random.default_rng(seed)
    labels, counts = np.unique(source.labels, return_counts=True)
    for label in rng.permutation(labels[counts >= images + LEAST_OTHERS])[:people].tolist():
        numbers = rng.permutation(np.flatnonzero(source.labels == label))[: images + MOST_OTHERS]
        for place, number in enumerate(numbers.tolist()):
            image = decode_rgb(source.read(number), location=source.location(number))
            if pixels < FULL_SIZE:
                small = cv2.resize(image, (pixels, pixels), interpolation=cv2.INTER_AREA)
                image = cv2.resize(small, (FULL_SIZE, FULL_SIZE), interpolation=cv2.INTER_CUBIC)
            path = folder / ("photos" if place < images else "others") / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), image[..., ::-1])


def measure(data: Path, cell: str, seed: int, output: Path) -> None:
    """Fine-tune y1 on the photos of a cell, and write its metrics beside those of y1 as `result.json`."""
    folder, model = output / f"{cell}_{seed}", data / "y1" / "model-symbol.json"
    lfw = data / "lfw_verification" / f"{LFW}.bin"
    if (folder / "result.json").exists():
        return
    if not (folder / "others.bin").exists():
        write_photos(data / "faces_train", cell, seed, folder)
        write_photo_pairs(folder / "others", folder / "others.bin", seed=seed)
    result = folder / "finetuned"
    facetrain(
        "finetune", folder / "photos", "--model", model, "--output", result, "--seed", seed,
        *(["--resume"] if result.exists() else []), log=folder / "finetune.txt",
    )  # fmt: skip
    targets = ["--target", folder / "others.bin", "--target", lfw]
    facetrain(
        "eval", result / "model.safetensors", *targets, "--against", model, "--json", folder / "result.json",
        log=folder / "eval.txt",
    )  # fmt: skip


def facetrain(*words: object, log: Path) -> None:
    """Run a command of facetrain and keep its output in a file.

    Raises:
        CalledProcessError: the command failed.
    """
    with log.open("w") as file:
        subprocess.run(
            [sys.executable, "-m", "facetrain", *map(str, words)],
            check=True,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def row(output: Path, cell: str) -> str:
    """Return a row of the table: the mean of the seeds, all seeds, and the mean of the 95 % intervals."""
    reports = [json.loads(path.read_text()) for path in sorted(output.glob(f"{cell}_*/result.json"))]
    if not reports:
        return f"| {cell} | not measured |"
    first = mean(report["differences"]["others"]["accuracy"]["second"] for report in reports)
    cells = [f"{100 * first:.2f}"]
    for name in ("others", LFW):
        found = [report["differences"][name]["accuracy"] for report in reports]
        gains = [100 * (each["first"] - each["second"]) for each in found]
        low, high = (100 * mean(each["interval"][end] for each in found) for end in (0, 1))
        seeds = ", ".join(f"{gain:+.2f}" for gain in gains)
        cells.append(f"{mean(gains):+.2f} ({seeds}) [{low:+.2f}, {high:+.2f}]")
    return f"| {cell} | {' | '.join(cells)} |"


def main() -> None:
    """Measure the cells and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of faces_train, y1, lfw_verification"
    )
    parser.add_argument("--output", type=Path, default=Path("build/finetune"), help="folder of all results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cells", nargs="+", default=["20x10@20", "20x10@112"])
    options = parser.parse_args()
    for seed in options.seeds:
        for cell in options.cells:
            measure(options.data, cell, seed, options.output)
    print(
        "| people x images @ pixels | y1 on other images | difference | difference on LFW |\n|---|---|---|---|"
    )
    print("\n".join(row(options.output, cell) for cell in options.cells))


if __name__ == "__main__":
    main()
