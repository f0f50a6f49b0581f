#!/bin/sh
# Builds the Python wheel, installs it in a separate environment below the output folder, and tests it there.
# Packages come from the Python package index; if they are unavailable, the script prints NOT RUN and exits with 0.
# Usage: wheel.sh CACHEMATE OUTPUT-FOLDER [OPTION-OF-MATURIN...]
set -eu
cd "$(dirname "$0")/.."
cachemate=$(realpath "${1:?usage: wheel.sh CACHEMATE OUTPUT-FOLDER}")
out=${2:?usage: wheel.sh CACHEMATE OUTPUT-FOLDER}
shift 2
not_run() { echo "wheel: NOT RUN: $1"; exit 0; }

python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    not_run 'it needs Python 3.11 or later with its venv (python3-venv)'
mkdir -p "$out"
out=$(realpath "$out")
venv=$out/venv
[ -x "$venv/bin/python" ] || python3 -m venv "$venv" || not_run 'no virtual environment can be made (python3-venv)'
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install -r python/requirements.txt || not_run 'the package index does not answer'

rm -f "$out"/*.whl
"$venv/bin/maturin" build --quiet --release --locked --manifest-path python/Cargo.toml \
    --interpreter "$venv/bin/python" --out "$out" "$@"
wheel=$(ls "$out"/*.whl)
case $wheel in *-cp311-abi3-*) ;; *) echo "wheel: $wheel is not for every Python from 3.11 on" >&2; exit 1 ;; esac
pip install --force-reinstall --no-deps "$wheel"
echo "$wheel, $(du -k "$wheel" | cut -f 1) KiB"

# The tests run in another folder than the sources, so that Python imports the installed wheel.
sources=$PWD/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"$venv/bin/mypy" --config-file "$sources/pyproject.toml" "$sources"/tests/*.py
"$venv/bin/stubtest" --mypy-config-file "$sources/pyproject.toml" cachemate
CACHEMATE=$cachemate "$venv/bin/python" -m pytest -q -rs -p no:cacheprovider --import-mode=importlib "$sources/tests"
