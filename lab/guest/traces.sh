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

# traced_curve KIND KIB: the curve of that kernel by a trace, beside its misses in each number of ways.
traced_curve() {
    ln -sf /bin/lab-kernels "/lab/bin/$1"
    taskset 1 "/lab/bin/$1" "$1" "$2" 1000000000 >/dev/null &
    kernel=$!
    ways_by_model "$kernel" >by-model.tsv
    rm -f run.jsonl
    mode=observe manage 'window_ms = 200
run_log = "/lab/run.jsonl"
[policy]
name = "cache-sizing"
'"$(rules "$1" stream-1)"
    pause_us=100000
    within 15 has_curve "$1" 16
    status >status.json
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    end
    curve "$1" >curve.tsv
    sed "s/^/# traced $1: /" curve.tsv
    sed "s/^/# model $1: /" by-model.tsv
    # The length of each log, of the kernel or of the stream, with its losses.
    logs=$(grep -o '"lost":[0-9a-z]*\|"elapsed_ns":[0-9]*,"complete"\|"counts":\[{"event":"Instructions","count":[0-9]*' run.jsonl | tr '\n' ' ')
    echo "# logs: $logs"
    distance=$(awk 'NR == FNR { rate[$1] = $2; next } $1 in rate { d = rate[$1] - $2; sum += d < 0 ? -d : d; count++ } END { if (count) printf "%.2f", sum / count }' \
        curve.tsv by-model.tsv)
    worst=$(awk 'NR == FNR { rate[$1] = $2; next } $1 in rate { d = rate[$1] - $2; d = d < 0 ? -d : d; if (d >= most) { most = d; at = $1 } } END { if (at) printf "%.2f in %d ways", most, at / 524288 }' \
        curve.tsv by-model.tsv)
    holds "$1" "$1: misses for 1000 instructions, distance of the curve by a trace (modeled PEBS) from the machine, mean of $(wc -l <by-model.tsv) sizes" \
        "$(wc -l <curve.tsv) points" "$distance (most: $worst)" "at most 1.02" "$distance <= 1.02" "$distance"
    kill -9 "$kernel"
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
