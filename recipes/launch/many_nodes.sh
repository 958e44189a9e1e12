#!/bin/sh
# Run this on every machine. The run folder must be on storage that all of them see.
set -eu
CONFIG=${CONFIG:-configs/glint360k_r100.yaml}
FIRST=${FIRST:-node0:29400}   # name of the first machine, and a free port on it
NODES=${NODES:-2}             # or MIN:MAX, to go on with fewer when some are lost
GPUS=${GPUS:-8}               # of each machine
MAX_RESTARTS=${MAX_RESTARTS:-10}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300    # seconds to save after SIGTERM; torchrun's own are 30
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or a machine that comes later is not let in (torch 2.13)
# Which network card the GPUs talk through: set it where there are several.
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0

exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --max-restarts "$MAX_RESTARTS" \
    --rdzv-backend c10d --rdzv-endpoint "$FIRST" --rdzv-id facetrain \
    -m facetrain train --config "$CONFIG" "$@"
