# Programs that lab-phase runs; sourced by init.

# Programs of fixed work: each that is measured alone three times, after one run that fills the page cache, then each of
# /lab/pairs beside its co-runner.
scenario_forecast() {
    mkdir -p /programs
    for only in $(cut -d' ' -f1 /lab/pairs | sort -nu); do
        for phase in first alone alone alone; do lab-phase "$phase" first:2 /sys/fs/cgroup "$only"; done
    done
    while read -r program co_runner; do
        lab-phase "$program-$co_runner" first:2 /sys/fs/cgroup "$program" "$co_runner" </dev/null
    done </lab/pairs
}

# A user's programs: each alone, all together under the kernel alone, and all together with a policy.
scenario_programs() {
    seconds=$(cat /lab/seconds)
    mkdir -p /mnt/rdt /programs
    mount -t resctrl resctrl /sys/fs/resctrl 2>/dev/null
    all=$(seq 0 $(($(wc -l </lab/programs) - 1)))
    for only in $all; do lab-phase alone "$seconds" /sys/fs/cgroup "$only"; done
    lab-phase together "$seconds" /sys/fs/cgroup $all
    [ -e /lab/policy.toml ] || return 0
    manage "$(cat /lab/policy.toml)
[[rules]]
cgroup = \"/managed\""
    mkdir -p /sys/fs/cgroup/managed
    within 10 [ -S /run/lab/s.sock ]
    lab-phase managed "$seconds" /sys/fs/cgroup/managed $all
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    end
}
