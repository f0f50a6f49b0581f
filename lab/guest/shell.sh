# An interactive shell on the guest's console. Sourced by init.
scenario_shell() {
    mount -t resctrl resctrl /sys/fs/resctrl 2>/dev/null
    echo 1 >/proc/sys/kernel/printk
    cat <<'END'

This is a modeled machine: unmodified kernel, modeled caches, counters and masks. `exit` ends it.
  cachemate topology                            the caches, as the kernel has them
  cachemate doctor --quick                      what can be measured and changed here
  lab-program load chase victim 0 3072 500      dependent loads through 3 MiB on CPU 0 for 500 ms: ns per load
  lab-program load stream s 1 32768 5000 &      a stream on CPU 1 in the background; then run the victim again
  cachemate manage --observe-only &             the daemon; then cachemate status
END
    command -v perf >/dev/null && echo '  perf stat -e instructions,cache-misses COMMAND'
    echo
    setsid cttyhack sh -i 2>&1 || sh -i
}
