#!/usr/bin/env bash
# Tests the gang scheduler on sched_ext (schedulers/gangs) under a real kernel on a modeled machine: does it attach,
# take turns as planned, keep its bound, and is everything restored after it is killed? docs/evidence/2026-11.md has the
# results.
# Needs the prerequisites of lab/modeled.sh, and cargo, clang 18 or later, libelf and zlib to build the scheduler. If
# one of them is not available, it prints NOT RUN and exits with 0.
# Usage: lab/scheduler.sh [GANGS-BINARY [CACHEMATE-BINARY]]    (results go to target/lab/scheduler)
# LAB_SCENARIOS: default 'scheduler beside hotplug kills gain daemon'; gain and daemon enable the cache model and take
# long.
# LAB_KERNEL, LAB_CACHE, LAB_LIMIT_SECONDS, LAB_NICE: as for lab/modeled.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${LAB_CACHE:-${XDG_CACHE_HOME:-${HOME:-$PWD/target}/.cache}/cachemate/lab}
out=$PWD/target/lab/scheduler
scenarios=${LAB_SCENARIOS:-scheduler beside hotplug kills gain daemon}
cachemate=${2:-target/chaos/cachemate}
export LAB_NICE=${LAB_NICE:-15}
started=$(date +%s)
mkdir -p "$out"
rm -f "$out"/*.log "$out"/*.tsv "$out/result.json"

. lab/modeled-guest.sh

build() {
    local clang found=
    command -v cargo >/dev/null || not_run "cargo is missing on this host"
    for clang in ${CLANG:-clang clang-21 clang-20 clang-19 clang-18}; do
        command -v "$clang" >/dev/null && [ "$("$clang" -dumpversion | cut -d. -f1)" -ge 18 ] && found=$clang && break
    done
    [ -n "$found" ] || not_run "clang 18 or later is missing on this host (packages clang-19, libelf-dev, zlib1g-dev)"
    CLANG=$found cargo build --locked --manifest-path schedulers/gangs/Cargo.toml >"$out/build.log" 2>&1 ||
        not_run "the scheduler cannot be built (see $out/build.log)"
}
if [ $# -ge 1 ]; then binary=$1; else build && binary=schedulers/gangs/target/debug/gangs; fi
prepare

scheduler_initramfs() {
    local root=$out/initramfs
    rm -rf "$root"
    mkdir -p "$root/bin" "$root/lab"
    cp "$(ls "$tree/bin/busybox" "$tree/usr/bin/busybox" 2>/dev/null | head -n 1)" "$root/bin/"
    with_libraries "$binary" "$root"
    strip "$root/bin/gangs" 2>/dev/null || true
    with_libraries "$out/machine/lab-program" "$root"
    cp lab/guest/init "$root/init"
    cp lab/guest/{scenarios,gang-scheduler,gang-lives,gang-gain,gang-daemon}.sh "$root/lab/"
    [ ! -x "$cachemate" ] || { with_libraries "$cachemate" "$root" && mv -f "$root/bin/$(basename "$cachemate")" "$root/bin/cachemate.new" &&
        mv "$root/bin/cachemate.new" "$root/bin/cachemate" && strip "$root/bin/cachemate" 2>/dev/null; } || true
    chmod +x "$root/init"
}
scheduler_initramfs
pack
report_not_run() { printf '%s.end\tthe guest comes to its end\tnote\t-\tNOT RUN: %s\t-\n' "$name" "$1" >>"$out/results.tsv"; }

for name in $scenarios; do
    config=$out/$name.machine
    cpus=2
    case $name in
        hotplug*) cpus=4 ;;
        daemon) [ -x "$cachemate" ] || { report_not_run "no $cachemate; make lab makes it" && continue; } ;;
    esac
    # lab-vm of machines/: one L3 of 8 MiB for two CPUs; other fields have the lab machine's defaults.
    printf 'name %s\ncpus %s\ncpus_per_l3 2\nl3_bytes 8388608\nmemory_bytes 1073741824\nmodel_on 0\nverbose 1\n' "$name" "$cpus" \
        >"$config"
    echo "scenario '$name' (modeled machine) ..."
    one_guest
    since=$(date +%s)
    boot "$name" "$config" "$out/initramfs.cpio"
    tr -d '\r' <"$out/$name.log" | grep -ao 'LAB	.*' | cut -f2- >"$out/$name.lines.tsv" || true
    grep -q '^end	' "$out/$name.lines.tsv" || printf '%s.end\tthe guest comes to its end\tFAIL\t-\tnot within %s s (see %s)\t-\n' \
        "$name" "$limit_seconds" "$out/$name.log" >>"$out/$name.lines.tsv"
    awk -F '\t' -v OFS='\t' -v name="$name" -v seconds=$(($(date +%s) - since)) '
        $1 == "end" { print name ".end", "the guest comes to its end", "met", $2, seconds " s here", "-"; next } { print }
    ' "$out/$name.lines.tsv" >>"$out/results.tsv"
done

report
