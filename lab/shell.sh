#!/usr/bin/env bash
# Opens a shell in a guest on a modeled machine, with cachemate and the lab's test programs inside; `exit` ends the guest.
# Usage: lab/shell.sh [MACHINE [OPTION...]]    (by default lab-vm; options are those of `cachemate lab config`)
# CACHEMATE names the command that goes into the guest; by default the one that was built last, or the installed one.
set -euo pipefail
lab=$(realpath "$(dirname "$0")")
machine=${1:-lab-vm}
shift || true
for binary in "${CACHEMATE:-}" "$lab/../target/release/cachemate" "$lab/../target/debug/cachemate" "$(command -v cachemate || true)"; do
    [ -z "$binary" ] || [ ! -x "$binary" ] || break
done
if [ ! -x "$binary" ]; then
    echo "lab/shell.sh: no cachemate here: build it (make build), or name it (CACHEMATE=FILE)" >&2
    exit 1
fi
binary=$(realpath "$binary")
job=$(mktemp -d)
trap 'rm -rf "$job"' EXIT
"$binary" lab config --machine "$machine" "$@" >"$job/machine"
echo 'booting the modeled machine; this takes about ten seconds' >&2
# A shell of its own, because the guest has traps of its own.
(
    cd "$lab/.."
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
)
