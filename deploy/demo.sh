#!/bin/sh
# Called by `make demo [COORD=etcd]` with BUILD and COORD; see demo.py.
set -eu
cd "$(dirname "$0")/.."
need=python3
[ "${COORD:-local}" = etcd ] && need="$need etcd-server"
# shellcheck disable=SC2086
deploy/packages.sh $need
exec python3 deploy/demo.py --build "${BUILD:-build}" --coord "${COORD:-local}"
