#!/usr/bin/env bash
# benchmarks/cifar10_gpu.sh on a machine that is reached by commands of limited length: the runs go on between them.
#
#     INTERCLR_DATA=/data benchmarks/cifar10_detached.sh start 1500 choices-byol-200 --seeds 0
#     benchmarks/cifar10_detached.sh look 500 FOLDER
#     benchmarks/cifar10_detached.sh stop
#     INTERCLR_DATA=/data benchmarks/cifar10_detached.sh run 480 FOLDER choices-byol-200 --seeds 0
#
# start copies what is run, the folders of PYTHONPATH and the records so far to WORK, and trains there: nothing that is done to
# this checkout afterwards changes a run under way. It ends when the first run has started, or tells what kept it from that.
# INTERCLR_COMMIT is what records name as their commit, by default this checkout's.
# look waits so many seconds, or until all is over, tells where every run is, and packs the records, those of runs under way
# included, into FOLDER/records.tgz (from the repository's root: tar xzf records.tgz). It ends with 0 when all is done, with 3
# while runs go on, and with the runs' status when something failed. stop has every training save a checkpoint and end; what
# start was given continues them. run is start and look in one command, which ends when all is over: for a machine that goes
# away where nobody asks for it in time, and all that is on it. WORK, JOBS, PYTHON: as in cifar10_gpu.sh.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${WORK:=/dev/shm/interclr-cifar10}"
work=$(cd "$WORK" && pwd)

going_on() { [ -e "$work/pid" ] && pgrep -s "$(cat "$work/pid")" >/dev/null; }

in_full() { case "$1" in */*) echo "$(cd "$(dirname "$1")" && pwd)/$(basename "$1")" ;; *) echo "$1" ;; esac; }

refuse() { echo "$1" >&2; exit 2; }

# The folders of PYTHONPATH, copied, as what lies in the checkout may be replaced by the next command; but for the checkout
# itself, whose place the tree takes.
copied_path() {
  local number=0 folder
  local -a folders
  IFS=: read -r -a folders <<<"${PYTHONPATH:-}"
  for folder in ${folders[@]+"${folders[@]}"}; do
    [ -d "$folder" ] && [ ! "$folder" -ef "$root" ] || continue
    number=$((number + 1))
    { mkdir -p "$work/path/$number" && cp -r "$folder/." "$work/path/$number"; } ||
      refuse "PYTHONPATH: $folder was not copied to $work/path/$number"
    printf ':%s' "$work/path/$number"
  done
}

case "${1:-}" in
  start)
    shift
    for tool in pgrep pkill setsid timeout; do
      command -v "$tool" >/dev/null || refuse "$tool is not installed (Debian's packages procps, util-linux, coreutils)"
    done
    ! going_on || refuse "runs go on in $work already: look at them"
    [ ! "$root" -ef "$work/tree" ] || refuse "WORK: $work/tree is this checkout itself, which the copy would replace"
    [ -z "${INTERCLR_DATA:-}" ] || [ -d "$INTERCLR_DATA" ] || refuse "INTERCLR_DATA: there is no folder $INTERCLR_DATA"
    if [ -z "${INTERCLR_COMMIT:-}" ]; then
      INTERCLR_COMMIT=$(git -C "$root" rev-parse HEAD 2>/dev/null) ||
        refuse "INTERCLR_COMMIT: name the commit of this checkout, as git does not know it here"
      [ -z "$(git -C "$root" status --porcelain -uno)" ] || INTERCLR_COMMIT="$INTERCLR_COMMIT with changes"
    fi
    PYTHON=$(in_full "${PYTHON:-python}")
    [ -z "${INTERCLR_DATA:-}" ] || INTERCLR_DATA=$(in_full "$INTERCLR_DATA/")
    mkdir -p "$work/tree/results/cifar10"
    rm -rf "$work/path" "$work/tree/benchmarks" "$work/tree/interclr" # of an earlier start, which may have had others
    cp -r "$root/benchmarks" "$root/interclr" "$work/tree/"
    [ ! -d "$root/results/cifar10" ] || # a second start keeps the first one's
      tar c -C "$root" results/cifar10 | tar x -C "$work/tree" --skip-old-files
    PYTHONPATH=$work/tree$(copied_path)
    cd "$work/tree"
    export INTERCLR_COMMIT PYTHON INTERCLR_DATA WORK="$work" PYTHONPATH PYTHONUNBUFFERED=1
    rm -f "$work/status"
    touch "$work/log"
    before=$(stat -c %s "$work/log")
    setsid bash -c 'status=0; benchmarks/cifar10_gpu.sh "$@" || status=$?
      echo "$status" >"$WORK/status.new"; mv "$WORK/status.new" "$WORK/status"' - "$@" \
      >>"$work/log" 2>&1 </dev/null &
    echo $! >"$work/pid"
    said() { tail -c +$((before + 1)) "$work/log"; }
    begun_or_over() { [ -e "$work/status" ] || grep -q ': started$' < <(said); }
    for _ in $(seq 120); do
      ! begun_or_over || break
      kill -0 $! 2>/dev/null || going_on || break # at first there is the process, but not yet its session
      sleep 0.5
    done
    said
    if ! begun_or_over; then
      if going_on; then
        echo "no run has started in a minute, but something goes on in $work: look or stop" >&2
      else
        echo "nothing has started in $work: it ended without a word" >&2
      fi
      exit 1
    fi
    if [ -e "$work/status" ] && [ "$(cat "$work/status")" -ne 0 ]; then
      exit "$(cat "$work/status")"
    fi
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
  run)
    [ $# -ge 4 ] || refuse "run: seconds, a folder for the records, and what to run"
    seconds=$2 folder=$3 status=3
    shift 3
    "$0" start "$seconds" "$@"
    while [ "$status" -eq 3 ]; do
      status=0
      "$0" look 20 "$folder" >"$work/look" 2>&1 || status=$?
      echo "--- $(date +%T)"
      grep '^[^ ]*\.log: ' "$work/look" || true
    done
    cat "$work/look"
    exit "$status"
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
    sed -n '2,18s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
