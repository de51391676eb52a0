#!/usr/bin/env bash
# Keeps this machine a node of a Ray cluster: runs ray-node.sh with the same words, and again whenever it has ended.
#
#   keep-ray-node.sh worker HEAD:PORT [OPTION OF RAY START …]
#
# For where there is no systemd: in a container, a Slurm job, a terminal. SIGTERM or Ctrl-C ends it, and Ray with it.
# RESTART_SECONDS (5) is the pause before each new start.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
node=''

stop() {
    trap - TERM INT
    if [ -n "$node" ]; then
        kill -TERM "$node" 2>/dev/null
        wait "$node"
    fi
    exit 0
}
trap stop TERM INT

while true; do
    "$here/ray-node.sh" "$@" &
    node=$!
    wait "$node"
    status=$?
    node=''
    # Wrong words do not become right.
    [ "$status" -ne 2 ] || exit 2
    echo "keep-ray-node.sh: Ray ended with status $status; starting it again" >&2
    sleep "${RESTART_SECONDS:-5}" &
    wait $!
done
