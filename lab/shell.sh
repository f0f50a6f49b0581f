#!/usr/bin/env bash
# Opens a shell in a guest on a modeled machine; `cachemate lab shell` starts this script.
# Usage: lab/shell.sh JOB BINARY    (JOB is a directory with `machine`, as `cachemate lab config` prints it)
set -euo pipefail
job=$(realpath "$1")
binary=$(realpath "$2")
cd "$(dirname "$0")/.."
cache=${LAB_CACHE:-${XDG_CACHE_HOME:-${HOME:-$job}/.cache}/cachemate/lab}
out=$job/guest
mkdir -p "$out"
. lab/modeled-guest.sh
prepare
initramfs
# The host's perf, if there is one that a guest can run.
perf=$(command -v perf || true)
[ -z "$perf" ] || with_libraries "$perf" "$out/initramfs"
pack
printf 'model_on 0\n' >>"$job/machine"
machine_command shell "$job/machine" "$out/initramfs.cpio"
one_guest
"${machine_command[@]}" 8>&-
guest_over
