# Changes of the host under an acting daemon: CPUs go offline and come back, the clock steps, and other tools use
# resctrl and cpuset partitions. Sourced by init; `snapshot` and `restored` are defined in deaths.sh.

# worker NAME [KIB]: starts a program that alternates short work and sleep, and adds its pid to $pids.
worker() {
    ln -sf /bin/lab-program "/lab/bin/$1"
    "/lab/bin/$1" hold "${2:-64}" &
    pids="$pids $!"
}
# Caches cost nothing from here on. The status is read rarely, because each read starts a process.
rare_looks() {
    lab-program model 0
    pause_us=150000
}
windows() { status | awk -F '[:,]' '/^  "windows": / { print $2 + 0; exit }'; }
windows_passed() { [ "$(windows)" -ge "$1" ] 2>/dev/null; }
# pass COUNT: waits for this number of windows.
pass() {
    first_window=$(windows)
    within 60 windows_passed $((${first_window:-0} + $1))
}
# flagged_windows: windows of the run log in which the host changed.
flagged_windows() { grep -c '"HostChanged"' run.jsonl; }
alive() { kill -0 "$daemon" 2>/dev/null; }
# not_in CPUS < LISTS: those CPU lists, one per line, that are not subsets of CPUS.
not_in() {
    awk -v all="$1" '
        function expand(text, set, parts, i, range, cpu) {
            split("", set)
            for (i = split(text, parts, ","); i > 0; i--) {
                split(parts[i] (parts[i] ~ /-/ ? "" : "-" parts[i]), range, "-")
                for (cpu = range[1] + 0; cpu <= range[2] + 0; cpu++) set[cpu]
            }
        }
        BEGIN { expand(all, in_all) }
        { expand($0, own); for (cpu in own) if (!(cpu in in_all)) { print; next } }'
}
online() { cat /sys/devices/system/cpu/online; }
# CPU lists of tasks and gangs in the plan in force, from status.json.
planned_cpus() {
    awk -F '"' '/^  "gangs": \[$/ { on = 1 } /^  \]/ { on = 0 } $2 == "allowed" && $4 != "" || on && $2 == "cpus" { print $4 }' status.json
}
# turns_of PID...: number of times that each program has slept so far.
turns_of() { for one in "$@"; do awk '/^voluntary/ { printf "%s ", $2 }' "/proc/$one/status" 2>/dev/null || printf 'gone '; done; }
# all_run PID...: true if each of the programs runs.
all_run() {
    turns_before=$(turns_of "$@")
    usleep 50000
    echo "$turns_before/ $(turns_of "$@")" | awk -F '/ ' '{ n = split($1, a, " "); split($2, b, " "); for (i = 1; i <= n; i++) if (!(b[i] > a[i])) exit 1 }'
}

# ---- CPUs ----

# switch_cpus STATE CPU...: takes CPUs offline or online.
switch_cpus() {
    to=$1
    shift
    for cpu in "$@"; do echo "$to" >"/sys/devices/system/cpu/cpu$cpu/online" 2>/dev/null || odd="$odd cpu$cpu stays $((1 - to));"; done
}
# after_change LABEL: checks, two windows after a change, that the plan's CPUs are online, programs run, and the
# daemon lives.
after_change() {
    pass 2 || odd="$odd $1: no windows;"
    status >status.json
    beyond=$(planned_cpus | not_in "$(online)" | sort -u | tr '\n' ' ')
    [ -z "$beyond" ] || odd="$odd $1: the plan has CPUs $beyond of $(online);"
    all_run $pids || odd="$odd $1: a program stands still;"
    alive || odd="$odd $1: the daemon has ended;"
}
# hotplug_under NAME CONFIGURATION: takes CPUs offline and online under one policy; afterward everything must be
# restored.
hotplug_under() {
    odd=
    snapshot >before
    rm -f run.jsonl
    manage "window_ms = 200
run_log = \"/lab/run.jsonl\"
[rollback]
enabled = false
$2
$rules"
    within 20 windows_passed 3 || odd="$odd not started: $(tail -n 1 daemon.log);"
    switch_cpus 0 3
    after_change "without 3"
    switch_cpus 0 2
    after_change "without 2-3"
    switch_cpus 1 3
    switch_cpus 0 1
    after_change "without 1-2"
    kinds=$(kinds_changed)
    switch_cpus 1 1 2
    after_change "all again"
    [ "$(online)" = 0-3 ] || odd="$odd CPUs online: $(online);"
    status >status.json
    grep -o '"text": "[^"]*' status.json | tail -n 2 | sed 's/^/# /'
    end
    flagged=$(flagged_windows)
    [ "$flagged" -ge 4 ] || odd="$odd only $flagged windows are flagged;"
    within 10 restored || odd="$odd not restored: $(differences);"
    verdict=met
    [ -z "$odd" ] || verdict=FAIL
    report "cpus-$1" "CPUs off and on under $1: plans within what is online, all run, restored" "$verdict" "${odd:-yes}" "changed: ${kinds:-nothing}; $flagged windows flagged" "in two windows"
}
scenario_hotplug() {
    rare_looks
    mount -t resctrl resctrl /mnt/rdt
    pids=''
    for name in a b c d; do worker "prog-$name"; done
    set -- $pids
    taskset -p 3 "$1" >/dev/null
    echo +cpuset >/sys/fs/cgroup/cgroup.subtree_control
    mkdir -p /sys/fs/cgroup/batch /mnt/rdt/db
    echo "$4" >/sys/fs/cgroup/batch/cgroup.procs
    rules=$(rules 'prog-*')
    usleep 300000
    hotplug_under default '[policy]
name = "default"'
    hotplug_under dio '[policy]
name = "dio"
parameters = { window_cycles = 400_000_000 }'
    hotplug_under gangs '[policy]
name = "intensity-gangs"
parameters = { window_ns = 200_000_000, samples = 4, probe_ns = 100_000_000 }'
    hotplug_under ways '[policy]
name = "static-partition"
parameters = { steps = [{ shares = ["0-7", "8-15"] }] }'
    hotplug_under cpusets '[policy]
name = "default"
[[cpusets]]
cgroup = "/batch"
cpus = "2-3"'
    hotplug_under auto '[policy]
name = "auto"
parameters = { window_ns = 200_000_000 }'
    [ ! -e /lab/chaos ] || hotplug_under everything '[policy]
name = "shake"'
    kill -9 $pids
}

# ---- the clock ----

# The wall clock steps by an hour forward and back while a plan is in force: windows, guardian and journal must be
# unaffected.
scenario_clock() {
    rare_looks
    mount -t resctrl resctrl /mnt/rdt
    pids=''
    for name in a b; do worker "prog-$name"; done
    set -- $pids
    snapshot >before
    manage "window_ms = 200
run_log = \"/lab/run.jsonl\"
$two_shares
$(rules prog-a prog-b)"
    within 20 acts
    pass 2
    guard=$(guardian) odd=
    for step in 3600 -3600 -3600 3600; do
        date -s "@$(($(date +%s) + step))" >/dev/null || odd="$odd the clock stays;"
        since=$(cut -d' ' -f1 /proc/uptime)
        first_window=$(windows)
        usleep 2000000
        status >status.json
        count=$(awk "BEGIN { printf \"%.1f\", ($(windows) - $first_window) / (($(cut -d' ' -f1 /proc/uptime) - $since) / 0.2) }")
        length=$(awk "BEGIN { printf \"%.2f\", $(number duration_s) / 0.2 }")
        counts="$counts $count" lengths="$lengths $length"
        awk "BEGIN { exit !($count >= 0.7 && $count <= 1.1 && $length >= 0.9 && $length <= 2) }" ||
            odd="$odd after $step s: $count of the windows, the last $length times as long;"
        [ "$(guardian)" = "$guard" ] || odd="$odd after $step s: another guardian;"
        journal || odd="$odd after $step s: no journal;"
        [ "$(own_groups)" = 2 ] || odd="$odd after $step s: $(own_groups) groups;"
        alive || odd="$odd after $step s: the daemon has ended;"
    done
    end
    [ "$(flagged_windows)" = 0 ] || odd="$odd $(flagged_windows) windows are flagged;"
    verdict=met
    [ -z "$odd" ] || verdict=FAIL
    report steps "clock steps of an hour: windows counted, and their lengths, against the configuration" "$verdict" "$odd$counts /$lengths" \
        "1 and 1" "no step is seen"
    within 10 restored
    snapshot >after
    same restored "everything is as before" "$(cat before)" "$(cat after)" "threads, groups, masks"
    kill -9 $pids
}
# The guest is paused from outside for 30 s under a plan, as a hypervisor does that saves or moves a virtual machine: no CPU
# runs, and the clock goes on.
scenario_suspend() {
    rare_looks
    # Else the kernel takes the pause for a lockup.
    echo 60 >/proc/sys/kernel/watchdog_thresh
    echo 1 >/sys/module/rcupdate/parameters/rcu_cpu_stall_suppress
    mount -t resctrl resctrl /mnt/rdt
    pids=''
    for name in a b; do worker "prog-$name"; done
    usleep 200000
    snapshot >before
    manage "window_ms = 200
run_log = \"/lab/run.jsonl\"
$two_shares
$(rules prog-a prog-b)"
    within 20 two_own
    pass 2
    guard=$(guardian) odd= paused=
    for pause in 30 3 300; do
        since=$(cut -d. -f1 /proc/uptime)
        lab-program pause "$pause"
        paused="$paused $(($(cut -d. -f1 /proc/uptime) - since))"
        pass 3
        [ "$(guardian)" = "$guard" ] || odd="$odd another guardian after $pause s;"
        journal || odd="$odd no journal after $pause s;"
        two_own || odd="$odd $(own_groups) groups after $pause s;"
        alive || odd="$odd the daemon has ended after $pause s;"
    done
    end
    flagged=$(flagged_windows)
    [ "$flagged" = 3 ] || odd="$odd $flagged windows are flagged;"
    verdict=met
    [ -z "$odd" ] || verdict=FAIL
    report slept "the guest paused for 30, 3 and 300 s: the plan holds, no false watchdog, each is flagged" "$verdict" \
        "${odd:-$flagged windows flagged}" "$paused s" "three"
    within 10 restored
    same restored "everything is as before" "$(cat before)" "$(cat after)" "threads, groups, masks"
    kill -9 $pids
}

# ---- resctrl of others ----

# theirs: everything in resctrl that belongs to other tools.
theirs() { for group in /mnt/rdt/*/schemata; do case $group in */cachemate-*) ;; *) echo "$group" && cat "$group" "${group%/*}/tasks" "${group%/*}/cpus" "${group%/*}/mode" ;; esac; done; }
two_shares="[policy]
name = \"static-partition\"
parameters = { steps = [{ shares = [\"0-7\", \"8-15\"] }] }"
refusals() { status | awk -F '"' '/"refused": \[$/ { on = 1; next } on && /\]/ { exit } on && $2 != "" { print $2 }'; }
some_refusal() { refusals | grep -q .; }
two_own() { [ "$(own_groups)" = 2 ]; }

scenario_resctrl() {
    rare_looks
    mount -t resctrl resctrl /mnt/rdt
    pids=''
    for name in a b; do worker "prog-$name"; done
    worker other
    set -- $pids
    rules=$(rules prog-a prog-b)
    usleep 200000
    snapshot >before

    manage "window_ms = 200
$two_shares
$rules"
    within 20 two_own
    mkdir /mnt/rdt/db /mnt/rdt/mon_groups/watch
    echo "L3:0=f000;1=0fff" >/mnt/rdt/db/schemata
    echo "$3" >/mnt/rdt/db/tasks
    theirs >theirs.before
    pass 3
    same others-made "a group of another tool, made and filled while two shares are in force" "$(cat theirs.before)" "$(theirs)" "untouched"
    same others-ours "the shares meanwhile" 2 "$(own_groups)"
    # Another tool moves a managed program to its own group.
    echo "$1" >/mnt/rdt/db/tasks
    pass 3
    same others-took "a managed program that another tool moved into its group" "db" "$(sed -n 's/^res://p' "/proc/$1/cpu_resctrl_groups")"
    alive || report others-alive "the daemon" FAIL "$(tail -n 1 daemon.log)" - "lives"
    # Another tool removes one of cachemate's groups and one of its own, and changes a mask of cachemate's.
    mine=$(ls /mnt/rdt | grep '^cachemate-.*-1$')
    rmdir "/mnt/rdt/$mine"
    rmdir /mnt/rdt/mon_groups/watch
    pass 3
    same removed "a group of ours that another tool removed: the daemon lives, and the group of the other tool stays" "yes db" \
        "$(alive && echo yes) $(ls /mnt/rdt | grep '^db$')" "$(own_groups) groups of ours"
    end
    echo "$1" >/mnt/rdt/tasks
    rmdir /mnt/rdt/db
    within 10 restored
    snapshot >after
    same removed-restored "after that everything is as before" "$(cat before)" "$(cat after)" "threads, groups, masks"

    # All classes are in use.
    taken=0
    while mkdir "/mnt/rdt/tool-$taken" 2>/dev/null; do taken=$((taken + 1)); done
    theirs >theirs.before
    manage "window_ms = 200
$two_shares
$rules"
    within 20 windows_passed 4
    said=$(refusals | head -n 1)
    [ -n "$said" ] || said=$(cachemate doctor --quick 2>/dev/null | grep -i 'way masks' | head -n 1)
    case "$said" in *CLOSID* | *class*) verdict=met ;; *) verdict=FAIL ;; esac
    report full "all $taken classes are taken: refused, with the reason" "$verdict" "$said" "$(own_groups) groups of ours" "the kernel's or the survey's reason"
    same full-theirs "the groups of others" "$(cat theirs.before)" "$(theirs)" "untouched"
    end
    while [ "$taken" -gt 0 ]; do
        taken=$((taken - 1))
        rmdir "/mnt/rdt/tool-$taken"
    done
    within 10 restored
    snapshot >after
    same full-restored "after that everything is as before" "$(cat before)" "$(cat after)" "threads, groups, masks"

    # Bandwidth limits in MB/s.
    umount /mnt/rdt
    if ! mount -t resctrl -o mba_MBps resctrl /mnt/rdt; then
        report megabytes "resctrl with mba_MBps" FAIL "it cannot be mounted: $(dmesg | tail -n 1)" - -
    else
        mkdir /mnt/rdt/db
        echo "MB:0=1000;1=2000" >/mnt/rdt/db/schemata
        snapshot >before
        theirs >theirs.before
        manage "window_ms = 200
$two_shares
$rules"
        within 20 two_own
        pass 3
        ways_of=$(for group in /mnt/rdt/cachemate-*; do tr -d ' ' <"$group/schemata" | grep L3; done | tr '\n' ' ')
        same megabytes "mba_MBps is mounted: shares in ways hold" "L3:0=ff;1=ff L3:0=ff00;1=ff00 " "$ways_of"
        same megabytes-theirs "limits of another tool in MB/s" "$(cat theirs.before)" "$(theirs)" "untouched: $(grep MB /mnt/rdt/db/schemata)"
        end
        within 10 restored
        snapshot >after
        same megabytes-restored "after that everything is as before" "$(cat before)" "$(cat after)" "threads, groups, masks"
    fi
    kill -9 $pids
}

# ---- partitions of cpusets ----

partition_of() { cat "/sys/fs/cgroup/$1/cpuset.cpus.partition" 2>/dev/null; }
# cpuset_files: the values that the owner of the partition wrote.
cpuset_files() { cat /sys/fs/cgroup/part/cpuset.cpus /sys/fs/cgroup/part/cpuset.cpus.partition 2>/dev/null; }
# confined_to CPUS PID...: true if each program may run only on these CPUs, and its plan names no others.
allowed_of() { for one in "$@"; do grep Cpus_allowed_list "/proc/$one/status" | cut -f2; done; }

scenario_partitions() {
    rare_looks
    pids=''
    echo +cpuset >/sys/fs/cgroup/cgroup.subtree_control
    mkdir -p /sys/fs/cgroup/part /sys/fs/cgroup/plain
    for name in a b c d; do worker "prog-$name"; done
    set -- $pids
    for one in "$3" "$4"; do echo "$one" >/sys/fs/cgroup/part/cgroup.procs; done
    usleep 200000
    snapshot >before
    cpuset_policy='[policy]
name = "dio"
parameters = { window_cycles = 400_000_000 }'
    [ ! -e /lab/chaos ] || cpuset_policy='[policy]
name = "shake"'
    for kind in root isolated; do
        manage "window_ms = 200
[rollback]
enabled = false
$cpuset_policy
[[cpusets]]
cgroup = \"/part\"
cpus = \"2\"
$(rules 'prog-*')"
        # The owner creates the partition while a plan is in force, before cachemate could confine the group.
        echo 2-3 >/sys/fs/cgroup/part/cpuset.cpus
        echo "$kind" >/sys/fs/cgroup/part/cpuset.cpus.partition
        made=$(partition_of part)
        within 20 windows_passed 3
        odd=
        for round in 1 2 3; do
            pass 2 || odd="$odd no windows;"
            [ "$(cpuset_files | tr '\n' ' ')" = "2-3 $kind " ] || odd="$odd written: $(cpuset_files | tr '\n' ' ');"
            inside=$(allowed_of "$3" "$4" | not_in 2-3)
            outside=$(allowed_of "$1" "$2" | not_in 0-1)
            [ -z "$inside$outside" ] || odd="$odd beyond the boundary: $inside $outside;"
            all_run $pids || odd="$odd a program stands still;"
        done
        status >status.json
        said=$(refusals | grep -i partition | head -n 1)
        alive || odd="$odd the daemon has ended: $(tail -n 1 daemon.log);"
        verdict=met
        [ -z "$odd" ] && [ "$made" = "$kind" ] && [ -n "$said" ] || verdict=FAIL
        report "$kind" "a partition ($kind) of another tool is a boundary, and never written" "$verdict" "${said:-no refusal of the rule}" "${odd:-$made}" "2-3 $kind"
        # The owner dissolves the partition while the daemon acts.
        echo member >/sys/fs/cgroup/part/cpuset.cpus.partition
        echo 0-3 >/sys/fs/cgroup/part/cpuset.cpus
        pass 3
        alive || odd="$odd the daemon has ended;"
        end
        echo >/sys/fs/cgroup/part/cpuset.cpus
        within 10 restored
        snapshot >after
        same "$kind-restored" "dissolved by its owner, then the daemon ends: everything is as before" "$(cat before)" "$(cat after)" "threads"
    done
    kill -9 $pids
}

# ---- a full disk ----

# The state directory's disk is full: before the daemon starts, and while its changes are in force.
scenario_disk() {
    rare_looks
    mount -t resctrl resctrl /mnt/rdt
    pids=''
    for name in a b; do worker "prog-$name"; done
    usleep 200000
    mkdir -p state
    mount -t tmpfs -o size=64k,mode=700 state state
    snapshot >before
    cat /dev/zero >state/filler 2>/dev/null
    manage "window_ms = 200
$two_shares
$(rules prog-a prog-b)"
    within 10 windows_passed 4
    snapshot >during
    lives=$(alive && echo lives || tail -n 1 daemon.log)
    verdict=met
    cmp -s before during && alive || verdict=FAIL
    report full "the disk is full from the start: nothing is changed without a journal" "$verdict" "$(refusals | head -n 1) $lives" "$(own_groups) groups of ours" "as before"
    rm state/filler
    within 20 two_own
    same freed "once there is room, it acts" 2 "$(own_groups)"
    cat /dev/zero >state/filler 2>/dev/null
    pass 3
    kill -9 "$daemon"
    wait "$daemon" 2>/dev/null
    within 30 restored
    same killed "full again, and kill -9: everything is as before" "$(cat before)" "$(cat after)" "threads, groups, masks"
    kill -9 $pids
    umount state
}
