#!/bin/sh
# Installs the engines of sweeps as far as possible, and runs their tests: Slurm from Debian (needs root or sudo), Dask from
# PyPI into target/, and HyperQueue if 'hq' (or $CACHEMATE_HQ) exists. The tests report missing engines. At the end, the
# cost of a sweep is measured.
set -eu
cd "$(dirname "$0")/.."
: "${CARGO:=cargo}"

packages='slurmctld slurmd slurm-client munge'
missing=''
for package in $packages; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
if [ -n "$missing" ] && command -v apt-get >/dev/null 2>&1; then
    as_root=''
    [ "$(id -u)" = 0 ] || as_root='sudo -n'
    echo "installing:$missing" >&2
    # shellcheck disable=SC2086 # the list is meant to be split
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y --no-install-recommends $missing >/dev/null 2>&1 ||
        echo "could not install:$missing" >&2
fi

if [ -z "${CACHEMATE_DASK_PYTHON:-}" ]; then
    place=target/dask
    if [ ! -x "$place/bin/python" ]; then
        python3 -m venv "$place" && "$place/bin/pip" -q install 'distributed>=2024' || echo 'could not install Dask' >&2
    fi
    CACHEMATE_DASK_PYTHON="$PWD/$place/bin/python"
    export CACHEMATE_DASK_PYTHON
fi

CACHEMATE_ENGINES=1 $CARGO test --locked -p cachemate-cli --test offline sweep_engines:: -- --nocapture --test-threads 1
$CARGO run --release --locked -p cachemate-sweep --example scale
