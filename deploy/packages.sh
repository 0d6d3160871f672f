#!/bin/sh
# packages.sh PACKAGE... - installs the Debian packages that are missing (as root or with sudo), or says how.
set -eu
missing=""
for p in "$@"; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
[ -n "$missing" ] || exit 0
cmd="apt-get install -y --no-install-recommends$missing"
if [ "$(id -u)" = 0 ]; then as=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then as="sudo"
else
    echo "Debian packages are missing. Run:  sudo $cmd" >&2
    exit 1
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086
$as $cmd >/dev/null 2>&1 || { $as apt-get update -qq && $as $cmd >/dev/null; } || {
    echo "could not install the packages. Run:  sudo $cmd" >&2
    exit 1
}
