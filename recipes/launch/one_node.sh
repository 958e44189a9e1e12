#!/bin/sh
# Train on all GPUs of this machine, and restart from the newest checkpoint after a failure.
set -eu
CONFIG=${CONFIG:-configs/ms1mv3_r50.yaml}
GPUS=${GPUS:-auto}            # or a number
MAX_RESTARTS=${MAX_RESTARTS:-3}

exec facetrain train --config "$CONFIG" --nproc-per-node "$GPUS" --max-restarts "$MAX_RESTARTS" "$@"
