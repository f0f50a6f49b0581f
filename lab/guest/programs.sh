# Runs a user's programs: each alone, all together under the kernel alone, and all together under a policy. Sourced by
# init.

# While programs run, the shell uses built-ins only, because each process that it starts would take CPU time and cache
# from them.

# clock: hundredths of a second since boot, in $now.
clock() {
    read -r up _ </proc/uptime
    now=$((${up%.*} * 100 + 1${up#*.} - 100))
}
# start_program NUMBER COMMAND-LINE: starts a program in the background, and stores its pid and start by number.
start_program() {
    clock
    eval "began_$1=$now"
    sh -c "echo \$\$ >$group/cgroup.procs; cd /programs; exec $2" >"/lab/$1.out" 2>&1 3<&- &
    eval "pid_$1=$!"
}
# ended PID: true if the process has exited, or is a zombie.
ended() {
    { read -r state <"/proc/$1/stat"; } 2>/dev/null || return 0
    case ${state##*) } in [ZX]*) return 0 ;; esac
    return 1
}

# phase NAME NUMBER...: runs these programs at once until all have ended, or the time is over.
phase() {
    name=$1
    shift
    number=0
    while read -r line; do
        eval "line_$number=\$line"
        number=$((number + 1))
    done </lab/programs
    for number in "$@"; do
        eval "line=\$line_$number"
        start_program "$number" "$line"
    done
    clock
    over=$((now + seconds * 100))
    left=$*
    ran=
    while [ -n "$left" ]; do
        still=
        for number in $left; do
            eval "pid=\$pid_$number began=\$began_$number"
            clock
            result=yes
            if ! ended "$pid"; then
                [ "$now" -ge "$over" ] || { still="$still $number"; continue; }
                result=no
                kill -9 "$pid"
            fi
            ran="$ran $number:$((now - began)):$result"
        done
        left=$still
        [ -z "$left" ] || read -r -t 0.02 _ <&3 # a sleep without a process: nothing is ever written there
    done
    wait $(for number in "$@"; do eval "echo \$pid_$number"; done) 2>/dev/null
    for one in $ran; do
        number=${one%%:*}
        took=${one#*:}
        result=${took#*:}
        took=${took%:*}
        eval "pid=\$pid_$number line=\$line_$number"
        printf 'PROGRAM\t%s\t%s\t%s\t%s\t%d.%02d\t%s\n' "$name" "$number" "$line" "$pid" $((took / 100)) $((took % 100)) "$result"
    done
}

scenario_programs() {
    seconds=$(cat /lab/seconds)
    count=$(wc -l </lab/programs)
    mkdir -p /mnt/rdt /programs
    mount -t resctrl resctrl /sys/fs/resctrl 2>/dev/null
    all=$(seq 0 $((count - 1)))
    mkfifo /run/pause
    exec 3<>/run/pause
    group=/sys/fs/cgroup
    for only in $all; do phase alone "$only"; done
    phase together $all
    [ -e /lab/policy.toml ] || return 0
    manage "$(cat /lab/policy.toml)
[[rules]]
cgroup = \"/managed\""
    group=/sys/fs/cgroup/managed
    mkdir -p "$group"
    within 10 [ -S /run/lab/s.sock ]
    phase managed $all
    cachemate status --socket /run/lab/s.sock | sed 's/^/# /'
    end
}
