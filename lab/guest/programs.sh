# A user's programs: each alone, all together under the kernel alone, and all together with a policy. Sourced by init.

# start NUMBER COMMAND-LINE: in the background; pid and start are kept by number
start_program() {
    eval "began_$1=$(now_ms)"
    sh -c "echo \$\$ >$group/cgroup.procs; cd /programs; exec $2" >"/lab/$1.out" 2>&1 &
    eval "pid_$1=$!"
}
now_ms() { awk '{ printf "%d", $1 * 1000 }' /proc/uptime; }
gone() { ! kill -0 "$1" 2>/dev/null; }

# phase NAME FIRST LAST: these programs at once until all have ended, or the time is over
phase() {
    number=0
    while read -r line; do
        [ "$number" -lt "$2" ] || [ "$number" -gt "$3" ] || start_program "$number" "$line"
        number=$((number + 1))
    done </lab/programs
    over=$(($(now_ms) + seconds * 1000))
    left=$(seq "$2" "$3")
    while [ -n "$left" ]; do
        still=''
        for number in $left; do
            eval "pid=\$pid_$number began=\$began_$number"
            ended=yes
            if ! gone "$pid"; then
                [ "$(now_ms)" -ge "$over" ] || { still="$still $number"; continue; }
                ended=no
                kill -9 "$pid"
            fi
            printf 'PROGRAM\t%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$number" "$(sed -n "$((number + 1))p" /lab/programs)" "$pid" \
                "$(awk "BEGIN { print ($(now_ms) - $began) / 1000 }")" "$ended"
            wait "$pid" 2>/dev/null
        done
        left=$still
        usleep 5000
    done
}

scenario_programs() {
    seconds=$(cat /lab/seconds)
    count=$(wc -l </lab/programs)
    mkdir -p /mnt/rdt /programs
    mount -t resctrl resctrl /sys/fs/resctrl 2>/dev/null
    group=/sys/fs/cgroup
    for only in $(seq 0 $((count - 1))); do phase alone "$only" "$only"; done
    phase together 0 $((count - 1))
    [ -e /lab/policy.toml ] || return 0
    manage "$(cat /lab/policy.toml)
[[rules]]
cgroup = \"/managed\""
    group=/sys/fs/cgroup/managed
    mkdir -p "$group"
    within 10 [ -S /run/lab/s.sock ]
    phase managed 0 $((count - 1))
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    end
}
