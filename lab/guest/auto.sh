# The policy `auto` alone, against the best single mechanism by hand in the same guest; sourced by init.
# Each scenario: rates as the kernel leaves the programs, rates with the mechanism applied manually, then, after restoring
# everything, rates under `auto`.

# What is given to auto until its rates are taken, in guest seconds: a survey and some trials.
auto_seconds=12

# gain BEFORE... / AFTER...: mean of each program's work against before, less one
gain() { echo "$@" | awk -F ' / ' '{ n = split($1, a, " "); split($2, b, " "); for (i = 1; i <= n; i++) s += b[i] / a[i]; printf "%.3f", s / n - 1 }'; }

# under_auto PID...: rates of these under the policy; its last reason in $reason
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
# judged WHAT: the gain under auto against the best by hand
judged() {
    found=$(gain $default / $product)
    best=$(gain $default / $byhand)
    report by-hand "$1, by hand: mean gain of the programs" note - "$best" -
    holds gain "the same under auto after $auto_seconds s" "${reason:-no word}" "$found" "90 % of the gain by hand" \
        "$found >= 0.9 * $best" "$(echo "$best" | tr -d -)" "$(echo "$found" | tr -d -)"
}

scenario_auto() { "auto_${scenario#auto-}"; }

# A victim and a stream on a CPU each: way masks.
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

# A victim and a stream on each of two L3s: the victims belong together.
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

# Two victims and two streams on two CPUs of one L3: gangs.
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

# A victim and a stream on a CPU each, where there are no ways: page colors. Frames stay where they are when more colors are
# allowed again, so the programs are other ones by hand and under auto.
auto_colors() {
    cachemate --quiet page-color discover --memory 256M --timeout 30 | sed 's/^/# /'
    colored 0-3 chase victim-1 0 2048; v1=$pid
    colored 4-7 stream stream-1 1 12288; s1=$pid
    # Until all frames are sorted.
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

# Two programs that live in their L2s: nothing is to be gained, and nothing may be lost.
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
