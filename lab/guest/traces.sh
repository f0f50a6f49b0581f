# Miss-rate curves from traces of loads that missed the L2 (RapidMRC, by modeled PEBS), compared with the machine's misses
# in some of its ways. Sourced by init.

# Kernels of the scenario `forecast` and their KiB, four times as large as there, as is the L3.
traced="table 8192
search 6144
matrix 3600"

scenario_traces() {
    mount -t resctrl resctrl /mnt/rdt
    busy stream stream-1 1 32768; s1=$pid
    within 30 test -s "/run/lab/progress/$s1"
    echo "$traced" >traced.txt
    while read -r kind kib; do traced_curve "$kind" "$kib"; done <traced.txt
    kill -9 "$s1"
}

# traced_curve KIND KIB: the curve of that kernel by a trace, beside its misses in each number of ways. The log has ten
# entries for each line of the L3, as in the thesis (5.6.1).
traced_curve() {
    ln -sf /bin/lab-kernels "/lab/bin/$1"
    taskset 1 "/lab/bin/$1" "$1" "$2" 1000000000 >/dev/null &
    kernel=$!
    ways_by_model "$kernel" >by-model.tsv
    rm -rf run.jsonl state/*
    mode=observe manage 'window_ms = 200
run_log = "/lab/run.jsonl"
[policy]
name = "cache-sizing"
parameters = { trace_entries = 1_310_720 }
'"$(rules "$1" stream-1)"
    pause_us=100000
    within 15 has_curve "$1" 16
    status >status.json
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    end
    kill -9 "$kernel"
    kill -STOP "$s1"
    curve "$1" >curve.tsv
    lab-program model 0 # reading the logs takes long, and is not measured
    sed "s/^/# traced $1: /" curve.tsv
    sed "s/^/# model $1: /" by-model.tsv
    echo "# logs of $1 and the stream, entries: $(grep -o '"Trace":{[^]]*' run.jsonl | tr -cd ',\n' | awk '{ printf "%d ", length($0) }')"
    echo "# lost, and instructions: $(grep -o '"lost":[0-9]*,"counts":[^,]*,"count":[0-9]*' run.jsonl | tr '\n' ' ')"
    echo "# refused: $(grep -o '"message":"[^"]*"' run.jsonl | sort | uniq -c | sort -rn | head -n 4 | tr '\n' ' ')"
    lab-program model 1
    by_trace="the curve by a trace (modeled PEBS) and the machine's misses for 1000 instructions, mean distance"
    distance=$(curve_distance 1)
    holds "$1" "$1: $by_trace in 1 to 16 ways" "$(wc -l <curve.tsv) points" "${distance:-none}" "at most 1.02" \
        "${distance%% *} <= 1.02" "${distance%% *}"
    # A cache of few ways has conflicts that no stack distance contains.
    report "$1-ways" "$1: $by_trace from 4 ways on" note "$(wc -l <curve.tsv) points" "$(curve_distance 4)" -
}

# curve_distance WAYS: mean distance of curve.tsv from by-model.tsv in so many ways and more, and the largest.
curve_distance() {
    awk -v first="$1" '
        NR == FNR { rate[$1] = $2; next }
        $1 >= first * 524288 && $1 in rate {
            d = rate[$1] - $2
            d = d < 0 ? -d : d
            sum += d
            count++
            if (d >= most) { most = d; at = $1 / 524288 }
        }
        END { if (count) printf "%.2f (most: %.2f in %d ways)", sum / count, most, at }' curve.tsv by-model.tsv
}

# ways_by_model PID: bytes, and the machine's misses for 1000 instructions of CPU 0, from all ways to one. A stream in
# the other ways evicts what the program leaves there.
ways_by_model() {
    mkdir /mnt/rdt/v /mnt/rdt/s
    echo "$1" >/mnt/rdt/v/tasks
    echo "$s1" >/mnt/rdt/s/tasks
    kill -STOP "$s1"
    usleep 400000
    for ways in 16 14 12 10 8 6 4 3 2 1; do
        mask=$(((1 << ways) - 1))
        printf 'L3:0=%x\n' "$mask" >/mnt/rdt/v/schemata
        if [ "$ways" -lt 16 ]; then
            printf 'L3:0=%x\n' $((0xffff ^ mask)) >/mnt/rdt/s/schemata
            kill -CONT "$s1"
        fi
        usleep 60000
        lab-program mpki 60 0 >counted.out
        printf '%s\t%s\n' "$((ways * 512 * 1024))" "$(field mpki counted.out)"
    done
    rmdir /mnt/rdt/v /mnt/rdt/s
}
