# The gang scheduler on sched_ext (schedulers/gangs) on a machine with one L3 and two CPUs, caches without cost.
# Sourced by init if the scheduler is installed. gang-lives.sh tests kills, and gang-gain.sh measures the gain.

socket=/run/gangs.sock
journal=/run/gangs.journal
attached() { [ "$(cat /sys/kernel/sched_ext/state)" = enabled ]; }
detached() { [ "$(cat /sys/kernel/sched_ext/state)" = disabled ]; }
ended() { ! kill -0 "$1" 2>/dev/null; }
# policies PID...: scheduling policies from the kernel's stat files.
policies() { for pid in "$@"; do sed 's/.*) //' "/proc/$pid/stat" | cut -d' ' -f39; done | sort -u | tr '\n' ' ' | sed 's/ $//'; }
back() { [ "$(policies "$@")" = 0 ]; }
# attach OPTION...: starts the loader in the background; its pid is in $loader.
attach() {
    gangs run "$@" >loader.log 2>&1 &
    loader=$!
    within 60 attached && within 20 test -S "$socket" && return
    sed 's/^/# /' loader.log
    echo "# loader: $(cat "/proc/$loader/status" 2>/dev/null | grep -E 'State|VmRSS' | tr '\n\t' '  ') $(cat "/proc/$loader/wchan" 2>/dev/null)"
    return 1
}
# plan GENERATION TURN_US TASKS [FILL]: two gangs on each of $caches; gang FILL may fill the first gang's turn.
caches=0
plan() {
    turns=
    for cache in $caches; do
        turns="$turns${turns:+,}{\"cache\":$cache,\"gang\":0,\"turn_us\":$2,\"may_fill\":[${4:-}]},{\"cache\":$cache,\"gang\":1,\"turn_us\":$2}"
    done
    printf '{"plan":{"version":1,"generation":%s,"longest_wait_ms":2000,"turns":[%s],"tasks":[%s]}}\n' "$1" "$turns" "$3" |
        gangs send >answer
}
# task PID GANG [WEIGHT]: one task of a plan.
task() {
    printf '%s{"process":%s,"gang":%s,"caches":[%s],"weight":%s,"children":true}' "$comma" "$1" "$2" "$(echo $caches | tr ' ' ,)" \
        "${3:-100}"
    comma=,
}
four() { comma=; task "$v1" "$1"; task "$v2" "$2"; task "$s1" "$3"; task "$s2" "$4"; }
state() { echo '{"state":{}}' | gangs send; }
# count NAME: a count of the state that was read last.
count() { sed -n "s/.*\"$1\":\([0-9][0-9]*\).*/\1/p" "${2:-state.json}"; }
# over SECONDS: reads the state before and after this time.
over() {
    state >before.json
    usleep "$(awk "BEGIN { print int($1 * 1e6) }")"
    state >state.json
}
# grown NAME: growth of a count between both states.
grown() { echo $(($(count "$1") - $(count "$1" before.json))); }
# in_turn: percent of the time in which all CPUs ran the gang whose turn it was.
in_turn() {
    awk "BEGIN { all = $(grown turn_ns) + $(grown mixed_ns) + $(grown off_turn_ns) + $(grown partly_idle_ns) + $(grown idle_ns)
        printf \"%.1f\", all ? 100 * $(grown turn_ns) / all : 0 }"
}
programs() {
    busy chase victim-1 -1 "$1"; v1=$pid
    busy stream stream-1 -1 "$2"; s1=$pid
    busy chase victim-2 -1 "$1"; v2=$pid
    busy stream stream-2 -1 "$2"; s2=$pid
    all="$v1 $v2 $s1 $s2"
    for pid in $all; do within 30 test -s "/run/lab/progress/$pid"; done
}

turns_as_planned() {
    plan 1 20000 "$(four 0 0 1 1)"
    same taken "the plan is taken in, with no complaint" '"complaints":[],"generation":1' "$(grep -o '"complaints.*"generation":1' answer)"
    same policy "the planned programs are the scheduler's" "7" "$(policies $all)"
    usleep 100000
    over 0.6
    same held "threads held, as read back" 4 "$(count held)"
    same read-back "turns in force, as read back, us" "20000 20000" "$(grep -o '"turn_us":[0-9]*' state.json | cut -d: -f2 | tr '\n' ' ' | sed 's/ $//')"
    near turns "turns in 0.6 s" "$(grown turns)" 30 15
    share=$(in_turn)
    holds in-turn "percent of the time in which both CPUs ran the gang in turn" - "$share" "at least 95" "$share >= 95" "$share"
    wait_ms=$(awk "BEGIN { printf \"%.1f\", $(count longest_wait_ns) / 1e6 }")
    holds wait "longest wait of a task, ms" - "$wait_ms" "two rotations and 100 ms: 180" "$wait_ms <= 180" "$wait_ms"
    report late "how late a turn ended at most, us" note - "$(($(count latest_ns) / 1000))" -
}

bad_plans() {
    plan 1 20000 "$(four 0 0 1 1)"
    same old "an old generation is refused" "plan.generation: found 1, expected more than 1" "$(cut -d'"' -f4 answer)"
    plan 2 20000 "{\"process\":$v1,\"gang\":7,\"caches\":[0]}"
    same no-turn "a task without a turn is refused" "plan.tasks[0].caches[0]: gang 7 has no turn at cache 0" "$(cut -d'"' -f4 answer)"
    plan 3 1500000 "$(four 0 0 1 1)"
    same long-turn "a turn that is too long is refused" "plan.turns[0].turn_us: found 1500000, expected 1000 to 1000000" "$(cut -d'"' -f4 answer)"
    same still "the plan in force is the one before" 1 "$(state | sed -n 's/.*"generation":\([0-9]*\).*/\1/p')"
}

# The programs are started and stopped before the scheduler is attached, because starting them takes so much CPU time
# that the guard would act.
waiting() {
    more=
    for name in a b c d e f; do
        busy chase "more-$name" -1 64
        kill -STOP "$pid"
        more="$more $pid"
    done
    sh -c 'kill -STOP $$; while :; do lab-program load chase child -1 64 60 >/dev/null; done' &
    parent=$!
}
# Light and heavy tasks in one gang, and children of a planned shell: do all of them still run?
many() {
    comma=
    tasks=$(four 0 0 1 1; comma=,; weight=1; for pid in $more; do task "$pid" 0 $weight; weight=$((weight == 1 ? 10000 : 1)); done; task "$parent" 1)
    # Earlier work of this shell may have triggered the guard.
    usleep 1500000
    within 10 attached
    plan 4 20000 "$tasks"
    same taken-many "the larger plan is taken in" '{"attached":true,"complaints":[],"generation":4}' "$(cat answer)"
    kill -CONT $more "$parent"
    usleep 150000
    over 0.8
    same attached-many "and the scheduler is attached still" enabled "$(cat /sys/kernel/sched_ext/state)"
    attached || sed 's/^/# /' loader.log
    wait_ms=$(awk "BEGIN { printf \"%.1f\", $(count longest_wait_ns) / 1e6 }")
    holds wait-many "longest wait with eight tasks of weights 1 to 10000 in a gang, ms" "$(count rescued) rescued" "$wait_ms" \
        "two rotations and 100 ms: 180" "$wait_ms <= 180" "$wait_ms"
    share=$(in_turn)
    holds in-turn-many "percent in turn, with children of a planned process" - "$share" "at least 80" "$share >= 80" "$share"
    kill $more "$parent"
    plan 5 20000 "$(four 0 0 1 1)"
}

deaths() {
    # A kill counts only if the process was alive before.
    same alive "before kill -9 of the loader sched_ext is" enabled "$(cat /sys/kernel/sched_ext/state)"
    kill -9 "$loader"
    wait "$loader" 2>/dev/null
    within 5 detached
    same killed "after kill -9 of the loader sched_ext is" disabled "$(cat /sys/kernel/sched_ext/state)"
    set -- $(rates 0.2 $all)
    holds killed-run "slowest program after kill -9, accesses a second" - "$(printf '%s\n' "$@" | sort -n | head -n 1)" "more than none" \
        "$1 > 0 && $2 > 0 && $3 > 0 && $4 > 0" "$1" "$2" "$3" "$4"
    gangs reset >reset.log 2>&1
    same reset "after reset the policies are as before" 0 "$(policies $all)"
    same journal "and no journal is left" absent "$([ -e $journal ] && echo present || echo absent)"

    attach && plan 1 20000 "$(four 0 0 1 1)"
    echo S >/proc/sysrq-trigger
    within 10 ended "$loader"
    same sysrq "sysrq-S: the loader ends and says why" "exit kind 67" "$(grep -o 'exit kind 67' loader.log)"
    within 5 detached
    same sysrq-state "sysrq-S: sched_ext, policies" "disabled 0" "$(cat /sys/kernel/sched_ext/state) $(policies $all)"
}

# Busy unmanaged loops on both CPUs: without the guard, managed tasks would get no time until the watchdog acts.
guard() {
    attach && plan 1 20000 "$(four 0 0 1 1)"
    usleep 500000
    taskset 1 lab-program load chase burn-0 -1 64 1500 >/dev/null &
    taskset 2 lab-program load chase burn-1 -1 64 1500 >/dev/null &
    since=$(cut -d' ' -f1 /proc/uptime)
    within 10 back $all
    after=$(awk "BEGIN { printf \"%.2f\", $(cut -d' ' -f1 /proc/uptime) - $since }")
    same guard "busy loops on both CPUs: the programs are released" 0 "$(policies $all)" "back after $after s"
    set -- $(rates 0.2 $all)
    holds guard-run "slowest program beside the busy loops, accesses a second" - "$(printf '%s\n' "$@" | sort -n | head -n 1)" \
        "more than none" "$1 > 0 && $2 > 0 && $3 > 0 && $4 > 0" "$1" "$2" "$3" "$4"
    same guard-why "and why is reported" 1 "$(state | grep -c 'unmanaged tasks had')"
    echo '{"stop":{}}' | gangs send >answer
    within 5 ended "$loader"
    same stop "after stop the policies and sched_ext are as before" "0 disabled" "$(policies $all) $(cat /sys/kernel/sched_ext/state)"
    sed 's/^/# /' loader.log
}

scenario_scheduler() {
    lab-program model 0
    same check "nothing is missing here" '' "$(gangs check)" nothing
    waiting
    if ! attach; then
        report attach "the scheduler is attached" FAIL - "$(tail -n 1 loader.log)" enabled
        dmesg | tail -n 20 | sed 's/^/# /'
        kill "$loader"
        return
    fi
    same attach "the scheduler is attached" "enabled gangs" "$(cat /sys/kernel/sched_ext/state /sys/kernel/sched_ext/root/ops | tr '\n' ' ' | sed 's/_.*//; s/ $//')"
    programs 64 64
    turns_as_planned
    bad_plans
    many
    deaths
    guard
    kill $all
}
