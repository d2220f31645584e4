#!/usr/bin/env bash
# A part of the plan on one GPU, several runs at a time, for so many seconds:
#
#     benchmarks/cifar10_gpu.sh 1500 choices-byol-200 + choices-npidv2-200 plain random --seeds 0
#
# What follows the seconds goes to benchmarks/cifar10.py. Under MPS the kernels of different runs share the GPU; run folders
# lie in memory, as checkpoints are written and read often. When the time is over every training saves a checkpoint and ends:
# the same call continues where WORK is still there. JOBS: runs at a time. WORK: where run folders lie.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=$1
shift
work=${WORK:-/dev/shm/interclr-cifar10}
if command -v nvidia-cuda-mps-control >/dev/null; then
  export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps-log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d || echo "! no MPS: runs take turns"
  trap 'echo quit | nvidia-cuda-mps-control >/dev/null || true' EXIT
fi
status=0
timeout --signal=TERM --kill-after=60 "$seconds" \
  "${PYTHON:-python}" benchmarks/cifar10.py "$@" --jobs "${JOBS:-5}" --work "$work/runs" || status=$?
exit "$status"
