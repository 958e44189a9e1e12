#!/bin/sh
# Train on several hosts: run this script on every one. All of them must share the storage of the run folder, or
# the config has checkpoint.mirror.
# Their ports must be closed to other machines: see "The network" in docs/security.md.
set -eu
CONFIG=${CONFIG:-configs/wf42m_pfc02_r100_16gpus.yaml}
FIRST=${FIRST:-node0:29400}   # name of one host, and a free port on it
NODES=${NODES:-2}             # or MIN:MAX, to continue with fewer hosts if some are lost: with train.global_batch_size
GPUS=${GPUS:-8}               # GPUs of each host
MAX_RESTARTS=${MAX_RESTARTS:-10}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300    # seconds to save after SIGTERM
# Network interface between the hosts. Set it if they have several.
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0

exec facetrain train --config "$CONFIG" "$@" \
    --nnodes "$NODES" --nproc-per-node "$GPUS" --max-restarts "$MAX_RESTARTS" --rdzv-endpoint "$FIRST"
