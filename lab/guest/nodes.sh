# Two memory nodes, and the kernel's own cache-aware scheduling if it has one (7.2 and later); sourced by init. Caches
# cost nothing here, because only values that are read are checked.

knobs=/sys/kernel/debug/sched/llc_balancing
# told_nodes: the memory node of each CPU, according to cachemate.
told_nodes() { cachemate topology --json | sed -n 's/.*"memory_node": \([0-9]*\).*/\1/p' | tr '\n' ' ' | sed 's/ $//'; }
kernel_nodes() { for cpu in /sys/devices/system/cpu/cpu[0-9]*; do ls -d "$cpu"/node* | sed 's/.*node//'; done | tr '\n' ' ' | sed 's/ $//'; }
# told_gathering: the report of doctor on the kernel's own cache-aware scheduling.
told_gathering() { cachemate doctor --quick 2>/dev/null | sed -n "s/^the kernel's own cache-aware scheduling: //p"; }

scenario_nodes() {
    lab-program model 0
    mount -t debugfs debugfs /sys/kernel/debug
    report kernel-release "the kernel" note - "$(uname -r)" -
    same nodes "memory node of each CPU: by the kernel, by topology" "$(kernel_nodes)" "$(told_nodes)"
    holds two "memory nodes of the guest" - "$(ls -d /sys/devices/system/node/node[0-9]* | wc -l)" 2 "$(ls -d /sys/devices/system/node/node[0-9]* | wc -l) == 2" \
        "$(ls -d /sys/devices/system/node/node[0-9]* | wc -l)"
    if [ ! -e "$knobs/enabled" ]; then
        holds none "doctor where the kernel has no cache-aware scheduling" "$(told_gathering)" "none in $(uname -r)" "not said to be on" \
            "$(told_gathering | grep -c '^on')== 0" "$(told_gathering | grep -c '^on')"
        return
    fi
    for balancing in 1 0; do
        echo "$balancing" >/proc/sys/kernel/numa_balancing
        [ "$balancing" = 1 ] && footprints="footprints are counted by NUMA balancing" ||
            footprints="footprints are ignored, because NUMA balancing is off or there is one memory node"
        same "footprints-$balancing" "NUMA balancing $balancing: doctor, of the kernel's files" \
            "on, tolerance $(cat $knobs/aggr_tolerance); $footprints" "$(told_gathering)"
    done
}
