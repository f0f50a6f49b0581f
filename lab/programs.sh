#!/usr/bin/env bash
# Runs a user's own programs on a modeled machine; `cachemate lab run` starts this script.
# Usage: lab/programs.sh JOB BINARY
# JOB is a directory with `machine` (cachemate lab config), `programs` (a command line each), `policy.toml` (the [policy] of
# the daemon; absent = none), `seconds` (of the guest, for one phase) and `files` (copied to /programs in the guest;
# may be absent).
# It gets `results.tsv`: phase, program's number from 0, its command line, seconds, whether it ended by itself, its exit
# code, the last line that it printed, and seven figures of the process: instructions, those in user code, cycles, misses
# of the L3, those for lines that others displaced, bytes moved to and from memory, and most bytes held in an L3. Each of
# the seven is "-" if the truth file does not have the process. Standard output gets a line for each program that starts.
set -euo pipefail
job=$(realpath "$1")
binary=$(realpath "$2")
cd "$(dirname "$0")/.."
cache=${LAB_CACHE:-${XDG_CACHE_HOME:-${HOME:-$job}/.cache}/cachemate/lab}
out=$job/guest # `machine` there is a directory
mkdir -p "$out"
. lab/modeled-guest.sh
# Runs each program alone, all together, and all under the policy; a second of guest time takes up to 70 seconds of
# one CPU.
[ -n "${LAB_LIMIT_SECONDS:-}" ] ||
    limit_seconds=$((600 + ($(wc -l <"$job/programs") + 2) * $(cat "$job/seconds") * 100))
prepare
initramfs
cp "$job/programs" "$job/seconds" "$out/initramfs/lab/"
[ ! -e "$job/policy.toml" ] || cp "$job/policy.toml" "$out/initramfs/lab/"
mkdir -p "$out/initramfs/programs"
[ ! -d "$job/files" ] || cp -r "$job/files/." "$out/initramfs/programs/"
with_programs "$job/programs"
pack
printf 'model_on 0\ntruth_file %s\n' "$out/truth.tsv" >>"$job/machine"
console=$out/programs.log
shown=0
# Each program that has started since the last call.
progress() {
    local started
    mapfile -t started < <(tr -d '\r' <"$console" | sed -n 's/^.*PHASE\t\([a-z]*\)\t/\1: /p')
    [ "${#started[@]}" -le "$shown" ] || printf '%s\n' "${started[@]:shown}"
    shown=${#started[@]}
}
boot programs "$job/machine" "$out/initramfs.cpio"
programs_run "$console" >"$out/ran.tsv"
if ! grep -aq 'LAB	end' "$console"; then
    starved && echo "lab: this host is busy: the guest had $ran s of CPU time and waited for $waited s, in $limit_seconds s" >&2
    echo "lab: the guest did not come to its end (see $console)" >&2
    exit 1
fi
phase_table "$out/truth.tsv" "$out/ran.tsv" | cut -f1-14 >"$job/results.tsv"
