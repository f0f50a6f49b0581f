# A miss-rate curve from a few way masks while the program runs: a plan with steps, misses from counters, and no
# recorder. Sourced by init.

# The program accesses lines of 4 MiB at random, so with w ways of 512 KiB its hit ratio is the share of lines that
# they hold.
scenario_sweep() {
    mount -t resctrl resctrl /mnt/rdt
    busy uniform victim-1 0 4096; v1=$pid
    busy stream stream-1 1 32768; s1=$pid
    for one in "$v1" "$s1"; do within 30 test -s "/run/lab/progress/$one"; done
    : >by-model.tsv
    mkdir /mnt/rdt/v /mnt/rdt/s
    echo "$v1" >/mnt/rdt/v/tasks
    echo "$s1" >/mnt/rdt/s/tasks
    # Manually, from the machine's own miss count of CPU 0.
    for split in "2 0003 fffc" "4 000f fff0" "6 003f ffc0"; do
        set -- $split
        echo "L3:0=$2" >/mnt/rdt/v/schemata
        echo "L3:0=$3" >/mnt/rdt/s/schemata
        usleep 40000
        lab-program mpki 40 0 >counted.out
        printf '%s\t%s\n' "$(($1 * 512 * 1024))" "$(field mpki counted.out)" >>by-model.tsv
    done
    rmdir /mnt/rdt/v /mnt/rdt/s
    manage 'window_ms = 40
[rollback]
enabled = false
[policy]
name = "static-partition"
parameters = { window_ns = 40_000_000, steps = [
    { shares = ["0-1", "2-15"] }, { from_ns = 240_000_000, shares = ["0-3", "4-15"] }, { from_ns = 480_000_000, shares = ["0-5", "6-15"] } ] }
'"$(rules victim-1 stream-1)"
    within 6 has_curve victim-1 3
    usleep 200000
    status >status.json
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    end
    curve victim-1 >curve.tsv
    sed 's/^/# swept: /' curve.tsv
    while read -r bytes mpki; do
        near "ways-$((bytes / 524288))" "misses for 1000 instructions in $((bytes / 524288)) of 16 ways: swept, and by the machine" \
            "$(awk -v bytes="$bytes" '$1 == bytes { print $2 }' curve.tsv)" "$mpki" 5
    done <by-model.tsv
    kill -9 "$v1" "$s1"
}

# curve NAME: size in bytes and misses of each point of the curve in status.json.
curve() {
    awk -v name="$1" -F '[:,]' '
        /"name"/ { on = index($0, "\"" name "\"") > 0 }
        on && /"curve": \[$/ { in_curve = 1; next }
        in_curve && /^ *[0-9]+,$/ { gsub(/[ ,]/, "", $1); bytes = $1 }
        in_curve && /"value"/ { gsub(/ /, "", $2); print bytes "\t" $2 }
        on && /"instr_per_cycle"/ { in_curve = 0 }' status.json
}
# has_curve NAME POINTS: the program's curve in the daemon's status has so many points.
has_curve() { status >status.json && [ "$(curve "$1" | wc -l)" = "$2" ]; }
