# The policy `auto` compared with the best single mechanism, applied manually in the same guest; sourced by init. Each
# scenario measures the programs' rates as the kernel leaves them, then with the mechanism applied manually and, after
# restoring everything, under `auto`.

# Guest seconds that auto gets before its rates are measured: enough for a survey and some trials.
auto_seconds=12

# gain BEFORE... / AFTER...: mean over programs of the work after divided by the work before, minus one.
gain() { echo "$@" | awk -F ' / ' '{ n = split($1, a, " "); split($2, b, " "); for (i = 1; i <= n; i++) s += b[i] / a[i]; printf "%.3f", s / n - 1 }'; }

# under_auto PID...: rates of these programs under the policy; its last reason is in $reason.
under_auto() {
    manage "window_ms = 100
[policy]
name = \"auto\"
parameters = { window_ns = 100_000_000 }
$(rules 'victim-*' 'stream-*' 'quiet-*')"
    usleep $((auto_seconds * 1000000))
    lab-program mark 2
    product=$(rates 0.6 "$@")
    lab-program mark 3
    status >status.json
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    for one in "$@"; do cachemate explain --socket /run/lab/s.sock "$one"; done | sed 's/^/# /'
    reason=$(awk -F '"' '$2 == "reason" && $4 != "" { print $4; exit }' status.json)
    end
}
# judged WHAT: compares the gain under auto with the best manual one.
judged() {
    found=$(gain $default / $product)
    best=$(gain $default / $byhand)
    report by-hand "$1, by hand: mean gain of the programs" note - "$best" -
    holds gain "the same under auto after $auto_seconds s" "${reason:-no word}" "$found" "90 % of the gain by hand" \
        "$found >= 0.9 * $best" "$(echo "$best" | tr -d -)" "$(echo "$found" | tr -d -)"
}

scenario_auto() { "auto_${scenario#auto-}"; }

# A victim and a stream, each on its own CPU: way masks help.
auto_ways() {
    mount -t resctrl resctrl /mnt/rdt
    busy chase victim-1 0 3072; v1=$pid
    busy stream stream-1 1 12288; s1=$pid
    usleep 300000
    default=$(rates 0.3 "$v1" "$s1")
    mkdir /mnt/rdt/v /mnt/rdt/s
    echo "L3:0=fff0" >/mnt/rdt/v/schemata
    echo "L3:0=000f" >/mnt/rdt/s/schemata
    echo "$v1" >/mnt/rdt/v/tasks
    echo "$s1" >/mnt/rdt/s/tasks
    usleep 50000
    byhand=$(rates 0.2 "$v1" "$s1")
    rmdir /mnt/rdt/v /mnt/rdt/s
    under_auto "$v1" "$s1"
    judged "12 of 16 ways for the victim"
    kill -9 "$v1" "$s1"
}

# A victim and a stream on each of two L3s: both victims should share one L3.
auto_placement() {
    busy chase victim-1 0 3072; v1=$pid
    busy stream stream-1 1 12288; s1=$pid
    busy chase victim-2 2 3072; v2=$pid
    busy stream stream-2 3 12288; s2=$pid
    usleep 300000
    default=$(rates 0.2 "$v1" "$v2" "$s1" "$s2")
    taskset -p 2 "$v2" >/dev/null
    taskset -p 4 "$s1" >/dev/null
    usleep 50000
    byhand=$(rates 0.2 "$v1" "$v2" "$s1" "$s2")
    taskset -p 4 "$v2" >/dev/null
    taskset -p 2 "$s1" >/dev/null
    usleep 20000
    for one in "$v1" "$v2" "$s1" "$s2"; do taskset -p f "$one" >/dev/null; done
    under_auto "$v1" "$v2" "$s1" "$s2"
    judged "victims on one L3, streams on the other"
    kill -9 "$v1" "$v2" "$s1" "$s2"
}

# Two victims and two streams on two CPUs of one L3: gangs help.
auto_gangs() {
    busy chase victim-1 -1 3072; v1=$pid
    busy stream stream-1 -1 12288; s1=$pid
    busy chase victim-2 -1 3072; v2=$pid
    busy stream stream-2 -1 12288; s2=$pid
    usleep 300000
    default=$(rates 0.4 "$v1" "$v2" "$s1" "$s2")
    lab-program turns stop 20 0.8 "$v1,$v2" "$s1,$s2" &
    turns=$!
    usleep 100000
    byhand=$(rates 0.6 "$v1" "$v2" "$s1" "$s2")
    wait "$turns"
    under_auto "$v1" "$v2" "$s1" "$s2"
    judged "the victims' turn, then the streams'"
    kill -9 "$v1" "$v2" "$s1" "$s2"
}

# A victim and a stream, each on its own CPU, on a machine without way masks: page colors help. Frames stay in place
# when more colors are allowed again, so new programs are started for the run under auto.
auto_colors() {
    cachemate --quiet page-color discover --memory 256M --timeout 30 | sed 's/^/# /'
    colored 0-3 chase victim-1 0 2048; v1=$pid
    colored 4-7 stream stream-1 1 12288; s1=$pid
    # Wait until all frames have been sorted by color.
    usleep 2000000
    byhand=$(rates 0.3 "$v1" "$s1")
    kill -9 "$v1" "$s1"
    usleep 100000
    colored 0-7 chase victim-2 0 2048; v1=$pid
    colored 0-7 stream stream-2 1 12288; s1=$pid
    usleep 500000
    default=$(rates 0.3 "$v1" "$s1")
    under_auto "$v1" "$s1"
    judged "4 of 8 colors for each"
    kill -9 "$v1" "$s1"
}

# Two programs that fit into their L2s: no policy can gain anything, and none may lose anything.
auto_nothing() {
    busy chase quiet-1 0 128; q1=$pid
    busy chase quiet-2 1 192; q2=$pid
    usleep 200000
    default=$(rates 0.5 "$q1" "$q2")
    under_auto "$q1" "$q2"
    found=$(gain $default / $product)
    holds loss "two programs in their L2s: mean gain under auto after $auto_seconds s" "${reason:-no word}" "$found" "at least -0.01" \
        "$found >= -0.01" "$(echo "$found" | tr -d -)"
    kill -9 "$q1" "$q2"
}
