# If any process dies while everything changes at once, is everything restored? Sourced by init.

# sleeper NAME: starts a sleeping program of that name, and adds its pid to $pids.
sleeper() {
    printf '#!/bin/sh\nexec sleep 100000\n' >"/lab/bin/$1"
    chmod +x "/lab/bin/$1"
    "/lab/bin/$1" &
    pids="$pids $!"
}
own_groups() { set -- /mnt/rdt/cachemate-*; [ -d "$1" ] && echo $# || echo 0; }
colors_of() { cat /dev/shm/cachemate-color/*/*/wanted 2>/dev/null; }
# snapshot: every setting that cachemate may change. In a thread's stat, after the name, field 17 is the nice value and
# field 39 is the policy. Ways are the masks of our groups that differ from those of the root group.
snapshot() {
    awk -v pids="$pids" 'BEGIN {
        count = split(pids, pid, " ")
        for (i = 1; i <= count; i++) {
            files = "/proc/" pid[i]
            if ((getline stat < (files "/stat")) <= 0) continue
            sub(/.*\) /, "", stat)
            split(stat, value, " ")
            cpus = groups = ""
            while ((getline line < (files "/status")) > 0) if (sub(/^Cpus_allowed_list:[ \t]*/, "", line)) cpus = line
            while ((getline line < (files "/cpu_resctrl_groups")) > 0) groups = groups line " "
            print pid[i] " nice=" value[17] " policy=" value[39] " " cpus " " groups
        }
    }'
    echo "groups of ours: $(own_groups)"
    echo "ways of ours: $(cat /mnt/rdt/cachemate-*/schemata 2>/dev/null | grep -vxF "$(cat /mnt/rdt/schemata 2>/dev/null)" | tr -d '\n ')"
    echo "cpuset: $(cat /sys/fs/cgroup/batch/cpuset.cpus.effective 2>/dev/null)"
    cat /mnt/rdt/schemata /mnt/rdt/db/schemata /mnt/rdt/db/tasks 2>/dev/null
    echo "colors: $(colors_of | tr '\n' ' ')"
}
guardian() { status | awk -F '[:,]' '/"guardian_pid"/ { print $2 + 0; exit }'; }
journal() { [ -e state/restore.journal ]; }
no_journal() { ! journal; }
acts() { journal && [ "$(guardian)" -gt 0 ]; }
some_groups() { [ "$(own_groups)" -gt 0 ]; }

# kinds_changed: kinds of settings that differ from the snapshot.
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
        { kind = $1; sub(/:/, "", kind); seen[kind ~ /^(groups|ways|cpuset|colors)$/ ? kind : "others"] = 1 }
        END { for (kind in seen) { printf "%s%s", gap, kind; gap = ", " } }
    ' before during
}
some_change() { changed=$(kinds_changed) && [ -n "$changed" ]; }
# all_changed: settings of each of $mechanisms differ from the snapshot.
all_changed() {
    some_change
    for kind in $mechanisms; do
        case $changed in *$kind*) ;; *) return 1 ;; esac
    done
}

# oom_kills: processes of the doomed control group that the kernel has killed for want of memory.
oom_kills() { awk '$1 == "oom_kill" { print $2 }' "$doomed/memory.events"; }
out_of_memory() { [ "$(oom_kills)" -gt "$killed_before" ]; }

doomed=/sys/fs/cgroup/doomed
# death KIND MOMENT_US SEED MECHANISM: kills the daemon, the guardian, both, or their control group, so long after the first
# change and in the next moment in which settings of that mechanism, affinities, weights and a cpuset are changed, for which
# it waits for at most five seconds. `memory` and `memory-group` instead let the group reach its limit of memory, with one or
# all of its processes to be killed. A line of deaths.tsv has the kind, `met` if everything is restored and otherwise the
# difference, and the kinds of changed settings at the kill.
death() {
    mkdir -p "$doomed"
    echo $$ >"$doomed/cgroup.procs" # the daemon and its guardian are born there
    manage "window_ms = 100
seed = $3
[rollback]
enabled = false
[policy]
name = \"shake\"
$rules
[[cpusets]]
cgroup = \"/batch\"
cpus = \"2-3\""
    echo $$ >/sys/fs/cgroup/cgroup.procs
    within 30 journal
    within 20 some_groups
    within 10 acts # a query runs a large program, so it comes last
    guard=$(guardian)
    usleep "$2"
    mechanisms="affinities weights cpuset $4"
    within 5 all_changed
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
    echo "# death $1 after $2 us: $outcome ($changed), $(seconds_up) s"
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
    echo +memory +cpuset >/sys/fs/cgroup/cgroup.subtree_control
    mkdir -p /sys/fs/cgroup/batch
    pids=''
    for name in a b c d; do sleeper "prog-$name"; done
    mkdir /mnt/rdt/db
    sleeper db
    sleeper batch
    set -- "$1" $pids
    echo "$6" >/mnt/rdt/db/tasks
    echo "$7" >/sys/fs/cgroup/batch/cgroup.procs
    taskset -p 3 "$2" >/dev/null
    renice -n 5 -p "$3" >/dev/null
    ln -sf /bin/lab-program /lab/bin/held
    # Both halves of the colors, which the policy draws, differ from these.
    cachemate --quiet page-color run --colors 2-5 -- /lab/bin/held hold 1024 >colored.out 2>colored.err &
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
        split("ways colors idle?turns", mechanisms, " ")
        state = seed % 2147483647 + 1
        for (i = 0; i < count; i++) {
            state = state * 16807 % 2147483647 # Park and Miller
            print kinds[i % 4 + 1], state % 300000, state, mechanisms[int(i / 4) % 3 + 1]
        }
    }' >moments
    while read -r kind moment_us moment_seed mechanism <&3; do death "$kind" "$moment_us" "$moment_seed" "$mechanism"; done 3<moments
}

# The control group of daemon and guardian reaches its limit of memory while everything changes.
scenario_memory() { with_settings run_out_of_memory; }
run_out_of_memory() {
    death memory 300000 1 ways
    death memory-group 500000 2 colors
}
