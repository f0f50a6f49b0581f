# The gain from gangs on a machine whose caches cost time: two victims of 3 MiB and two streams, two CPUs, one L3 of 8
# MiB. Sourced by init.

# law TURN_MS: ns of an access by the formula (schedulers/gangs/src/quantum.rs): 49152 lines, a hit 26.5 ns, a miss
# 126.5 ns.
law() {
    awk -v ms="$1" 'BEGIN { t = ms * 1e6; f = 49152; m = 126.5; h = 26.5
        printf "%.1f", (t > f * m ? t / (f + (t - f * m) / h) : m) }'
}
# reading PID...: work and CPU time in ns of each program, then the current time, and the context switches since boot.
reading() {
    lab-program progress /run/lab/progress "$@" >done.tsv
    while read -r pid moment work; do echo "$pid $work $(cut -d' ' -f1 "/proc/$pid/schedstat")"; done <done.tsv
    awk '$1 == "ctxt" { print "switches", $2 }' /proc/stat
    awk 'NR == 1 { print "moment", $2 }' done.tsv
}
# stretch SECONDS PID...: "PID accesses-per-second ns-of-CPU-time-per-access" for each program, then
# "switches-per-second".
stretch() {
    seconds=$1
    shift
    reading "$@" >before.read
    usleep "$(awk "BEGIN { print int($seconds * 1e6) }")"
    reading "$@" >after.read
    awk 'NR == FNR { work[$1] = $2; ns[$1] = $3; next }
        { grew[$1] = $2 - work[$1]; spent[$1] = $3 - ns[$1]; order[++n] = $1 }
        END { for (i = 1; i <= n; i++) { one = order[i]; if (one == "moment") continue
            printf "%s %.0f %.1f\n", one, grew[one] / grew["moment"], spent[one] / (grew[one] + 1e-9) } }' before.read after.read
}
# of FILE COLUMN PID...: mean of that column over these programs.
of() {
    file=$1 column=$2
    shift 2
    for one in "$@"; do awk -v one="$one" -v column="$column" '$1 == one { print $column }' "$file"; done |
        awk '{ sum += $1 } END { if (NR) printf "%.1f", sum / NR }'
}
# weighted FILE: sum over programs of the speed divided by the solo speed.
weighted() {
    awk -v va="$victim_alone" -v sa="$stream_alone" -v victims=" $victims " '
        $1 == "switches" { next } { sum += $2 / (index(victims, " " $1 " ") ? va : sa) } END { printf "%.2f", sum }' "$1"
}
# worth ID WHAT TURN_MS: measures over at least eight turns, and reports beside the formula (or without it if TURN_MS
# is "none"). The measurements are in $victim_gain and $victim_ns.
worth() {
    usleep "$(awk -v ms="$3" 'BEGIN { print int((ms > 25 ? 2 * ms : 50) * 1000) }')"
    stretch "$(awk -v ms="$3" 'BEGIN { print (ms * 8 > 400 ? ms * 8 / 1000 : 0.4) }')" $victims $streams >worth.tsv
    lab-program wakes 150 >wakes.out
    victim_ns=$(of worth.tsv 3 $victims)
    victim_gain=$(awk "BEGIN { printf \"%.2f\", $(of worth.tsv 2 $victims) / $(of kernel.tsv 2 $victims) }")
    beside=$(awk "BEGIN { printf \"%.2f\", $(of worth.tsv 2 $streams) / $(of kernel.tsv 2 $streams) }")
    report "$1-table" "$2: victims, streams against the kernel alone; weighted speed-up; switches a second; another program wakes late, median and most us" \
        note - "$victim_gain $beside $(weighted worth.tsv) $(of worth.tsv 2 switches | cut -d. -f1) $(field median wakes.out) $(field most wakes.out)" -
}
by_law() { near "$1" "$2: ns of a victim's access, by the law and measured" "$victim_ns" "$(law "$3")" 10; }
no_gain() {
    holds "$1" "$2: the victims' work against the kernel alone" - "$victim_gain ($victim_ns ns an access)" "no gain: at most 1.1" \
        "$victim_gain <= 1.1" "$victim_gain"
}

alone() {
    load chase alone-chase 0 3072 60
    load stream alone-stream 0 32768 60
    victim_alone=$(field per_s alone-chase.out)
    stream_alone=$(field per_s alone-stream.out)
}

# Turns by the scheduler: of the length that the formula gives, too short, and with the wrong gangs.
by_scheduler() {
    for turns_ms in $by_kernel_ms; do
        plan "$((generation += 1))" "${turns_ms}000" "$(four 0 0 1 1)"
        worth "ext-$turns_ms" "sched_ext, $turns_ms ms" "$turns_ms"
        case $turns_ms in
            1 | 5) no_gain "ext-$turns_ms" "sched_ext, $turns_ms ms, too short" ;;
            *) by_law "ext-$turns_ms" "sched_ext, $turns_ms ms" "$turns_ms" ;;
        esac
    done
    plan "$((generation += 1))" 20000 "$(four 0 1 0 1)"
    worth wrong-20 "sched_ext, 20 ms, wrong gangs" 20
    no_gain wrong-20 "sched_ext, 20 ms, wrong gangs"
}
# by_hand stop|idle: the same turns, made by signals or by idle priority from outside.
by_hand() {
    for turns_ms in $by_hand_ms; do
        lab-program turns "$1" "$turns_ms" 60 "$v1,$v2" "$s1,$s2" &
        turning=$!
        worth "$1-$turns_ms" "$2, $turns_ms ms" "$turns_ms"
        kill "$turning"
        wait "$turning" 2>/dev/null
        lab-program turns "$1" 1 0 "$v1,$v2" "$s1,$s2" # for no time: all programs are released
    done
}
# With only one victim, its turn leaves a CPU idle. Strict turns protect it, whereas streams that may fill the turn do
# not.
filling() {
    kill -STOP "$v2"
    victims=$v1
    usleep 50000
    stretch 0.4 $victims $streams >kernel.tsv
    attach || return
    comma=
    tasks=$(task "$v1" 0; task "$s1" 1; task "$s2" 1)
    for mode in strict fill; do
        [ "$mode" = strict ] && may= || may=1
        plan "$((generation += 1))" 20000 "$tasks" "$may"
        worth "$mode" "one victim, two streams, 20 ms, $mode" 20
        eval "${mode}_ns=$victim_ns"
    done
    near strict "one victim, strict turns of 20 ms: ns of its access, by the law and measured" "$strict_ns" "$(law 20)" 10
    holds fill "the same where streams may fill its turn" - "$fill_ns" "slower than strict" "$fill_ns > $strict_ns" "$fill_ns" "$strict_ns"
}

# gain-short: two lengths by the scheduler, one manually.
scenario_gain() {
    by_kernel_ms='20 50 100 5 1' by_hand_ms='20 50 100 5 1'
    [ "$scenario" = gain ] || by_kernel_ms='20 50' by_hand_ms=20
    alone
    programs 3072 32768
    victims="$v1 $v2" streams="$s1 $s2"
    usleep 100000
    stretch 0.5 $victims $streams >kernel.tsv
    [ "$scenario" != gain ] || worth kernel "the kernel alone" 1
    by_hand stop "stop signals"
    by_hand idle "idle turns"
    generation=0
    attach || return
    by_scheduler
    echo '{"stop":{}}' | gangs send >answer
    within 5 ended "$loader"
    [ "$scenario" != gain ] || filling
    echo '{"stop":{}}' | gangs send >answer
    within 5 ended "$loader"
    kill -CONT "$v2"
    kill $all
}
