# The gang scheduler beside busy programs, through hotplug and repeated kills; caches without cost; sourced by init.

# shares SECONDS PID...: percent of a CPU that each program got.
shares() {
    seconds=$1
    shift
    for one in "$@"; do cut -d' ' -f1 "/proc/$one/schedstat"; done >had
    usleep "$(awk "BEGIN { print int($seconds * 1e6) }")"
    for one in "$@"; do cut -d' ' -f1 "/proc/$one/schedstat"; done | paste had - |
        awk -v s="$seconds" '{ printf "%s%.1f", gap, ($2 - $1) / s / 1e7; gap = " " }'
}
least() { printf '%s\n' "$@" | sort -n | head -n 1; }

# One busy unmanaged loop, then one on each CPU: does every managed program get time, from the first moment of the
# loop?
scenario_beside() {
    lab-program model 0
    attach || { report attach "the scheduler is attached" FAIL - "$(tail -n 1 loader.log)" enabled; return; }
    programs 64 64
    plan 1 20000 "$(four 0 0 1 1)"
    usleep 600000
    for loops in one two; do
        same "attached-$loops" "before $loops busy loops sched_ext is" enabled "$(cat /sys/kernel/sched_ext/state)"
        taskset 1 lab-program load chase burn-0 -1 64 2600 >/dev/null &
        [ "$loops" = one ] || taskset 2 lab-program load chase burn-1 -1 64 2600 >/dev/null &
        set -- $(shares 0.5 $all)
        holds "share-$loops" "beside $loops busy loops: percent of a CPU that each managed program had in the first 0.5 s" \
            "$(state | grep -o '"guarded":"[^"]*' | cut -d'"' -f4)" "$*" "none at 0" "$(least "$@") > 0" "$(least "$@")"
        set -- $(shares 1.5 $all)
        holds "later-$loops" "the same in the 1.5 s after that" "$(cat /sys/kernel/sched_ext/state)" "$*" "none at 0" "$(least "$@") > 0" \
            "$(least "$@")"
        wait $! 2>/dev/null
        # The scheduler attaches again after a back-off.
        within 10 attached
        usleep 600000
    done
    echo '{"stop":{}}' | gangs send >answer
    within 5 ended "$loader"
    same stop "after stop the policies and sched_ext are as before" "0 disabled" "$(policies $all) $(cat /sys/kernel/sched_ext/state)"
    kill $all
}

# A CPU goes offline and comes back: the kernel ends the scheduler, and the loader attaches it again. Two L3s with two
# CPUs each.
scenario_hotplug() {
    lab-program model 0
    caches="0 1"
    attach || { report attach "the scheduler is attached" FAIL - "$(tail -n 1 loader.log)" enabled; return; }
    programs 64 64
    plan 1 20000 "$(four 0 0 1 1)"
    usleep 200000
    over 0.4
    same caches "caches that the scheduler has turns for" "0-1 2-3" "$(grep -o '"cpus":"[^"]*' state.json | cut -d'"' -f4 | tr '\n' ' ' | sed 's/ $//')"
    near turns "turns in 0.4 s at the first of two caches" "$(grown_first turns)" 20 15
    for online in 0 1; do
        restarts=$(grep -c 'attached again' loader.log)
        echo "$online" >/sys/devices/system/cpu/cpu3/online
        within 20 attached_again
        same "again-$online" "CPU 3 online: $online; the scheduler is attached again, and has its programs" "enabled 7" \
            "$(cat /sys/kernel/sched_ext/state) $(policies $all)"
        set -- $(shares 0.4 $all)
        holds "run-$online" "percent of a CPU that each program has then" - "$*" "none at 0" "$(least "$@") > 0" "$(least "$@")"
        state >state.json
        same "cpus-$online" "CPUs by cache, as the scheduler has them" "$([ "$online" = 0 ] && echo '0-1 2' || echo '0-1 2-3')" \
            "$(grep -o '"cpus":"[^"]*' state.json | cut -d'"' -f4 | tr '\n' ' ' | sed 's/ $//')"
    done
    sed 's/^/# /' loader.log
    echo '{"stop":{}}' | gangs send >answer
    within 5 ended "$loader"
    same stop "after stop the policies and sched_ext are as before" "0 disabled" "$(policies $all) $(cat /sys/kernel/sched_ext/state)"
    kill $all
}
attached_again() { attached && [ "$(grep -c 'attached again' loader.log)" -gt "$restarts" ]; }
# grown_first NAME: growth of that count of the first cache.
grown_first() {
    awk -v name="\"$1\":" '
        { counts = substr($0, index($0, "\"counts\":")); n[NR] = substr(counts, index(counts, name) + length(name)) + 0 }
        END { print n[2] - n[1] }' before.json state.json
}

# Fifty kills at different moments; a kill counts only if the scheduler was attached and ran its programs.
scenario_kills() {
    lab-program model 0
    programs 64 64
    pause_us=5000
    counted=0 wrong=0 lost=
    for round in $(seq 1 50); do
        kill -STOP $all # to emulate them while the kernel checks the object takes more than all the rest
        if ! attach; then
            wrong=$((wrong + 1)) lost="round $round: not attached; $(tail -n 1 loader.log)"
            kill -9 "$loader"
            continue
        fi
        plan 1 20000 "$(four 0 0 1 1)"
        kill -CONT $all
        usleep $(((round * 37701) % 90000))
        attached && [ "$(policies $all)" = 7 ] && counted=$((counted + 1))
        kill -9 "$loader"
        wait "$loader" 2>/dev/null
        within 5 detached
        gangs reset >reset.log 2>&1
        found="$(cat /sys/kernel/sched_ext/state) $(policies $all) $([ -e $journal ] && echo journal)"
        [ $((round % 10)) != 0 ] || echo "# $round rounds, $counted counted, $wrong wrong"
        [ "$found" = "disabled 0 " ] || { wrong=$((wrong + 1)) lost="round $round: $found"; }
    done
    kill -CONT $all
    holds kills "kill -9 of the loader at 50 moments: all as before after reset" "$counted had been attached" "$wrong were not ${lost}" \
        "50 attached, none wrong" "$counted == 50 && $wrong == 0" "$counted" "$wrong"
    set -- $(rates 0.2 $all)
    holds run "slowest program afterwards, accesses a second" - "$(least "$@")" "more than none" "$(least "$@") > 0" "$(least "$@")"
    kill $all
}
