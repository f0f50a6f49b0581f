#!/bin/busybox sh
# Process 1 of the lab's guest. Runs the part that the kernel's command line names, and writes one line per check to
# the console: LAB <tab> part <tab> check <tab> ok, FAIL or note <tab> detail. Values are read from the kernel's own
# files, never from cachemate's output, unless that output is what is checked.
/bin/busybox --install -s /bin
export PATH=/bin HOME=/root
mkdir -p /proc /sys /dev /tmp /root /run /mnt/rdt /lab/state /lab/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
part=$(sed 's/.*lab=\([a-z-]*\).*/\1/' /proc/cmdline)
cd /lab || poweroff -f

report() { printf 'LAB\t%s\t%s\t%s\t%s\n' "$part" "$1" "$2" "$(echo "$3" | tr '\n\t' '  ' | sed 's/ *$//')"; }
# same CHECK EXPECTED FOUND [WORDS]: compares two values and reports the check.
same() {
    if [ "$2" = "$3" ]; then report "$1" ok "${4:-$3}"; else report "$1" FAIL "found '$3', expected '$2'"; fi
}
# within SECONDS COMMAND...: repeats the command until it succeeds. On a loaded host, a guest gets little work done in
# a second.
within() {
    deadline=$(($(cut -d. -f1 /proc/uptime) + $1))
    shift
    until "$@"; do
        [ "$(cut -d. -f1 /proc/uptime)" -lt "$deadline" ] || return 1
        usleep 100000
    done
}

# The CPUs of each last-level cache according to sysfs, such as "0-3 4-7".
llcs() { cat /sys/devices/system/cpu/cpu*/cache/index3/shared_cpu_list | sort -un -t- | tr '\n' ' ' | sed 's/ $//'; }
# The CPUs of each last-level cache according to cachemate.
reported_llcs() {
    cachemate topology --json | awk -F '"' '/"cpus": "/ { cpus = $4 } /"last_level": true/ { printf "%s%s", gap, cpus; gap = " " }'
}
# capability NAME: the report of doctor on one facility for measuring or acting.
capability() { awk -v name="$1" 'index($0, "\"" name "\"") { on = 1 } on && /"state"/ { w = /"usable"/ } on && /"detail"/ { sub(/.*"detail": "/, ""); sub(/",?$/, ""); print (w ? "yes: " : "no: ") $0; exit }' doctor.json; }

topology() {
    same "last-level caches" "$1" "$(llcs)"
    same "topology told by cachemate" "$(llcs)" "$(reported_llcs)"
}
doctor() {
    cachemate doctor --json "$@" >doctor.json 2>doctor.err || report doctor FAIL "$(tail -n 1 doctor.err)"
    report "counters" note "$(capability 'counters per task')"
    report "way masks" note "$(capability 'way masks (resctrl)')"
}

# program NAME: starts a small program of that name in the background, and adds its pid to $pids.
program() {
    printf '#!/bin/sh\n%s\n' "$2" >"/lab/bin/$1"
    chmod +x "/lab/bin/$1"
    "/lab/bin/$1" &
    pids="$pids $!"
}
# state PID: every setting of a thread that cachemate may change.
state() {
    stat=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) || return 0
    # Fields of stat after the name: 17 is the nice value, 39 is the policy.
    printf '%s nice=%s policy=%s %s %s\n' "$1" "$(echo "$stat" | cut -d' ' -f17)" "$(echo "$stat" | cut -d' ' -f39)" \
        "$(grep Cpus_allowed_list "/proc/$1/status" | cut -f2)" "$(tr '\n' ' ' <"/proc/$1/cpu_resctrl_groups" 2>/dev/null)"
}
own_groups() { ls /mnt/rdt 2>/dev/null | grep -c '^cachemate-'; }
# Everything that may change, together: threads, groups, masks, another tool's group.
snapshot() {
    for pid in $pids; do state "$pid"; done
    echo "groups of ours: $(own_groups)"
    cat /mnt/rdt/schemata /mnt/rdt/db/schemata /mnt/rdt/db/tasks /sys/fs/cgroup/batch/cpuset.cpus.effective 2>/dev/null
}

# start POLICY-LINES: starts the daemon with this configuration; its pid is in $daemon.
start() {
    printf 'mode = "act"\nwindow_ms = %s\nprofiles = ["/lab/profiles"]\n[rollback]\nenabled = false\n[policy]\n%s\n%s\n' \
        "${window:-200}" "$1" "$rules" >c.toml
    cachemate --quiet manage --config c.toml --state-dir state --socket s.sock >daemon.log 2>&1 &
    daemon=$!
}
status() { cachemate status --json --socket s.sock 2>/dev/null; }
guardian() { status | awk -F '[:,]' '/"guardian_pid"/ { print $2 + 0; exit }'; }
journal() { [ -e state/restore.journal ]; }
no_journal() { ! journal; }
acts() { journal && [ "$(guardian)" -gt 0 ]; }
gone() { ! kill -0 "$1" 2>/dev/null; }
end() { kill -TERM "$daemon"; wait "$daemon"; }
# restored_by ROUND: after both processes are killed, only `restore` or the next start can restore; otherwise the
# guardian does.
restored_by() {
    case $1 in
        both) cachemate --quiet restore --state-dir state >restore.log 2>&1 || report restore FAIL "$(tail -n 1 restore.log)" ;;
        next)
            cachemate --quiet manage --observe-only --config c.toml --state-dir state --socket s.sock >next.log 2>&1 &
            next=$!
            within 120 no_journal
            within 60 [ -S s.sock ]
            kill -TERM "$next"
            wait "$next"
            ;;
    esac
    within 120 no_journal
}

four() {
    topology "0-1 2-3 4-5 6-7"
    mount -t resctrl resctrl /mnt/rdt
    doctor --quick
    same "one class of service" "1" "$(cat /mnt/rdt/info/L3/num_closids)"
    said=$(mkdir /mnt/rdt/x 2>&1)
    case $said in *"No space"*) said=ENOSPC ;; esac
    same "mkdir on the real resctrl" "ENOSPC, Out of CLOSIDs" "$said, $(cat /mnt/rdt/info/last_cmd_status)"
    same "cachemate offers no ways there" "no: /mnt/rdt: 1 classes of service, others hold 0, the root group has one" \
        "$(capability 'way masks (resctrl)')"
    cpusets
}

# placed: the CPUs on which each program may run, and the CPU on which it is, according to the kernel.
placed() {
    for pid in $pids; do
        printf '%s %s %s\n' "$(sed 's/.*(\(.*\)).*/\1/' "/proc/$pid/stat")" \
            "$(grep Cpus_allowed_list "/proc/$pid/status" | cut -f2)" "$(sed 's/.*) //' "/proc/$pid/stat" | cut -d' ' -f37)"
    done
}
one_llc_each() { [ "$(placed | awk '$2 == "0-3" || $2 == "4-7"' | wc -l)" = 8 ]; }
on_their_cpus() { placed | awk '{ split($2, range, "-"); if ($3 < range[1] || $3 > range[2]) bad = 1 } END { exit bad }'; }

two() {
    topology "0-3 4-7"
    doctor
    report "probe from outside" note "$(capability 'intensity from outside (prime, wait, reload)')"
    pids=''
    rules=''
    # The heaviest programs come first, according to their recordings.
    for name in stream stencil link-parser cc1 perl povray gawk gzip; do
        # The programs are busy and idle alternately, because the emulator has only two CPUs for eight.
        program "$name" 'while :; do i=0; while [ $i -lt 2000 ]; do i=$((i + 1)); done; usleep 50000; done'
        rules="$rules
[[rules]]
command = \"$name\""
    done
    sleep 1
    snapshot >before
    start 'name = "dio"
parameters = { window_cycles = 500_000_000 }'
    if within 120 one_llc_each; then
        report "dio sets affinities on 8 CPUs" ok "$(placed | cut -d' ' -f1,2 | tr '\n' ';')"
    else
        report "dio sets affinities on 8 CPUs" FAIL "$(placed | tr '\n' ';') $(tail -n 2 daemon.log)"
    fi
    same "four programs on each cache" "4 4" "$(placed | awk '{ n[$2]++ } END { print n["0-3"] + 0, n["4-7"] + 0 }')"
    same "the two that miss most are apart" "2" "$(placed | grep -E '^(stream|stencil) ' | cut -d' ' -f2 | sort -u | wc -l)"
    if within 60 on_their_cpus; then
        report "programs run where they may" ok "$(placed | cut -d' ' -f1,3 | tr '\n' ';')"
    else
        report "programs run where they may" FAIL "$(placed | tr '\n' ';')"
    fi
    report "dio's rates" note "recorded earlier (recordings/*.cmt, misses per 1000 instructions at 16 MiB); counters here: $(capability 'counters per task')"
    within 60 acts
    kill -9 "$daemon"
    wait "$daemon" 2>/dev/null
    within 90 no_journal
    snapshot >after
    same "kill -9 of the daemon: affinities as before" "$(cat before)" "$(cat after)" "8 programs"
}

mask_of() { grep Cpus_allowed_list "/proc/$1/status" | cut -f2; }
child_confined() { [ "$(mask_of "$(cut -d' ' -f1 "/proc/$1/task/$1/children")" 2>/dev/null)" = 4-5 ]; }
confined() { [ "$(cat /sys/fs/cgroup/batch/cpuset.cpus.effective)" = 4-5 ] && [ "$(mask_of "$1")" = 4-5 ]; }

# A cgroup v2 group in which one program has a narrower mask than the group.
cpusets() {
    group=/sys/fs/cgroup/batch
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    echo +cpuset >/sys/fs/cgroup/cgroup.subtree_control
    mkdir "$group"
    pids=''
    program batch-a 'while :; do sleep 1; done'
    program batch-b 'exec sleep 300000'
    set -- $pids
    for pid in $pids; do echo "$pid" >"$group/cgroup.procs"; done
    taskset -p 12 "$2" >/dev/null
    rules='[[cpusets]]
cgroup = "/batch"
cpus = "4-5"'
    snapshot >before
    for round in daemon both next; do
        start 'name = "default"'
        if within 90 confined "$1" && within 30 child_confined "$1"; then
            same "v2 cpuset: a group is confined, what is born there too" "4-5 4" "$(cat "$group/cpuset.cpus") $(mask_of "$2")"
        else
            report "v2 cpuset: a group is confined" FAIL "$(cat "$group/cpuset.cpus.effective") $(mask_of "$1") $(tail -n 2 daemon.log)"
        fi
        within 60 acts
        [ "$round" = daemon ] || kill -9 "$(guardian)"
        kill -9 "$daemon"
        wait "$daemon" 2>/dev/null
        restored_by "$round"
        snapshot >after
        same "v2 cpuset: kill -9 ($round): all is as before" "$(cat before)" "$(cat after)" "group and masks"
    done
}

# in_group N: the kernel's name of cachemate's group with that number.
in_group() { ls /mnt/rdt | grep "^cachemate-.*-$1\$"; }
of_pid() { sed -n 's/^res://p' "/proc/$1/cpu_resctrl_groups"; }
# all_moved PID...: true if none of the programs is in the root group.
all_moved() { for pid in "$@"; do [ "$(of_pid "$pid")" != / ] || return 1; done; }
some_groups() { [ "$(own_groups)" -gt 0 ]; }
refused() { status | grep -q '"refused_plan": "'; }
two_groups() { [ "$(own_groups)" = 2 ]; }

ways() {
    mount -t resctrl resctrl /mnt/rdt
    doctor --quick
    same "cachemate finds resctrl where it is mounted" "yes: at /mnt/rdt: 2 L3 caches of 3 ways, 1 or more in one piece a group, 7 groups" \
        "$(capability 'way masks (resctrl)')"
    pids=''
    for name in a b c; do program "prog-$name" 'exec sleep 100000'; done
    mkdir /mnt/rdt/db
    program db 'exec sleep 200000'
    db=$!
    echo "$db" >/mnt/rdt/db/tasks
    set -- $pids
    taskset -p 3 "$1" >/dev/null
    renice -n 5 -p "$2" >/dev/null
    rules=$(for pid in $pids; do printf '\n[[rules]]\npid = %s\n' "$pid"; done)
    sleep 1
    snapshot >before

    start 'name = "static-partition"
parameters = { steps = [{ shares = ["0", "1-2"] }] }'
    within 90 all_moved "$1" "$2"
    same "masks of the first group, by the kernel" "L3:0=1;1=1" "$(tr -d ' ' <"/mnt/rdt/$(in_group 0)/schemata")"
    same "masks of the second group" "L3:0=6;1=6" "$(tr -d ' ' <"/mnt/rdt/$(in_group 1)/schemata")"
    same "threads are in their groups" "$(in_group 0) $(in_group 1) /" "$(of_pid "$1") $(of_pid "$2") $(of_pid "$3")"
    same "what status says holds" "0 1-2 0 1-2" "$(status | awk -F '"' '/"ways": "/ { printf "%s%s", gap, $4; gap = " " }')"
    same "another tool's group" "db" "$(of_pid "$db")"
    end
    snapshot >after
    same "after SIGTERM all is as before" "$(cat before)" "$(cat after)" "threads, groups, masks"

    # Other tools take classes while the plan grows, so that two classes remain where the plan needs three.
    start 'name = "static-partition"
parameters = { steps = [{ shares = [] }, { from_ns = 8000000000, shares = ["0", "1", "2"] }] }'
    within 60 [ -S s.sock ]
    for other in 1 2 3 4; do mkdir "/mnt/rdt/other-$other"; done
    within 90 all_moved "$1" "$2"
    sleep 1
    same "out of classes: as many groups as there are" "2" "$(own_groups)"
    same "the kernel's own words" "1" "$(status | grep -c 'No space left on device.*Out of CLOSIDs' | sed 's/[1-9][0-9]*/1/')"
    same "the third is unrestricted" "/" "$(of_pid "$3")"
    end
    for other in 1 2 3 4; do rmdir "/mnt/rdt/other-$other"; done
    snapshot >after
    same "after that all is as before" "$(cat before)" "$(cat after)" "threads, groups, masks"

    # The hardware does not support this mask: the plan must be refused, and nothing else may change.
    start 'name = "static-partition"
parameters = { steps = [{ shares = ["0,2"] }] }'
    within 90 refused
    same "a mask with a gap: the plan is refused, the daemon lives" "not contiguous / 0" \
        "$(status | grep -o 'not contiguous' | head -n 1) $(of_pid "$1") $(own_groups)"
    end

    # Processes are killed while affinities, weights, turns and masks change five times a second.
    window=200
    for round in daemon both guardian next both; do
        start 'name = "shake"'
        within 120 acts
        within 60 some_groups
        moment_us=$(((moment_us + 377001) % 900000))
        usleep $((100000 + moment_us))
        guard=$(guardian)
        snapshot >during
        cmp -s before during && report "changes under management" FAIL "nothing was changed, so nothing could be restored"
        [ "$round" = daemon ] || kill -9 "$guard"
        if [ "$round" = guardian ]; then
            end
        else
            kill -9 "$daemon"
            wait "$daemon" 2>/dev/null
        fi
        restored_by "$round"
        snapshot >after
        same "kill -9 ($round): all is as before" "$(cat before)" "$(cat after)" "threads, groups, masks"
    done

    # Even the journal is lost: cachemate's groups are orphans, and `restore` removes them.
    start 'name = "static-partition"
parameters = { steps = [{ shares = ["0", "1-2"] }] }'
    within 90 all_moved "$1" "$2"
    kill -9 "$(guardian)" "$daemon"
    wait "$daemon" 2>/dev/null
    rm -rf state
    mkdir state
    same "without guardian and journal groups are left" "2" "$(own_groups)"
    cachemate restore --state-dir state --json >restore.json
    same "restore sweeps orphans" "0 2" "$(own_groups) $(grep -c 'orphan of an earlier run, removed' restore.json)"
    same "another tool's group is still there" "db" "$(of_pid "$db")"
}

moment_us=0
case $part in
    two) two ;;
    four) four ;;
    ways) ways ;;
    *) report "part" FAIL "no such part" ;;
esac
report end ok "$(cut -d' ' -f1 /proc/uptime) s in the guest"
poweroff -f
