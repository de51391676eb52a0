#!/usr/bin/env bash
# One sweep on the Ray cluster that this machine is a node of. Where the database has a sweep already, it is continued.
#
#   sweep.sh MODEL [OPTION OF AUTOTUNE SWEEP …]
#
# AUTOTUNE_OUT is the file of the result (best-config.json here).
set -euo pipefail

[ "$#" -ge 1 ] || {
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
until autotune cluster >/dev/null 2>&1; do sleep 2; done
autotune doctor --cluster || echo "what is BAD above may stop or falsify the sweep; it is begun nevertheless" >&2
if autotune show >/dev/null 2>&1; then set -- --resume latest; fi
exec autotune sweep "$@" --out "${AUTOTUNE_OUT:-best-config.json}"
