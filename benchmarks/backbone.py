"""A backbone's training step, from plain float32 NCHW to ours, in one run: `python -m benchmarks.backbone`.

    python -m benchmarks.backbone                                           r18 at 112 × 112, 32 images, all cores
    python -m benchmarks.backbone --backbone r100 --batch-size 256          on a GPU

`facetrain bench backbone` is the same.
"""

from __future__ import annotations

import sys

from facetrain.cli.app import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "backbone"]
    main()
