#!/usr/bin/env bash
# benchmarks/cifar10_gpu.sh on a machine that is reached by commands of limited length: the runs go on between them.
#
#     INTERCLR_DATA=/data benchmarks/cifar10_detached.sh start 1500 choices-byol-200 --seeds 0
#     benchmarks/cifar10_detached.sh look 500 FOLDER
#
# start copies what is run and the records so far to WORK/tree, and trains there: nothing that is done to this checkout
# afterwards changes a run under way. INTERCLR_COMMIT is what records name as their commit, by default this checkout's.
# look waits so many seconds, or until all is over, tells where every run is, and packs the records, those of runs under way
# included, into FOLDER/records.tgz (from the repository's root: tar xzf records.tgz). It ends with 0 when all is done, with 3
# while runs go on, and with the runs' status when something failed. WORK, JOBS, PYTHON: as in cifar10_gpu.sh.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=${WORK:-/dev/shm/interclr-cifar10}
command=${1:-}
case "$command" in
  start)
    shift
    if [ -e "$work/pid" ] && kill -0 "$(cat "$work/pid")" 2>/dev/null; then
      echo "runs go on in $work already: look at them" >&2
      exit 2
    fi
    mkdir -p "$work/tree/results"
    : "${INTERCLR_COMMIT:=$(git -C "$root" rev-parse HEAD 2>/dev/null || true)}"
    cp -r "$root/benchmarks" "$root/interclr" "$work/tree/"
    cp -rn "$root/results/cifar10" "$work/tree/results/" 2>/dev/null || true  # a second start keeps the first one's
    cd "$work/tree"
    export INTERCLR_COMMIT PYTHONPATH="$work/tree${PYTHONPATH:+:$PYTHONPATH}" WORK="$work"
    rm -f "$work/status"
    setsid bash -c 'status=0; benchmarks/cifar10_gpu.sh "$@" || status=$?; echo "$status" >"$WORK/status"' - "$@" \
      >>"$work/log" 2>&1 </dev/null &
    echo $! >"$work/pid"
    echo "started in $work"
    ;;
  look)
    [ -e "$work/pid" ] || { echo "nothing was started in $work" >&2; exit 2; }
    end=$(($(date +%s) + ${2:-0}))
    while [ ! -e "$work/status" ] && kill -0 "$(cat "$work/pid")" 2>/dev/null && [ "$(date +%s)" -lt "$end" ]; do
      sleep 1
    done
    tail -n 40 "$work/log"
    for log in "$work"/runs/*/*.log; do
      [ -e "$log" ] && printf '%s: %s\n' "${log#"$work/runs/"}" "$(tail -n 1 "$log" | tail -c 160)"
    done
    if [ -n "${3:-}" ]; then
      mkdir -p "$3"
      tar czf "$3/records.tgz" -C "$work/tree" results/cifar10
    fi
    if [ -e "$work/status" ]; then
      exit "$(cat "$work/status")"
    fi
    kill -0 "$(cat "$work/pid")" 2>/dev/null || { echo "the runs ended without a word" >&2; exit 1; }
    exit 3
    ;;
  *)
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
