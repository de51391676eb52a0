#!/usr/bin/env bash
# Makes this machine a node of a Ray cluster, in the foreground, until Ray on it ends.
#
#   ray-node.sh head ADDRESS[:PORT] [OPTION OF RAY START …]    the first node; ADDRESS is this machine's own
#   ray-node.sh worker HEAD:PORT    [OPTION OF RAY START …]    every other node
#
# Ray does not take a node back that it has declared dead: its processes end, and must be started again. keep-ray-node.sh does
# that, and so does the unit autotune-ray-node.service.
set -euo pipefail

usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

[ "$#" -ge 2 ] || usage
role=$1 place=$2
shift 2

# Of several interfaces the one that leads to the head: Ray, gloo and NCCL each choose for themselves otherwise.
case $role in
head)
    address=${place%%:*}
    interface=$(ip -o -4 address show | awk -v own="$address" '{ split($4, at, "/"); if (at[1] == own) { print $2; exit } }')
    ;;
worker)
    head=$(getent ahostsv4 "${place%%:*}" | awk '{ print $1; exit }')
    route=$(ip -o -4 route get "${head:-${place%%:*}}")
    address=$(sed -n 's/.* src \([^ ]*\).*/\1/p' <<<"$route")
    interface=$(sed -n 's/.* dev \([^ ]*\).*/\1/p' <<<"$route")
    ;;
*) usage ;;
esac
if [ -z "$address" ] || [ -z "$interface" ]; then
    echo "ray-node.sh: no interface of this machine is at or leads to ${place%%:*}; look at \`ip address\`" >&2
    exit 1
fi

export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
# A head asks for a token where it finds one; whoever joins by address sends one only if told to. The same rule for all nodes.
if [ -z "${RAY_AUTH_MODE:-}" ]; then
    RAY_AUTH_MODE=disabled
    if [ -n "${RAY_AUTH_TOKEN:-}" ] || [ -s "${RAY_AUTH_TOKEN_PATH:-${HOME:-}/.ray/auth_token}" ]; then
        RAY_AUTH_MODE=token
    fi
    export RAY_AUTH_MODE
fi
export RAY_USAGE_STATS_ENABLED=${RAY_USAGE_STATS_ENABLED:-0}
# Ray's own default is 15: beside any other work on the node its ranks would hardly compute.
export RAY_worker_niceness=${RAY_worker_niceness:-0}
# A node that was cut off ends soon, so that it can be started again as soon as it is back.
export RAY_gcs_rpc_server_reconnect_timeout_s=${RAY_gcs_rpc_server_reconnect_timeout_s:-20}
# RDMA registers, and so locks, the buffers of collectives. Where this shell may not, `autotune doctor --cluster` tells.
ulimit -l unlimited 2>/dev/null || true

if [ "$role" = head ]; then
    port=6379
    [ "$place" = "$address" ] || port=${place##*:}
    exec ray start --head --block --node-ip-address="$address" --port="$port" --include-dashboard=false "$@"
fi
exec ray start --block --address="$place" --node-ip-address="$address" "$@"
