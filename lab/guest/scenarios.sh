# Scenarios of the modeled machine; sourced by init.

# Where the loads find the daemon, to which they report their work.
export CACHEMATE_SOCKET=/run/lab/s.sock

# load KIND NAME CPU KIB MS [STEP_MS]: runs a load in the foreground; its output is in NAME.out.
load() { lab-program load "$@" >"$2.out"; }
# busy KIND NAME CPU KIB: starts a load of that name in the background, where it runs until killed; its pid is in
# $pid.
busy() {
    ln -sf /bin/lab-program "/lab/bin/$2"
    LAB_PROGRESS=/run/lab/progress "/lab/bin/$2" load "$@" 1000000 >/dev/null &
    pid=$!
}
# colored COLORS KIND NAME CPU KIB: starts a load as `busy` does, on frames of these colors.
colored() {
    colors=$1
    shift
    ln -sf /bin/lab-program "/lab/bin/$2"
    LAB_PROGRESS=/run/lab/progress cachemate --quiet page-color run --colors "$colors" -- "/lab/bin/$2" load "$@" 1000000 >/dev/null 2>"$2.err" &
    pid=
    until pid=$(pidof "$2") && [ -n "$pid" ]; do usleep 50000; done
}
# rates SECONDS PID...: work per second of each program over this time.
rates() {
    seconds=$1
    shift
    lab-program progress /run/lab/progress "$@" >before.tsv
    usleep "$(awk "BEGIN { print int($seconds * 1e6) }")"
    lab-program progress /run/lab/progress "$@" >after.tsv
    awk 'NR == FNR { at[$1] = $2; count[$1] = $3; next } { printf "%s%.0f", gap, ($3 - count[$1]) / ($2 - at[$1]); gap = " " }' \
        before.tsv after.tsv
}
# mean NUMBER...: arithmetic mean of the numbers.
mean() { echo "$@" | awk '{ for (i = 1; i <= NF; i++) sum += $i; printf "%.0f", sum / NF }'; }
# manage LINES: starts the daemon with this configuration, in $mode (act); its pid is in $daemon.
manage() {
    printf 'mode = "%s"\n%s\n' "${mode:-act}" "$1" >c.toml
    cachemate --quiet manage --config c.toml --state-dir state --socket /run/lab/s.sock >daemon.log 2>&1 &
    daemon=$!
}
status() { cachemate status --json --socket /run/lab/s.sock 2>/dev/null; }
# number NAME: that number in the daemon's last status (status.json).
number() { sed -n "s/^ *\"$1\": \([0-9.]*\),*$/\1/p" status.json | head -n 1; }
rules() { for name in "$@"; do printf '[[rules]]\ncommand = "%s"\n' "$name"; done; }
end() {
    kill -TERM "$daemon"
    wait "$daemon"
    tail -n 3 daemon.log
}

# What a guest second of each kind of work costs the host: between two marks each (lab/modeled.sh reads their times).
scenario_speed() {
    step=0
    for kind in idle compute chase stream both system; do
        step=$((step + 1))
        lab-program mark $((2 * step - 1))
        case $kind in
            idle) usleep 1000000 ;;
            compute) load chase "$kind" 0 16 300 ;;
            chase) load chase "$kind" 0 6144 300 ;;
            stream) load stream "$kind" 0 32768 300 ;;
            both)
                load stream other 1 32768 300 &
                load chase "$kind" 0 6144 300
                wait
                ;;
            system) for i in 1 2 3 4; do find /proc /sys /lab 2>/dev/null | sort | awk '{ n += length($0) } END { print n }' >"$kind.out"; done ;;
        esac
        lab-program mark $((2 * step))
    done
}

# Latencies and partitions compared with closed forms. A load takes three instructions (load, count, branch) at 2 GHz.
scenario_settled() {
    for level in "l1 16 0" "l2 128 14" "l3 6144 50" "memory 12288 250"; do
        set -- $level
        load chase "$1" 0 "$2" 20
        near "latency-$1" "a chase through $2 KiB, ns a load" "$(field ns "$1.out")" "$(awk "BEGIN { print (3 + $3) / 2 }")" 2
    done
    for pair in "same 1 120" "other 2 600"; do
        set -- $pair
        lab-program ping-pong 0 "$2" 1000 >pp.out
        near "ping-pong-$1" "a line from CPU 0 to CPU $2, ns one way (eight instructions)" "$(field ns pp.out)" \
            "$(awk "BEGIN { print ($3 + 8) / 2 }")" 5
    done
    for side in "same 1 126.5" "other 2 26.5"; do
        set -- $side
        busy stream s "$2" 32768
        usleep 60000
        load chase "beside-$1" 0 6144 30
        kill "$pid"
        wait "$pid" 2>/dev/null
        near "beside-$1" "6 MiB of 8 beside a stream on the $1 L3, ns a load" "$(field ns "beside-$1.out")" "$3" 2
    done
    mount -t resctrl resctrl /mnt/rdt
    mkdir /mnt/rdt/v /mnt/rdt/s
    busy stream s 1 32768
    echo "$pid" >/mnt/rdt/s/tasks
    # A program of 2 MiB in some of the 16 ways of 512 KiB each: at most 75 % of the ways, or at least 150 %.
    for split in "14 fffc 0003 26.5" "12 fff0 000f 26.5" "8 ff00 00ff 26.5" "6 fc00 03ff 26.5" "2 c000 3fff 126.5"; do
        set -- $split
        echo "L3:0=$2;1=ffff" >/mnt/rdt/v/schemata
        echo "L3:0=$3;1=ffff" >/mnt/rdt/s/schemata
        sh -c 'echo $$ >/mnt/rdt/v/tasks; exec lab-program load chase v 0 2048 30' >v.out
        near "ways-$1" "2 MiB in $1 ways beside a stream in the others, ns a load" "$(field ns v.out)" "$4" 2
    done
    occupancy=$(cat /mnt/rdt/s/mon_data/mon_L3_00/llc_occupancy)
    near occupancy "a stream in 14 of 16 ways: its occupancy file, bytes" "$occupancy" $((14 * 512 * 1024)) 2
    kill "$pid"
    wait "$pid" 2>/dev/null
    lab-program counters 12288 200000 >counters.out
    near counter-cycles "cycles: perf and the machine" "$(field cycles counters.out)" "$(field model_cycles counters.out)" 2
    near counter-misses "misses: perf and the machine" "$(field misses counters.out)" "$(field model_misses counters.out)" 2
}

# Two types of cores on one L3. A small core needs two cycles for an instruction, and its L2 is eight times as large.
scenario_hybrid() {
    cachemate topology --json >topology.json
    for core in "large 0 1 256 50" "small 3 2 2048 14"; do
        set -- $core
        load chase "$1-l1" "$2" 16 20
        near "$1-l1" "a $1 core's chase through 16 KiB, ns a load" "$(field ns "$1-l1.out")" "$(awk "BEGIN { print 3 * $3 / 2 }")" 2
        load chase "$1-l2" "$2" 768 40
        near "$1-l2" "a $1 core's chase through 768 KiB, ns a load" "$(field ns "$1-l2.out")" "$(awk "BEGIN { print (3 * $3 + $5) / 2 }")" 2
        same "$1-size" "L2 of CPU $2, KiB: in the machine, by cachemate" "$4" "$(l2_kib "$2")"
    done
}
# l2_kib CPU: size of its L2 in topology.json.
l2_kib() {
    awk -F '"' -v cpu="$1" '
        $2 == "level" { level = $4 } $2 == "cpus" { cpus = $4 }
        $2 == "size_bytes" && level == "L2" && cpus == cpu { sub(/.*: /, ""); print $0 / 1024; exit }' topology.json
}

# Limit in guest seconds: a survey that takes longer has failed.
gangs_within=30
# Two programs that need the cache, two that stream through it, and two CPUs: which programs should run together?
scenario_gangs() {
    busy chase victim-1 -1 3072; v1=$pid
    busy stream stream-1 -1 32768; s1=$pid
    busy chase victim-2 -1 3072; v2=$pid
    busy stream stream-2 -1 32768; s2=$pid
    usleep 300000
    all_pids="$v1 $v2 $s1 $s2"
    victim_slower=$(slower_beside "$v1" "$s1")
    stream_slower=$(slower_beside "$s2" "$s1")
    usleep 100000
    alone=$(rates 0.6 "$v1" "$v2" "$s1" "$s2")
    lab-program turns stop 20 1.6 "$v1,$v2" "$s1,$s2" &
    turns=$!
    usleep 200000
    byhand=$(rates 1.2 "$v1" "$v2" "$s1" "$s2")
    wait "$turns"
    lab-program mark 1
    manage "window_ms = 200
[policy]
name = \"intensity-gangs\"
parameters = { window_ns = 200_000_000, slice_ns = 20_000_000 }
$(rules victim-1 victim-2 stream-1 stream-2)"
    since=$(cut -d' ' -f1 /proc/uptime)
    survey=never product=$alone
    pause_us=100000
    if within "$gangs_within" ganged; then
        survey=$(awk "BEGIN { print $(cut -d' ' -f1 /proc/uptime) - $since }")
        usleep 200000
        lab-program mark 2
        product=$(rates 1.2 "$v1" "$v2" "$s1" "$s2")
    fi
    lab-program mark 3
    status >status.json
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    reason=$(awk -F '"' '/"reason": ".*run together/ { print $4 }' status.json | head -n 2)
    last=$(awk -F '"' '/"reason": "/ { why = $4 } END { print why }' status.json)
    end
    holds survey "a first survey of four programs, guest seconds until gangs run" "$survey" \
        "$(number probe_results) probes, $(awk "BEGIN { print $(number probe_withheld_ns) / 1e9 }") s withheld from programs" \
        "at most 20" "\"$survey\" + 0 > 0 && \"$survey\" + 0 <= 20" "$(number probe_results)"
    for one in "victim-1 $victim_slower" "stream-2 $stream_slower"; do
        set -- $one
        probed=$(reported_value "$1" 3)
        near "beside-$1" "$1: how many times slower beside a stream, by its probe and by hand" \
            "${probed:+$(awk "BEGIN { print 1 + $probed }")}" "$2" 10
    done
    set -- $alone $byhand $product
    hand=$(awk "BEGIN { printf \"%.2f\", ($5 + $6) / ($1 + $2) }")
    found=$(awk "BEGIN { printf \"%.2f\", (${9} + ${10}) / ($1 + $2) }")
    holds by-hand "victims in gangs by hand: work against the kernel alone" - "$hand" "at least 1.5" "$hand >= 1.5" "$hand"
    holds gain "victims in gangs found by the policy: work against the kernel alone" "${reason:-${last:-no word}}" \
        "$found" "80 % of the gain by hand" "$found - 1 >= 0.8 * ($hand - 1)" "$found" "$hand"
    report streams "streams meanwhile, against the kernel alone" note - \
        "$(awk "BEGIN { printf \"%.2f, by hand %.2f\", (${11} + ${12}) / ($3 + $4), ($7 + $8) / ($3 + $4) }")" -
    kill -9 "$v1" "$v2" "$s1" "$s2"
}
ganged() { status | awk '/"gangs": \[$/ { found = 1 } END { exit !found }'; }

# Page colors: whether they confine programs, and what they gain beside a stream.
scenario_colors() {
    # Colors are searched in the frames that a process gets; half a GiB contains frames of all colors.
    cachemate --quiet page-color discover --memory 256M -o map.json --timeout 30 >discover.out 2>&1
    code=$?
    sed 's/^/# /' discover.out
    if [ "$scenario" = colors-hashed ]; then
        confines=$(grep -ciE 'last level.*: confined' discover.out)
        holds hashed "on an L3 that is hashed throughout the product does not say that colors confine" \
            "$(tail -n 1 discover.out | cut -c1-90)" "$confines times (exit code $code)" never "$confines == 0" "$confines"
        return
    fi
    same discover "colors are found where there are some" 0 "$code"
    load chase solo 0 2048 100
    busy stream s 1 32768
    usleep 100000
    load chase plain 0 2048 100
    kill "$pid"
    wait "$pid" 2>/dev/null
    cachemate --quiet page-color run --colors 4-7 -- /bin/lab-program load stream s 1 32768 2500 >s.out 2>s.err &
    cachemate --quiet page-color run --colors 0-3 -- /bin/lab-program load chase colored 0 2048 2000 100 >colored.out 2>colored.err
    wait
    solo=$(field ns solo.out)
    # Frames are sorted while the program runs, so only its last steps count.
    sorted=$(field steps colored.out | awk '{ for (i = NF - 4; i <= NF; i++) sum += $i; printf "%.1f", sum / 5 }')
    plain=$(field ns plain.out)
    holds plain "2 MiB of 8 in ordinary frames beside a stream, share of its speed alone" - \
        "$(awk "BEGIN { printf \"%.2f (%.1f of %.1f ns)\", $solo / $plain, $plain, $solo }")" "at most 0.30" \
        "$solo / $plain <= 0.30" "$solo" "$plain"
    holds colored "the same in half of the colors, the stream in the other half" "confined" \
        "$(awk "BEGIN { printf \"%.2f (%.1f of %.1f ns)\", $solo / ($sorted + 1e-9), $sorted, $solo }")" "at least 0.85" \
        "$sorted > 0 && $solo / $sorted >= 0.85" "$solo" "$sorted"
    sed 's/^/# /' colored.err s.err
}

# Way masks set manually and by a static plan: do they hold, and does cachemate's reported occupancy match the
# machine's?
scenario_ways() {
    mount -t resctrl resctrl /mnt/rdt
    busy chase victim-1 0 3072; v1=$pid
    busy stream stream-1 1 32768; s1=$pid
    usleep 300000
    before=$(rates 0.3 "$v1" "$s1")
    manage 'window_ms = 100
[rollback]
enabled = false
[policy]
name = "static-partition"
parameters = { steps = [{ shares = ["0-11", "12-15"] }] }
'"$(rules victim-1 stream-1)"
    within 5 in_groups "$v1" "$s1"
    usleep 300000
    after=$(rates 0.5 "$v1" "$s1")
    group=/mnt/rdt/$(sed -n 's/^res://p' "/proc/$s1/cpu_resctrl_groups")
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    near occupancy "the stream's occupancy in 4 of 16 ways, bytes" "$(cat "$group"/mon_data/mon_L3_00/llc_occupancy)" $((4 * 512 * 1024)) 2
    end
    set -- $before $after
    holds gain "a victim of 3 MiB in 12 ways, work against no masks" "static-partition" "$(awk "BEGIN { printf \"%.2f\", $3 / $1 }")" \
        "at least 4" "$3 / $1 >= 4" "$1" "$3"
    kill -9 "$v1" "$s1"
}
in_groups() { for one in "$@"; do [ "$(sed -n 's/^res://p' "/proc/$one/cpu_resctrl_groups")" != / ] || return 1; done; }

# DIO on live counters over two L3s, with its guard enabled, on a mix that it places wrongly (the best placement has
# both victims on one L3 and both streams on the other). Is its mistake rolled back and not repeated?
scenario_placement() {
    busy chase victim-1 0 3072; v1=$pid
    busy chase victim-2 1 3072; v2=$pid
    busy stream stream-1 2 32768; s1=$pid
    busy stream stream-2 3 32768; s2=$pid
    usleep 300000
    for one in "$v1" "$v2" "$s1" "$s2"; do taskset -p f "$one" >/dev/null; done
    best=$(rates 0.3 "$v1" "$v2" "$s1" "$s2")
    manage "window_ms = 50
[policy]
name = \"dio\"
parameters = { window_cycles = 100_000_000 }
$(rules victim-1 victim-2 stream-1 stream-2)"
    usleep 2500000
    late=$(rates 0.6 "$v1" "$v2" "$s1" "$s2")
    lab-program mark 1
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    rolled=$(status | awk -F '[:,]' '/"rollbacks"/ { print $2 + 0; exit }')
    end
    set -- $best $late
    holds rolled-back "DIO's mistake is rolled back: victims after 2.5 s against the best placement" "rolled back ${rolled:-?} times" \
        "$(awk "BEGIN { printf \"%.2f\", ($5 + $6) / ($1 + $2) }")" "at least 0.9" \
        "($5 + $6) / ($1 + $2) >= 0.9" "$1" "$2" "$5" "$6"
    kill -9 "$v1" "$v2" "$s1" "$s2"
}
