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

# level_of PID: the percent of memory bandwidth of the program's resctrl group, of one of ours only.
level_of() {
    group=$(sed -n 's/^res:\(cachemate-.*\)/\1/p' "/proc/$1/cpu_resctrl_groups")
    [ -n "$group" ] && sed -n 's/^ *MB:0= *\([0-9]*\).*/\1/p' "/mnt/rdt/$group/schemata"
}
is_limited() { level=$(level_of "$1") && [ "$level" -lt 100 ]; }
promise_state() { awk -F '"' '/^  "promises": \[$/ { on = 1 } /^  \]/ { on = 0 } on && $2 == "state" { print $4; exit }' status.json; }

# A service whose lines fit into no cache and a stream behind the same slow memory: only less bandwidth for the stream keeps
# the service's promise. It is four fifths of its rate alone.
auto_bandwidth() {
    mount -t resctrl resctrl /mnt/rdt
    busy chase victim-1 0 12288; v1=$pid
    usleep 100000
    alone=$(rates 0.3 "$v1")
    busy stream stream-1 1 16384; s1=$pid
    usleep 100000
    echo # the firmware's last line on the console has no end
    beside=$(rates 0.3 "$v1" "$s1")
    promised=$(awk "BEGIN { printf \"%.0f\", 0.8 * $alone }")
    holds broken "a service and a stream on a memory of 2 GB/s: loads a second of the service, without cachemate" - "${beside% *}" \
        "less than the promised $promised" "${beside% *} < $promised" "${beside% *}"
    pids="$v1 $s1"
    snapshot >before
    limits="window_ms = 100
[policy]
name = \"auto\"
parameters = { window_ns = 100_000_000 }
[[rules]]
command = \"victim-*\"
min_rate = $promised.0
[[rules]]
command = \"stream-*\""

    manage "$limits"
    started=$(seconds_up)
    within 20 is_limited "$s1"
    took=$(awk "BEGIN { printf \"%.1f\", $(seconds_up) - $started }")
    holds limited "the stream's limit of bandwidth under auto: percent, and seconds until the first" "$level %" "$took s" "below 100 %" \
        "${level:-100} < 100" "${level:-none}"
    # Each halving takes three windows.
    usleep 1500000
    under=$(rates 2 "$v1" "$s1")
    status >status.json
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    cachemate explain --socket /run/lab/s.sock "$v1" | sed 's/^/# /'
    level=$(level_of "$s1")
    holds kept "loads a second of the service, mean of two seconds under auto" "$(promise_state), stream at ${level:-100} %" "${under% *}" \
        "at least $promised" "${under% *} >= $promised" "${under% *}"
    report share "the stream's loads a second: under auto, without" note - "${under#* }, ${beside#* }" -
    end
    within 10 restored
    same ended-restored "the daemon ends: everything is as before" "$(cat before)" "$(cat after)" "threads, groups, limits"

    # Both start again, because a program reports its work to the first daemon that it finds only.
    kill -9 "$v1" "$s1"
    busy chase victim-1 0 12288; v1=$pid
    busy stream stream-1 1 16384; s1=$pid
    pids="$v1 $s1"
    usleep 100000
    snapshot >before
    manage "$limits"
    within 20 is_limited "$s1"
    level=$(level_of "$s1")
    kill -9 "$daemon"
    wait "$daemon" 2>/dev/null
    within 30 restored
    same killed-restored "kill -9 while the stream has ${level:-no limit} % of bandwidth: everything is as before" "$(cat before) limited" \
        "$(cat after) ${level:+limited}" "threads, groups, limits"
    kill -9 "$v1" "$s1"
}
