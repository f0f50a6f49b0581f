# Services in the control groups of their units, on cgroup v2; sourced by init. lab/services.sh has their files.

# unit NAME COMMAND: starts a shell line in the control group that systemd gives the unit of that name.
unit() {
    mkdir -p "/sys/fs/cgroup/system.slice/$1.service"
    printf '%s\n' "$2" >"/lab/$1.sh"
    sh -c "echo \$\$ >/sys/fs/cgroup/system.slice/$1.service/cgroup.procs; cd /programs; exec sh /lab/$1.sh" </dev/null >"/lab/$1.out" 2>&1 &
    units="$units $!"
}
# blamed SERVICE: the services that cachemate says slow it down, or would without their confinement, with the evidence,
# the largest cause first, from status.json.
blamed() {
    awk -F '[:,]' -v name="\"$1.service\"" '
        /^  "services": \[$/ { on = 1 } /^  \]/ { on = 0 }
        on && /"(cache_by|prevented)": \[$/ { causes = 1; confined = /prevented/ ? ", confined" : ""; next }
        on && causes && /^      \]/ { causes = 0 }
        on && /"name"/ && !causes { of = $2; gsub(/ /, "", of) }
        on && causes && of == name && /"service"/ { by = $2; gsub(/[ "]|\.service/, "", by) }
        on && causes && of == name && /"percent"/ { percent = $2 + 0 }
        on && causes && of == name && /"source"/ { gsub(/[ "]/, "", $2); printf "%s%s (+%.0f %%, %s%s)", gap, by, percent, $2, confined; gap = " " }' status.json
}
is_measured() { status >status.json && case $(blamed redis) in *measured*) ;; *) false ;; esac; }
# cpu_ms PID: processor time of the live threads of a process, in milliseconds.
cpu_ms() { cat /proc/"$1"/task/*/schedstat | awk '{ ns += $1 } END { printf "%.3f", ns / 1e6 }'; }
seconds_up() { cut -d' ' -f1 /proc/uptime; }

scenario_services() {
    mount -t resctrl resctrl /sys/fs/resctrl
    ip link set lo up
    echo +cpu +memory >/sys/fs/cgroup/cgroup.subtree_control
    mkdir -p /sys/fs/cgroup/system.slice
    units=
    unit redis "exec redis-server --save '' --appendonly no --bind 127.0.0.1 --daemonize no"
    lab-program model 0 # filling the store takes long, and is not measured
    for try in 1 2 3 4 5 6 7 8 9 10; do grep -q 'Ready to accept' redis.out && break; usleep 200000; done
    redis-benchmark -q -t set -n 40000 -r 30000 -d 100 -P 32 -c 1 >fill.out 2>&1
    lab-program model 1
    sed 's/^/# store: /' fill.out | tr '\r' '\n' | tail -n 1
    unit clients 'exec redis-benchmark -q -l -t get -n 1000000 -r 30000 -P 8 -c 1'
    # Of the other units, a stream and a service that hardly runs, or three busy ones.
    case $scenario in
        *-batch)
            unit batch 'while :; do lab-program load stream batch 3 32768 400; done'
            unit quiet 'while :; do usleep 50000; done'
            usleep 1300000 # the machine's truth without cachemate
            ;;
        *)
            unit compress 'while :; do /usr/bin/xz -k -c -6 texts >/dev/null; done'
            unit sqlite 'while :; do /usr/bin/sqlite3 -init load.sql :memory: .quit >/dev/null; done'
            unit python 'exec python3 -S -E service.py'
            ;;
    esac
    usleep 300000
    started=$(seconds_up)
    manage 'window_ms = 500
[policy]
name = "auto"
parameters = { window_ns = 500_000_000 }
[[rules]]
service = "redis"
max_slowdown = "5%"
[[rules]]
kind = "unit"'
    pause_us=500000
    within 20 is_measured
    first=$(blamed redis)
    took=$(awk "BEGIN { printf \"%.1f\", $(seconds_up) - $started }")
    # The other suspects are paused meanwhile, and the status is not queried.
    before=$(cpu_ms "$daemon") since=$(seconds_up)
    usleep 7000000
    cost=$(awk "BEGIN { printf \"%.2f\", ($(cpu_ms "$daemon") - $before) / 10 / ($(seconds_up) - $since) }")
    status >status.json
    printf '# first: %s after %s s\n# blamed: %s after %s s\n' "${first:-none}" "$took" "$(blamed redis)" \
        "$(awk "BEGIN { printf \"%.1f\", $(seconds_up) - $started }")"
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    holds named "the culprit of redis is named with its measured share, seconds" "$took" "${first:-none}" "at most 20" \
        "$took <= 20 && ${#first} > 0" "$took"
    holds cost "processor time of the daemon, in percent of a CPU, over 7 s without a client" "$cost" - "at most 2" "$cost <= 2" "$cost"
    end
    if [ -d /sys/fs/cgroup/system.slice/batch.service ]; then # the truth without the stream
        kill -9 $(cat /sys/fs/cgroup/system.slice/batch.service/cgroup.procs)
        usleep 1300000
    fi
    tail -n 3 clients.out fill.out | tr '\r' '\n' | tail -n 6 | sed 's/^/# /'
    kill -9 $units
}
