# If any process dies while everything changes at once, is everything restored? Sourced by init.

# sleeper NAME: starts a sleeping program of that name, and adds its pid to $pids.
sleeper() {
    printf '#!/bin/sh\nexec sleep 100000\n' >"/lab/bin/$1"
    chmod +x "/lab/bin/$1"
    "/lab/bin/$1" &
    pids="$pids $!"
}
# state PID: every setting of a thread that cachemate may change. In stat, after the name, field 17 is the nice value
# and field 39 is the policy.
state() {
    stat=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) || return 0
    printf '%s nice=%s policy=%s %s %s\n' "$1" "$(echo "$stat" | cut -d' ' -f17)" "$(echo "$stat" | cut -d' ' -f39)" \
        "$(grep Cpus_allowed_list "/proc/$1/status" | cut -f2)" "$(tr '\n' ' ' <"/proc/$1/cpu_resctrl_groups" 2>/dev/null)"
}
own_groups() { ls /mnt/rdt 2>/dev/null | grep -c '^cachemate-'; }
colors_of() { cat /dev/shm/cachemate-color/*/*/wanted 2>/dev/null; }
snapshot() {
    for pid in $pids; do state "$pid"; done
    echo "groups of ours: $(own_groups)"
    cat /mnt/rdt/schemata /mnt/rdt/db/schemata /mnt/rdt/db/tasks /sys/fs/cgroup/batch/cpuset.cpus.effective 2>/dev/null
    colors_of
}
guardian() { status | awk -F '[:,]' '/"guardian_pid"/ { print $2 + 0; exit }'; }
journal() { [ -e state/restore.journal ]; }
no_journal() { ! journal; }
acts() { journal && [ "$(guardian)" -gt 0 ]; }
some_groups() { [ "$(own_groups)" -gt 0 ]; }

# kinds_changed: kinds of settings that differ from the snapshot: each thread's nice value, class, affinity and group,
# and others.
kinds_changed() {
    snapshot >during
    awk '
        NR == FNR { before[FNR] = $0; next }
        $0 == before[FNR] { next }
        /nice=/ {
            split(before[FNR], was, " ")
            if ($2 != was[2]) seen["weights"] = 1
            if ($3 != was[3]) seen["idle turns"] = 1
            if ($4 != was[4]) seen["affinities"] = 1
            if ($5 != was[5]) seen["group members"] = 1
            next
        }
        /^groups of ours/ { seen["groups"] = 1; next }
        { seen[/:/ ? "schemata" : "colors"] = 1 }
        END { for (kind in seen) { printf "%s%s", gap, kind; gap = ", " } }
    ' before during
}
some_change() { changed=$(kinds_changed) && [ -n "$changed" ]; }

# oom_kills: processes of the doomed control group that the kernel has killed for want of memory.
oom_kills() { awk '$1 == "oom_kill" { print $2 }' "$doomed/memory.events"; }
out_of_memory() { [ "$(oom_kills)" -gt "$killed_before" ]; }

doomed=/sys/fs/cgroup/doomed
# death KIND MOMENT_US SEED: kills the daemon, the guardian, both, or their control group, so long after the first change;
# `memory` and `memory-group` instead let the group reach its limit of memory, with one or all of its processes to be killed.
# A line of deaths.tsv has the kind, `met` if everything is restored and otherwise the difference, and the kinds of changed
# settings at the kill.
death() {
    mkdir -p "$doomed"
    echo $$ >"$doomed/cgroup.procs" # the daemon and its guardian are born there
    manage "window_ms = 200
seed = $3
[rollback]
enabled = false
[policy]
name = \"shake\"
$rules"
    echo $$ >/sys/fs/cgroup/cgroup.procs
    within 30 acts
    within 20 some_groups
    guard=$(guardian)
    usleep "$2"
    within 5 some_change
    end_of_daemon=killed
    case $1 in
        daemon) kill -9 "$daemon" ;;
        guardian) kill -9 "$guard" ;;
        both) kill -9 "$guard" "$daemon" ;;
        group) echo 1 >"$doomed/cgroup.kill" ;;
        memory*)
            killed_before=$(oom_kills)
            case $1 in *-group) echo 1 ;; *) echo 0 ;; esac >"$doomed/memory.oom.group"
            echo $(($(cat "$doomed/memory.current") / 2)) >"$doomed/memory.max"
            within 10 out_of_memory || { end_of_daemon=survived && kill -9 "$daemon"; }
            ;;
    esac
    case $1 in
        guardian) kill -TERM "$daemon" ;;
        both | group | memory-group) cachemate --quiet restore --state-dir state >restore.log 2>&1 ;;
    esac
    wait "$daemon" 2>/dev/null
    within 30 no_journal
    within 5 restored
    case $1 in memory*) echo max >"$doomed/memory.max" ;; esac
    snapshot >after
    if [ -z "$changed" ]; then
        outcome="nothing was changed, so nothing could be restored"
    elif [ "$end_of_daemon" = survived ]; then
        outcome="the daemon survived the limit"
    elif cmp -s before after; then
        outcome=met
    else
        outcome=$(differences)
    fi
    printf '%s\t%s\t%s\n' "$1" "$outcome" "$changed" >>deaths.tsv
    echo "# death $1 after $2 us: $outcome ($changed)"
}
# report_deaths: a line for each kind of death, and the number of deaths at which each kind of setting was changed.
report_deaths() {
    for kind in $(cut -f1 deaths.tsv | sort -u); do
        grep "^$kind	" deaths.tsv >kind.tsv
        count=$(wc -l <kind.tsv)
        same "kill-$kind" "killed ($kind) while everything changes" "as before, $count of $count" \
            "as before, $(cut -f2 kind.tsv | grep -cx met) of $count$(cut -f2 kind.tsv | grep -vx met | head -n 1 | sed 's/^/: /')"
    done
    report moments "deaths at which each kind of setting was changed" note - "$(cut -f3 deaths.tsv | awk -F ', ' '
        { for (i = 1; i <= NF; i++) count[$i]++ }
        END { for (kind in count) { printf "%s%s %d", gap, kind, count[kind]; gap = ", " } }')" -
}
# differences: the first lines that differ from the snapshot (busybox's diff is a unified one).
differences() { diff before after | grep '^[-+][^-+]' | head -n 4 | tr '\n' ' '; }
restored() {
    snapshot >after
    cmp -s before after
}

# with_settings SCENARIO-BODY: runs it with programs of all kinds of settings, whose state is in `before`.
with_settings() {
    mount -t resctrl resctrl /mnt/rdt
    echo +memory >/sys/fs/cgroup/cgroup.subtree_control
    pids=''
    for name in a b c d; do sleeper "prog-$name"; done
    mkdir /mnt/rdt/db
    sleeper db
    set -- "$1" $pids
    echo "$6" >/mnt/rdt/db/tasks
    taskset -p 3 "$2" >/dev/null
    renice -n 5 -p "$3" >/dev/null
    ln -sf /bin/lab-program /lab/bin/held
    cachemate --quiet page-color run --colors 0-3 -- /lab/bin/held hold 1024 >colored.out 2>colored.err &
    within 40 is_colored || report colored "a colored program among them" note "$(tail -n 1 colored.err)" "no agent" -
    held=$(pidof held | cut -d' ' -f1)
    pids="$pids $held"
    rules=$(for one in $2 $3 $4 $5 $held; do printf '\n[[rules]]\npid = %s\n' "$one"; done)
    usleep 300000
    snapshot >before
    sed 's/^/# before: /' before
    rare_looks
    "$1"
    report_deaths
    same others "another tool's group and its member" "$6" "$(cat /mnt/rdt/db/tasks)"
}
is_colored() { colors_of | grep -q . && pidof held >/dev/null; }

# Kills at moments drawn by a seed; /lab/deaths has their number and the seed.
scenario_deaths() { with_settings kill_often; }
kill_often() {
    read -r count seed </lab/deaths
    awk -v count="$count" -v seed="$seed" 'BEGIN {
        split("daemon guardian both group", kinds, " ")
        state = seed % 2147483647 + 1
        for (i = 0; i < count; i++) {
            state = state * 16807 % 2147483647 # Park and Miller
            print kinds[i % 4 + 1], state % 900000, state
        }
    }' >moments
    while read -r kind moment_us moment_seed <&3; do death "$kind" "$moment_us" "$moment_seed"; done 3<moments
}

# The control group of daemon and guardian reaches its limit of memory while everything changes.
scenario_memory() { with_settings run_out_of_memory; }
run_out_of_memory() {
    death memory 300000 1
    death memory-group 500000 2
}
