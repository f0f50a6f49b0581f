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

# death ROUND: kills the daemon, the guardian, both, or the control group that contains both.
death() {
    manage "window_ms = 200
seed = $2
[rollback]
enabled = false
[policy]
name = \"shake\"
$rules"
    mkdir -p /sys/fs/cgroup/doomed
    echo "$daemon" >/sys/fs/cgroup/doomed/cgroup.procs
    within 30 acts
    within 20 some_groups
    guard=$(guardian)
    [ -z "$guard" ] || echo "$guard" >/sys/fs/cgroup/doomed/cgroup.procs
    usleep $((($2 * 377001) % 900000))
    within 5 some_change
    case $1 in
        daemon) kill -9 "$daemon" ;;
        guardian) kill -9 "$guard" ;;
        both) kill -9 "$guard" "$daemon" ;;
        group) echo 1 >/sys/fs/cgroup/doomed/cgroup.kill ;;
    esac
    case $1 in
        guardian) kill -TERM "$daemon" ;;
        both | group) cachemate --quiet restore --state-dir state >restore.log 2>&1 ;;
    esac
    wait "$daemon" 2>/dev/null
    within 30 no_journal
    within 5 restored
    snapshot >after
    if [ -z "$changed" ]; then
        report "kill-$1" "kill -9 ($1) while everything changes" FAIL "changes" "nothing was changed, so nothing could be restored" equal
    elif cmp -s before after; then
        report "kill-$1" "kill -9 ($1) while everything changes" met "as before" "as before" "equal ($changed)"
    else
        report "kill-$1" "kill -9 ($1) while everything changes" FAIL "as before" "$(differences)" equal
    fi
}
# differences: the first lines that differ from the snapshot (busybox's diff is a unified one).
differences() { diff before after | grep '^[-+][^-+]' | head -n 4 | tr '\n' ' '; }
restored() {
    snapshot >after
    cmp -s before after
}

scenario_deaths() {
    mount -t resctrl resctrl /mnt/rdt
    pids=''
    for name in a b c d; do sleeper "prog-$name"; done
    mkdir /mnt/rdt/db
    sleeper db
    set -- $pids
    echo "$5" >/mnt/rdt/db/tasks
    taskset -p 3 "$1" >/dev/null
    renice -n 5 -p "$2" >/dev/null
    ln -sf /bin/lab-program /lab/bin/held
    cachemate --quiet page-color run --colors 0-3 -- /lab/bin/held hold 1024 >colored.out 2>colored.err &
    within 40 colored || report colored "a colored program among them" note "$(tail -n 1 colored.err)" "no agent" -
    held=$(pidof held | cut -d' ' -f1)
    pids="$pids $held"
    rules=$(for one in $1 $2 $3 $4 $held; do printf '\n[[rules]]\npid = %s\n' "$one"; done)
    usleep 300000
    snapshot >before
    sed 's/^/# before: /' before
    seed=1
    for round in daemon guardian both group; do
        death "$round" "$seed"
        seed=$((seed + 1))
    done
    same others "another tool's group and its member" "$5" "$(cat /mnt/rdt/db/tasks)"
}
colored() { colors_of | grep -q . && pidof held >/dev/null; }
