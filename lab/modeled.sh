#!/usr/bin/env bash
# The lab with caches that cost time: an unmodified kernel and unmodified programs on a modeled machine (lab/machine),
# and cachemate on it as on any host. docs/lab-tests.md describes the scenarios and their results.
# Needs apt on a Debian host, a C compiler, zstd and xz. If one of them is not available, it prints NOT RUN and exits
# with 0.
# Usage: lab/modeled.sh [BINARY]    (target/chaos/cachemate, which make lab builds; results go to target/lab)
# LAB_FULL=1: all scenarios instead of the short ones. LAB_SCENARIOS: only these (`benches`: the benches of the machine).
# LAB_CACHE: the directory of packages. LAB_LIMIT_SECONDS: limit of one guest. LAB_BUDGET_SECONDS: limit of all; guests that
# do not fit are NOT RUN.
# LAB_DEATHS: number of kills in `deaths`, at moments drawn by LAB_SEED.
# LAB_NICE: nice value of the emulator. LAB_KERNEL: series of the kernel instead of 6.18 (such as 7.3).
set -euo pipefail
cd "$(dirname "$0")/.."
binary=${1:-target/chaos/cachemate}
cache=${LAB_CACHE:-${XDG_CACHE_HOME:-${HOME:-$PWD/target}/.cache}/cachemate/lab}
out=$PWD/target/lab
short='colors-hashed colors deaths gangs'
full="settled hybrid gangs gangs-bare colors colors-hashed ways placement sharing deaths memory hotplug clock resctrl auto-bandwidth partitions disk"
# Run only if named in LAB_SCENARIOS, because they take long or have never run to completion.
named="speed suspend nodes sweep traces traces-hashed probes probes-bare probes-rdt sharing-processes auto-gangs auto-ways auto-placement auto-colors auto-nothing real forecast services services-batch"
scenarios=${LAB_SCENARIOS:-$([ -n "${LAB_FULL:-}" ] && echo "$full" || echo "$short")}
budget=${LAB_BUDGET_SECONDS:-$([ -n "${LAB_FULL:-}" ] && echo 86400 || echo 420)}
started=$(date +%s)
mkdir -p "$out"
rm -f "$out"/*.log "$out"/*.tsv "$out"/*.hurt "$out/result.json"

[ -x "$binary" ] || { echo "lab: no $binary; make lab makes it" >&2; exit 1; }
binary=$(realpath "$binary")
. lab/modeled-guest.sh
. lab/real.sh
. lab/forecast.sh
. lab/services.sh
prepare
guest_seconds=$limit_seconds

# scenario NAME MACHINE [CONFIG-OPTION...]: runs one guest on one machine. The scenario is the part of NAME before a
# dash.
scenario() {
    local name=$1 machine=$2 since config=$out/$1.machine
    shift 2
    one_guest
    limit_seconds=$((started + budget - $(date +%s)))
    [ "$limit_seconds" -lt "$guest_seconds" ] || limit_seconds=$guest_seconds
    if [ "$limit_seconds" -lt 20 ]; then
        printf '%s.end\tthe guest comes to its end\tnote\t-\tNOT RUN: the %s s for all guests are over\t-\n' "$name" "$budget" \
            >>"$out/results.tsv"
        guest_over
        return
    fi
    "$binary" lab config --machine "$machine" "$@" >"$config"
    printf 'model_on 0\nverbose 1\ntruth_file %s\n' "$out/$name.truth.tsv" >>"$config"
    [ -z "${throttling:-}" ] || printf 'throttling 1\n' >>"$config"
    since=$(date +%s)
    echo "scenario '$name' on $machine (modeled machine) ..."
    boot "$name" "$config" "$out/initramfs.cpio"
    tr -d '\r' <"$out/$name.log" | grep -ao 'LAB	.*' | cut -f2- >"$out/$name.lines.tsv" || true
    if ! grep -q '^end	' "$out/$name.lines.tsv"; then
        verdict=FAIL
        why="ended after $limit_seconds s (see $out/$name.log)"
        if starved; then
            verdict=note
            why="NOT RUN: this host is busy: $ran s of CPU time, $waited s of waiting for it, in $limit_seconds s"
        elif [ "$code" = 124 ] && [ "$limit_seconds" -lt "$guest_seconds" ]; then
            verdict=note
            why="NOT RUN to its end: the $budget s for all guests are over"
        fi
        printf '%s.end\tthe guest comes to its end\t%s\t-\t%s\t-\n' "$name" "$verdict" "$why" >>"$out/$name.lines.tsv"
    fi
    awk -F '\t' -v OFS='\t' -v name="$name" -v seconds=$(($(date +%s) - since)) '
        $1 == "end" { print name ".end", "the guest comes to its end", "met", $2, seconds " s here", "-"; next } { print }
    ' "$out/$name.lines.tsv" >>"$out/results.tsv"
}

# Host CPU seconds for a guest second of each kind of work, by the machine's marks.
speed_costs() {
    tr -d '\r' <"$out/speed.log" | awk -v OFS='\t' '
        BEGIN { count = split("idle compute chase stream both system", kinds, " ") }
        match($0, /lab: mark [0-9]+ guest_ns .*/) { split(substr($0, RSTART), f, " "); guest[f[3]] = f[5]; cpu[f[3]] = f[9] }
        END {
            for (i = 1; i <= count; i++) if (2 * i in guest && guest[2 * i] > guest[2 * i - 1])
                print "speed." kinds[i], "host CPU seconds for a guest second: " kinds[i], "note", "-",
                    sprintf("%.2f", (cpu[2 * i] - cpu[2 * i - 1]) / (guest[2 * i] - guest[2 * i - 1])), "-"
        }'
}

# deaths_counted LOG: kills and what they changed, by the console of a guest that was stopped at its limit.
deaths_counted() {
    ! grep -aq 'LAB	end' "$1" || return 0
    tr -d '\r' <"$1" | awk -v OFS='\t' '
        /^# death / {
            count++
            restored += /: met \(/
            sub(/.*\(/, "")
            sub(/\).*/, "")
            kinds = split($0, names, ", ")
            for (i = 1; i <= kinds; i++) changed[names[i]]++
        }
        END {
            if (!count) exit
            for (kind in changed) { moments = moments gap kind " " changed[kind]; gap = ", " }
            print "deaths.counted", "kills until the limit of time, restored", restored == count ? "met" : "FAIL", count, restored, "all"
            print "deaths.moments", "deaths at which each kind of setting was changed", "note", "-", moments, "-"
        }'
}

# The benches of the machine come first, because guests rely on them. Scenarios that are selected by name run without them,
# unless `benches` is one of the names.
benches() {
    local verdict=FAIL
    lab/machine/tests/run.sh "$binary" "$out/machine" >"$out/benches.log" 2>&1 && verdict=met
    printf 'machine.benches\tthe model against the simulator, miss for miss\t%s\t%s differ\t%s compared\tnone differs\n' "$verdict" \
        "$(grep -c '^FAIL' "$out/benches.log")" "$(grep -cE '^(ok|FAIL) ' "$out/benches.log")"
    # Every figure of the caches, compared with closed forms.
    awk -F '\t' -v OFS='\t' 'NF == 6 { print "model." $2, $3, $1, $5, $4, "within 2 %" }' "$out/machine/closed_form.out"
}
: >"$out/results.tsv"
case " ${LAB_SCENARIOS:-benches} " in *' benches '*) benches >>"$out/results.tsv" ;; esac

initramfs
! has_chaos || : >"$out/initramfs/lab/chaos"
echo "${LAB_DEATHS:-4} ${LAB_SEED:-1}" >"$out/initramfs/lab/deaths"
pack
for name in $scenarios; do
    case $name in
        settled) scenario settled 'lab-vm?packages=2' ;;
        hybrid)
            scenario hybrid 'lab-vm?cores_per_package=4&caches.l3.shared_by_cores=4' --small-cores 2 --small-l2-bytes 2097152
            ;;
        probes) scenario probes lab-vm ;;
        probes-bare) scenario probes-bare lab-vm --no-counters --no-rdt ;;
        probes-rdt) scenario probes-rdt lab-vm --no-counters ;;
        gangs | auto-gangs) scenario "$name" lab-vm ;;
        gangs-bare) scenario gangs-bare lab-vm --no-counters --no-rdt ;;
        colors) scenario colors lab-vm ;;
        auto-colors) scenario auto-colors lab-vm --no-rdt ;;
        auto-bandwidth) throttling=1 scenario auto-bandwidth 'lab-vm?memory.bytes_per_cycle=1' ;;
        colors-hashed) scenario colors-hashed 'lab-vm?caches.l3.slices=128' ;;
        ways | auto-ways | auto-nothing) scenario "$name" lab-vm ;;
        placement | auto-placement) scenario "$name" 'lab-vm?packages=2' ;;
        sharing | sharing-processes) scenario "$name" 'lab-vm?packages=2' --samples ;;
        hotplug | clock | suspend | partitions | disk) scenario "$name" 'lab-vm?packages=2' ;;
        resctrl) throttling=1 scenario resctrl 'lab-vm?packages=2' ;;
        nodes) scenario nodes 'lab-vm?packages=2&memory.nodes=2' ;;
        sweep) scenario sweep lab-vm ;;
        traces) scenario traces lab-vm --samples ;;
        traces-hashed) scenario traces-hashed 'lab-vm?caches.l3.slices=128' --samples ;;
        speed)
            scenario speed lab-vm
            speed_costs >>"$out/results.tsv"
            ;;
        real) real ;;
        services) services services lab-vm ;;
        services-batch)
            services services-batch 'lab-vm?cores_per_package=4&caches.l3.shared_by_cores=4'
            services_losses >>"$out/results.tsv"
            ;;
        forecast) forecast ;;
        benches) ;; # they came first
        deaths | memory)
            if has_chaos; then
                scenario "$name" 'lab-vm?packages=2'
                [ "$name" = memory ] || deaths_counted "$out/deaths.log" >>"$out/results.tsv"
            else
                printf '%s.end\tthe guest comes to its end\tnote\t-\tNOT RUN: %s\t-\n' "$name" "$NO_CHAOS" >>"$out/results.tsv"
            fi
            ;;
        *) echo "lab: found the scenario '$name', expected some of: benches $full $named" >&2; exit 2 ;;
    esac
done

# ---- results --------------------------------------------------------------------------------------------------------

report
