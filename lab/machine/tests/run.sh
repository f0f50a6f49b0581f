#!/usr/bin/env bash
# Tests the machine's parts without QEMU. The caches are compared with `cachemate mrc --ways` on the same accesses, miss
# for miss. Usage: lab/machine/tests/run.sh CACHEMATE [OUT] (OUT is a directory for build products; the exit code is 1
# if a result differs)
set -euo pipefail
cachemate=$(realpath "$1")
out=${2:-$(mktemp -d)}
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")/.."
make -s OUT="$out" benches
cd "$out"
failed=0

# same WHAT EXPECTED FOUND: compares two results.
same() {
    if [ "$2" = "$3" ]; then
        printf 'ok    %-64s %s\n' "$1" "$3"
    else
        printf 'FAIL  %-64s found %s, expected %s\n' "$1" "$3" "$2"
        failed=1
    fi
}
# sim TRACE SIZE WAYS SLICES [--l1 SIZE:WAYS]: number of misses, and of misses of the L1 in front if there is one.
sim() {
    local trace=$1 size=$2 ways=$3 slices=$4
    shift 4
    "$cachemate" --quiet mrc --format u64 "$trace" --sizes "$size" --ways "$ways" --slices "$slices" "$@" --json
}
field() { sed -n "s/.*\"$1\": *\([0-9]*\).*/\1/p" | head -n 1; }
count() { awk -v name="$1" '$1 == name { print $2 }'; }

# config L3_BYTES SLICES: one L3 of two CPUs, an L2 of 64 KiB, no prefetcher
config() {
    printf 'cpus 2\ncpus_per_l3 2\nl2_bytes 65536\nl3_bytes %s\nl3_slices %s\nprefetch_streams 0\nprefetch_degree 0\n' "$1" "$2"
}

for part in parts sampled clock_bench closed_form; do
    timeout -k 5 600 "./$part" >"$part.out" 2>"$part.log" && code=0 || code=$?
    same "$part" 0 "$code"
    [ "$code" = 0 ] || cat "$part.log"
done
awk -F '\t' 'NF == 6 { printf "%-5s %-72s found %s, closed form %s\n", $1, $3, $4, $5 }' closed_form.out

# One CPU, three levels: each level receives the misses of the level before it.
for kind in uniform skewed loop stream; do
    ./make_trace "$kind" 40000 300000 5 0x100000 >"$kind.u64"
    for slices in 1 32; do
        config 1048576 "$slices" >one.cfg
        for accesses in 60000 300000; do # a difference early on cannot be made good later
            head -c $((8 * accesses)) "$kind.u64" >part.u64
            ./cache_replay one.cfg trace-misses 0 missed.u64 replay 0 part.u64 show 0 >model
            sim part.u64 64K 8 1 --l1 32K:8 >first
            what="$kind, $accesses accesses"
            same "$what: misses of the L1" "$(field l1_misses <first)" "$(count l1_misses <model)"
            same "$what: misses of the L2" "$(field misses <first)" "$(count l2_misses <model)"
            same "$what: misses of the L3, $slices slices" "$(sim missed.u64 1M 16 "$slices" | field misses)" \
                "$(count l3_misses <model)"
        done
    done
done

# Stores of one CPU miss exactly where its loads would.
config 1048576 1 >one.cfg
./cache_replay one.cfg store 0 skewed.u64 show 0 >stores
./cache_replay one.cfg replay 0 skewed.u64 show 0 >loads
same "stores miss as loads do" "$(count l3_misses <loads)" "$(count l3_misses <stores)"

# Two CPUs with disjoint ways: each behaves as if it had a separate cache of that many ways.
./make_trace uniform 12000 200000 9 0x4000000 >other.u64
for ways in 2 4 8 12 14; do
    first=$(printf '%x' $(((1 << ways) - 1)))
    second=$(printf '%x' $((0xffff & ~((1 << ways) - 1))))
    ./cache_replay one.cfg class 0 1 1 class 1 2 2 task 0 1 task 1 2 mask 0 1 "$first" mask 0 2 "$second" \
        trace-misses 0 missed-0.u64 trace-misses 1 missed-1.u64 together 0 skewed.u64 1 other.u64 \
        show 0 show 1 monitor 0 1 monitor 0 2 tasks 1 2 >model
    for cpu in 0 1; do
        of=$((cpu == 0 ? ways : 16 - ways))
        expected=$(sim "missed-$cpu.u64" $((of * 65536)) "$of" 1 | field misses)
        same "ways $ways/$((16 - ways)): misses of CPU $cpu" "$expected" \
            "$(count l3_misses <model | sed -n "$((cpu + 1))p")"
        # Every set contains its lines, at most as many as it has ways.
        held=$(od -An -v -t u8 -w8 "missed-$cpu.u64" | awk -v ways="$of" '
            { line = int($1 / 64); if (!(line in seen)) { seen[line] = 1; lines[line % 1024]++ } }
            END { for (set in lines) sum += lines[set] < ways ? lines[set] : ways; print sum }')
        same "ways $ways/$((16 - ways)): occupancy of CPU $cpu" "$held" "$(count lines <model | sed -n "$((cpu + 1))p")"
        same "ways $ways/$((16 - ways)): the task's lines are the monitor's" "$held" \
            "$(count "lines_$([ "$cpu" = 0 ] && echo a || echo b)" <model)"
    done
    same "ways $ways/$((16 - ways)): neither displaces the other" "0 0" \
        "$(count a_by_b <model) $(count b_by_a <model)"
done

# With all ways shared, one program only evicts lines of the other.
./cache_replay one.cfg task 0 1 task 1 2 trace-misses 0 missed-0.u64 trace-misses 1 missed-1.u64 \
    together 0 skewed.u64 1 other.u64 show 0 tasks 1 2 >model
same "shared: the L3 is full" 16384 "$(awk '$1 ~ /^lines_/ { sum += $2 } END { print sum }' model)"
same "shared: misses by others are those that the other caused" "$(count others <model)" "$(count a_by_b <model)"
alone=$(sim missed-0.u64 1M 16 1 | field misses)
same "shared: the other costs misses" yes "$([ "$(count l3_misses <model)" -gt "$alone" ] && echo yes || echo no)"
exit "$failed"
