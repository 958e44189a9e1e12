"""Program that runs `facetrain train`, and prints the peak of a process's memory and the forecast, in bytes.

python -m tests.support.train_for_memory '{"model": {"backbone": "r18"}, "train": {"batch_size": 32}}' 10000
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from facetrain.config.loading import load_config
from facetrain.data.formats.bin import write_bin
from facetrain.plan.forecast import forecast
from facetrain.telemetry.jsonl import read_jsonl
from tests.support.command import torchrun
from tests.support.datasets import encoded_image, write_records

STEPS = 3


def main(values: dict[str, Any], classes: int, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = values.get("data", {}).get("image_size", 112)
        write_records(folder / "data", list(range(classes)), size=size)
        batch = values.get("eval", {}).get("batch_size", 256)
        write_bin(
            folder / "data" / "val.bin", [encoded_image(n, size) for n in range(2 * batch)], [True] * batch
        )
        described = {"data": {}, "train": {}, "eval": {}, "log": {}} | values
        described["data"] |= {"train": str(folder / "data"), "workers": 1}
        described["train"] |= {"max_steps": STEPS, "device": "cpu", "keep_freed_memory": False}
        described["eval"] |= {"targets": ["val"]}
        described["log"] |= {"every_steps": 1, "tensorboard": False, "report": False}
        (folder / "run.yaml").write_text(yaml.safe_dump(described))
        done = torchrun(ranks, "train", "--config", folder / "run.yaml", "--run-dir", folder / "run")
        assert done.returncode == 0, done.stderr
        needed = max(r.get("peak_memory_gib", 0) for r in read_jsonl(folder / "run" / "metrics.jsonl"))
        parts = forecast(load_config(folder / "run.yaml"), classes, ranks, cuda=False).parts
    print(json.dumps({"measured": round(needed * 2**30), "forecast": sum(parts.values()), "parts": parts}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
