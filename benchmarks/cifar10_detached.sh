#!/usr/bin/env bash
# benchmarks/cifar10_gpu.sh on a machine that is reached by commands of limited length: the runs go on between them.
#
#     INTERCLR_DATA=/data benchmarks/cifar10_detached.sh start 1500 choices-byol-200 --seeds 0
#     benchmarks/cifar10_detached.sh look 500 FOLDER
#     benchmarks/cifar10_detached.sh stop
#
# start copies what is run and the records so far to WORK/tree, and trains there: nothing that is done to this checkout
# afterwards changes a run under way. INTERCLR_COMMIT is what records name as their commit, by default this checkout's.
# look waits so many seconds, or until all is over, tells where every run is, and packs the records, those of runs under way
# included, into FOLDER/records.tgz (from the repository's root: tar xzf records.tgz). It ends with 0 when all is done, with 3
# while runs go on, and with the runs' status when something failed. stop has every training save a checkpoint and end; what
# start was given continues them. WORK, JOBS, PYTHON: as in cifar10_gpu.sh.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${WORK:=/dev/shm/interclr-cifar10}"
work=$(cd "$WORK" && pwd)

going_on() { [ -e "$work/pid" ] && pgrep -s "$(cat "$work/pid")" >/dev/null; }

in_full() { case "$1" in */*) echo "$(cd "$(dirname "$1")" && pwd)/$(basename "$1")" ;; *) echo "$1" ;; esac; }

case "${1:-}" in
  start)
    shift
    if going_on; then
      echo "runs go on in $work already: look at them" >&2
      exit 2
    fi
    if [ -z "${INTERCLR_COMMIT:-}" ] && INTERCLR_COMMIT=$(git -C "$root" rev-parse HEAD 2>/dev/null); then
      [ -z "$(git -C "$root" status --porcelain -uno)" ] || INTERCLR_COMMIT="$INTERCLR_COMMIT with changes"
    fi
    PYTHON=$(in_full "${PYTHON:-python}")
    [ -z "${INTERCLR_DATA:-}" ] || INTERCLR_DATA=$(in_full "$INTERCLR_DATA/")
    mkdir -p "$work/tree/results/cifar10"
    cp -r "$root/benchmarks" "$root/interclr" "$work/tree/"
    [ ! -d "$root/results/cifar10" ] || # a second start keeps the first one's
      tar c -C "$root" results/cifar10 | tar x -C "$work/tree" --skip-old-files
    cd "$work/tree"
    export INTERCLR_COMMIT PYTHON INTERCLR_DATA WORK="$work" PYTHONPATH="$work/tree${PYTHONPATH:+:$PYTHONPATH}"
    rm -f "$work/status"
    setsid bash -c 'status=0; benchmarks/cifar10_gpu.sh "$@" || status=$?; echo "$status" >"$WORK/status"' - "$@" \
      >>"$work/log" 2>&1 </dev/null &
    echo $! >"$work/pid"
    echo "started in $work"
    ;;
  look)
    [ -e "$work/pid" ] || { echo "nothing was started in $work" >&2; exit 2; }
    end=$(($(date +%s) + ${2:-0}))
    while [ ! -e "$work/status" ] && going_on && [ "$(date +%s)" -lt "$end" ]; do
      sleep 1
    done
    tail -n 40 "$work/log"
    for log in "$work"/runs/*/*.log; do
      [ ! -e "$log" ] || printf '%s: %s\n' "${log#"$work/runs/"}" "$(tail -n 1 "$log" | tail -c 160)"
    done
    if [ -n "${3:-}" ]; then
      mkdir -p "$3"
      # 1: a record was written meanwhile; records are replaced whole, so either the old or the new one is packed
      tar czf "$3/records.tgz" -C "$work/tree" results/cifar10 || [ $? -eq 1 ]
    fi
    if [ -e "$work/status" ]; then
      exit "$(cat "$work/status")"
    fi
    going_on || { echo "the runs ended without a word" >&2; exit 1; }
    exit 3
    ;;
  stop)
    going_on || { echo "nothing goes on in $work" >&2; exit 2; }
    pkill -TERM -s "$(cat "$work/pid")" -x timeout
    for _ in $(seq 120); do
      going_on || exit 0
      sleep 1
    done
    echo "they have not ended in two minutes" >&2
    exit 1
    ;;
  *)
    sed -n '2,15s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
