# Services in the control groups of their units, on cgroup v2; sourced by init. lab/services.sh has their files.

# unit NAME COMMAND: starts a shell line in the control group that systemd gives the unit of that name.
unit() {
    mkdir -p "/sys/fs/cgroup/system.slice/$1.service"
    printf '%s\n' "$2" >"/lab/$1.sh"
    sh -c "echo \$\$ >/sys/fs/cgroup/system.slice/$1.service/cgroup.procs; cd /programs; exec sh /lab/$1.sh" </dev/null >"/lab/$1.out" 2>&1 &
    units="$units $!"
}
# blamed SERVICE: the services that cachemate says slow it down, the largest cause first, from status.json.
blamed() {
    awk -F '[:,]' -v name="\"$1.service\"" '
        /^  "services": \[$/ { on = 1 } /^  \]/ { on = 0 }
        on && /"slowdown_by": \[$/ { causes = 1; next }
        on && causes && /\]/ { causes = 0 }
        on && /"name"/ && !causes { of = $2; gsub(/ /, "", of) }
        on && causes && of == name && /"service"/ { by = $2; gsub(/[ "]|\.service/, "", by) }
        on && causes && of == name && /"percent"/ { gsub(/ /, "", $2); printf "%s%s (+%.0f %%)", gap, by, $2; gap = " " }' status.json
}
is_blamed() { status >status.json && [ -n "$(blamed redis)" ]; }
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
    unit compress 'while :; do /usr/bin/xz -k -c -6 texts >/dev/null; done'
    unit sqlite 'while :; do /usr/bin/sqlite3 -init load.sql :memory: .quit >/dev/null; done'
    unit python 'exec python3 -S -E service.py'
    usleep 300000
    started=$(seconds_up)
    manage 'window_ms = 500
[policy]
name = "auto"
parameters = { window_ns = 500_000_000 }
[[rules]]
kind = "unit"'
    pause_us=500000
    within 20 is_blamed
    took=$(awk "BEGIN { printf \"%.1f\", $(seconds_up) - $started }")
    found=$(blamed redis)
    printf '# blamed: %s after %s s\n' "${found:-none}" "$took"
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    holds named "the culprit of redis is named, seconds" "$took" "${found:-none}" "at most 20" "$took <= 20 && ${#found} > 0" "$took"
    end
    tail -n 3 clients.out fill.out | tr '\r' '\n' | tail -n 6 | sed 's/^/# /'
    kill -9 $units
}
