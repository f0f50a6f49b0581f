# cachemate's own measurements compared with the ground truth of the machine: scenarios `probes` and `sharing`;
# sourced by init.

# reported_values: for each program in status.json: name, intensity, sensitivity, misses per 1000 instructions, IPC.
reported_values() {
    awk -F '"' '
        function number(line) { sub(/.*: /, "", line); sub(/,$/, "", line); return line == "null" ? "-" : line }
        $2 == "name" { name = $4; want = ""; delete said }
        $2 == "intensity" || $2 == "sensitivity" { want = $0 ~ /null/ ? "" : $2; said[$2] = "-" }
        $2 == "value" && want != "" { said[want] = number($0); want = "" }
        $2 == "mpki" || $2 == "instr_per_cycle" { said[$2] = number($0) }
        $2 == "reasons" && name != "" {
            printf "%s\t%s\t%s\t%s\t%s\n", name, said["intensity"], said["sensitivity"], said["mpki"],
                said["instr_per_cycle"]
            name = ""
        }' status.json
}
# reported_value NAME COLUMN: the number, or nothing if it is missing.
reported_value() { reported_values | awk -F '\t' -v name="$1" -v column="$2" '$1 == name && $column != "-" { print $column; exit }'; }

# spearman: rank correlation of two columns of numbers, with ties at their mean rank; nothing if a column has no
# variation.
spearman() {
    awk '{ x[NR] = $1; y[NR] = $2 }
        function rank(v, i, k, r) { r = 0.5; for (k = 1; k <= NR; k++) r += v[k] < v[i] ? 1 : v[k] == v[i] ? 0.5 : 0; return r }
        END {
            m = (NR + 1) / 2
            for (i = 1; i <= NR; i++) {
                a = rank(x, i) - m; b = rank(y, i) - m; xy += a * b; xx += a * a; yy += b * b
            }
            if (xx * yy > 0) printf "%.2f", xy / root(xx * yy)
        }
        # The method of Newton, because busybox has no mathematical functions.
        function root(of, i, r) { r = of; for (i = 0; i < 100; i++) r = (r + of / r) / 2; return r }'
}

# only PID WHAT...: runs that program alone on CPU 0, while the others in $all_pids are stopped.
only() {
    kill -STOP $all_pids
    taskset -p 1 "$1" >/dev/null
    kill -CONT "$1"
    usleep 15000
    shift
    "$@"
}
# again: lets all of $all_pids run on any CPU.
again() {
    for one in $all_pids; do taskset -p f "$one" >/dev/null 2>&1; done
    kill -CONT $all_pids
}

# slower_beside PID STREAM: the factor by which that program is slower beside the stream than alone.
slower_beside() {
    only "$1" true
    by_itself=$(rates 0.1 "$1")
    taskset -p 2 "$2" >/dev/null
    kill -CONT "$2"
    usleep 60000
    beside=$(rates 0.15 "$1")
    again
    awk "BEGIN { printf \"%.2f\", $by_itself / $beside }"
}

# Twelve programs whose insertion rates range from zero to the maximum.
twelve="chase 128
chase 1024
chase 3072
chase 6144
chase 12288
chase:400 12288
chase:2000 12288
chase:10000 12288
stream 12288
stream:200 12288
stream:1000 12288
stream:5000 12288"
# Maximum guest seconds until all programs have been probed.
probes_within=18

# who_shares CPU...: compares the result of the ping-pong with the L3 that the machine gives each CPU.
who_shares() {
    cachemate topology --probe --json >topology.json 2>topology.err
    groups=$(awk -F '"' '/"groups"/ { on = 1; next } on && /]/ { exit } on { printf "%s%s", gap, $2; gap = " | " }' topology.json)
    expected=$(for cpu in "$@"; do
        lab-program load chase x "$cpu" 16 1 >l3.out
        echo "$(field l3 l3.out) $cpu"
    done | awk 'NR == 1 || $1 != l3 { if (NR > 1) printf "%s | ", range(first, last); first = $2; l3 = $1 } { last = $2 }
        END { printf "%s", range(first, last) }
        function range(a, b) { return a == b ? a : a "-" b }')
    holds shared "which CPUs share a cache, by ping-pong" "$groups" "$expected" equal "\"$groups\" == \"$expected\"" "$(echo "$expected" | wc -l)"
}
# The size of the cache according to the probe, compared with the machine's.
cache_size() {
    cachemate doctor --json >doctor.json 2>doctor.err
    size_mib=$(sed -n 's/.*about \([0-9]*\) MiB of the cache hold ours.*/\1/p' doctor.json | head -n 1)
    holds size "size of the cache by lines that come back, MiB" "${size_mib:-not reported}" 8 "within a factor of two" \
        "${size_mib:-0} >= 4 && ${size_mib:-0} <= 16" "$size_mib"
}

# Which CPUs share a cache, and the intensity of twelve programs: by probes, and by counters if the machine has any.
scenario_probes() {
    who_shares 0 1
    cache_size
    all_pids=''
    : >programs.tsv
    # The kernel stores only 15 bytes of a program's name.
    echo "$twelve" | while read -r kind kib; do echo "$(echo "$kind-$kib" | tr : - | cut -c1-15) $kind $kib"; done >twelve.txt
    while read -r name kind kib; do
        busy "$kind" "$name" -1 "$kib"
        all_pids="$all_pids $pid"
        echo "$name $pid" >>programs.tsv
    done <twelve.txt
    usleep 1500000 # until all have made their rings of lines
    # A probe refills the cache with its own lines, so it counts the lines that a program inserts while its lines are
    # being evicted.
    busy stream beside 1 12288
    beside=$pid
    while read -r name pid; do
        only "$pid" lab-program counted 30 0 >counted.out
        echo "$name $(awk "BEGIN { print $(field l3_misses counted.out) + $(field prefetch_misses counted.out) }")"
    done <programs.tsv >by-model.txt
    kill -9 "$beside"
    again
    manage "window_ms = 200
[policy]
name = \"intensity-gangs\"
parameters = { window_ns = 200_000_000, samples = 4, probe_ns = 1_000_000_000 }
$(rules 'chase-*' 'stream-*')"
    since=$(cut -d' ' -f1 /proc/uptime)
    pause_us=300000
    within "$probes_within" all_probed
    took=$(awk "BEGIN { print $(cut -d' ' -f1 /proc/uptime) - $since }")
    status >status.json
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    end
    reported_values >reported_values.tsv
    while read -r name rate; do
        awk -F '\t' -v OFS='\t' -v name="$name" -v rate="$rate" '$1 == name { print name, rate, $2, $4 == "-" ? "-" : $4 * $5 }' reported_values.tsv
    done <by-model.txt >compared.tsv
    sed 's/^/# compared: /' compared.tsv
    probed=$(awk -F '\t' '$3 != "-"' compared.tsv | wc -l)
    report survey "intensity of twelve programs by probes: guest seconds" note "$probed of 12 probed" "$took s" -
    rho=$(awk -F '\t' '$3 != "-" { print $3, $2 }' compared.tsv | spearman)
    holds intensity "intensity by probes and the rate of lines brought in beside a stream: Spearman" \
        "$(awk -F '\t' '{ printf "%s%.2f", gap, $3; gap = " " }' compared.tsv)" "${rho:-none}: $probed programs" "at least 0.9" \
        "$probed == 12 && ${rho:-0} >= 0.9" "$probed"
    counted=$(awk -F '\t' '$4 != "-" && $4 != ""' compared.tsv | wc -l)
    if [ "$scenario" = probes ]; then
        rho=$(awk -F '\t' '$4 != "-" { print $4, $2 }' compared.tsv | spearman)
        holds counters "misses per 1000 cycles by counters and the same rate: Spearman" \
            "$(awk -F '\t' '{ printf "%s%.1f", gap, $4; gap = " " }' compared.tsv)" "${rho:-none}: $counted programs" "at least 0.9" \
            "$counted == 12 && ${rho:-0} >= 0.9" "$counted"
    else
        same no-counters "without counters none are shown" 0 "$counted"
    fi
    kill -9 $all_pids
}
all_probed() { status >status.json && [ "$(reported_values | awk -F '\t' '$2 != "-"' | wc -l)" = 12 ]; }

# Two groups of two threads that read and write lines of their group, each group spread over two L3s: are they
# colocated? The threads belong to one process or, in sharing-processes, to four processes with shared memory.
scenario_sharing() {
    who_shares 0 1 2 3
    all_pids=''
    if [ "$scenario" = sharing ]; then
        kib=8
        busy_share threads 0,2 1,3
        all_pids=$pid
    else
        for one in "a 0" "a 2" "b 1" "b 3"; do
            set -- $one
            busy_share "$1" "$2"
            all_pids="$all_pids $pid"
        done
    fi
    shared_by $all_pids
    kill -9 $all_pids
}
# busy_share REGION CPUS...: starts a program named sharer in the background; its pid is in $pid.
busy_share() {
    ln -sf /bin/lab-program /lab/bin/sharer
    region=$1
    shift
    LAB_PROGRESS=/run/lab/progress /lab/bin/sharer share "$region" "${kib:-64}" "$@" >/dev/null &
    pid=$!
}
threads_of() { for one in "$@"; do ls "/proc/$one/task" | sort -n | tail -n +2; done; }
# pin_threads MASK MASK...: sets the masks of the threads in $threads, in order.
pin_threads() { for thread in $threads; do taskset -p "$1" "$thread" >/dev/null; shift; done; }
# is_spread: true if the first thread may run on any CPU; is_pinned: true if it may run on only one.
is_spread() { [ "$(first_mask)" = 0-3 ]; }
is_pinned() { [ "$(first_mask)" = 0 ]; }
first_mask() { set -- $threads && grep Cpus_allowed_list "/proc/$1/status" | cut -f2; }
# transfers: lines transferred from other L3s per second, according to the machine and to perf.
transfers() {
    lab-program counted 40 0 1 2 3 >transfers.out
    field transfers_other transfers.out
}
# shared_by PID...: measures the threads as the kernel leaves them, with groups colocated manually, and under
# thread-clustering. The threads compute for 2000 cycles between two accesses, because every shared line slows the
# emulator; clustering therefore starts at a lower share.
shared_by() {
    usleep 100000
    threads=$(threads_of "$@")
    apart=$(transfers)
    near counted "lines out of the other L3 in a second, groups apart: perf and the machine" "$(field perf transfers.out)" "$apart" 5
    # The threads in the order of their groups: first the first group's two, then the others.
    pin_threads 3 3 c c
    usleep 30000
    byhand=$(transfers)
    holds by-hand "remote transfers gone, groups put together by hand" - "$(awk "BEGIN { printf \"%.2f\", 1 - $byhand / $apart }")" \
        "at least 0.7" "1 - $byhand / $apart >= 0.7" "$apart" "$byhand"
    pin_threads 1 4 2 8
    usleep 10000
    pin_threads f f f f
    manage "window_ms = 100
[rollback]
enabled = false
[policy]
name = \"thread-clustering\"
parameters = { window_cycles = 200_000_000, activation_share = 0.02, samples = 800, max_detection_ns = 3_000_000_000 }
$(rules sharer)"
    # Until cachemate has placed the threads, they are spread again four times a second, because the kernel may
    # colocate them by chance.
    for turn in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do
        is_spread && pin_threads 1 4 2 8 && usleep 2000 && is_pinned && pin_threads f f f f
        usleep 250000
        is_spread || break
    done
    usleep 100000
    product=$(transfers)
    status >status.json
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    reason=$(awk -F '"' '$2 == "reason" && $4 != "" { print $4; exit }' status.json)
    refused=$(awk -F '"' '/"refused": \[$/ { on = 1; next } on && /]/ { exit } on { print $2; exit }' status.json)
    end
    if [ -z "$reason$refused" ]; then # the policy says nothing where it cannot begin
        cachemate doctor --quick --json >doctor.json
        reason="no word; doctor: $(awk -F '"' '$4 == "data-address sampling" { on = 1 } on && $2 == "detail" { print $4; exit }' doctor.json)"
    fi
    # The kernel may also colocate them, which must not be credited to the policy.
    case ${reason:-no} in no*) itself=0 ;; *) itself=1 ;; esac
    holds clustered "remote transfers gone under thread-clustering, by modeled PEBS" "${reason:-refused}${refused:+: $refused}" \
        "$(awk "BEGIN { printf \"%.2f\", 1 - $product / $apart }")" "90 % of the manual gain" "$itself && 1 - $product / $apart >= 0.9 * (1 - $byhand / $apart)" "$apart" "$product"
}
