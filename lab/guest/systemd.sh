#!/bin/sh
# Tests the packaged unit under systemd. Started by lab.service; results have the format of init. Values are read from
# the kernel and from systemd, not from cachemate's own output.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive
cd /lab || exit 1
report() { printf 'LAB\tsystemd.%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$(clean "$4")" "$(clean "$5")" "$(clean "$6")"; }
clean() { echo "$1" | tr '\n\t' '  ' | sed 's/ *$//'; }
same() { if [ "$3" = "$4" ]; then report "$1" "$2" met "$3" "$4" equal; else report "$1" "$2" FAIL "$3" "$4" equal; fi; }
within() {
    deadline=$(($(cut -d. -f1 /proc/uptime) + $1))
    shift
    until "$@"; do
        [ "$(cut -d. -f1 /proc/uptime)" -lt "$deadline" ] || return 1
        sleep 1
    done
}
property() { systemctl show -P "$1" cachemate.service; }
main_pid() { property MainPID; }
is_state() { [ "$(property ActiveState)" = "$1" ]; }
mask_of() { grep Cpus_allowed_list "/proc/$1/status" | cut -f2; }
journal() { ls /var/lib/cachemate/restore.journal >/dev/null 2>&1; }
no_journal() { ! journal; }
# CPUs of the threads, and of the group.
snapshot() {
    for pid in $pids; do mask_of "$pid"; done | tr '\n' ' '
    cat /sys/fs/cgroup/batch.slice/cpuset.cpus.effective
}
acts() { journal && [ "$(cat /sys/fs/cgroup/batch.slice/cpuset.cpus.effective)" = 2-3 ] && [ "$(mask_of "$first")" != 0-3 ]; }
restored() { no_journal && [ "$(snapshot)" = "$before" ]; }
# restored_after ID TITLE SECONDS: waits up to SECONDS until everything is restored.
restored_after() {
    within "$3" restored
    same "$1" "$2" "$before" "$(snapshot)"
}
stage() { report "$1" "$2" "$(if within 120 acts; then echo met; else echo FAIL; fi)" "$(snapshot)" "$(property ActiveState), $(property NRestarts) restarts" "batch.slice in 2-3, affinities"; }

mkdir -p /lab/bin
pids=''
for name in stream stencil gawk gzip; do
    printf '#!/bin/sh\nwhile :; do i=0; while [ $i -lt 500 ]; do i=$((i + 1)); done; /lab/busybox usleep 100000; done\n' >"/lab/bin/$name"
    chmod +x "/lab/bin/$name"
    systemd-run --quiet --collect --unit="$name" "/lab/bin/$name"
    pids="$pids $(systemctl show -P MainPID "$name.service")"
done
set -- $pids
first=$1
systemd-run --quiet --collect --unit=batch --slice=batch.slice /usr/bin/sleep 100000
systemctl set-property --runtime batch.slice AllowedCPUs=0-3
sleep 2
before=$(snapshot)
report before "programs under systemd $(systemctl --version | head -n 1 | cut -d' ' -f2), cgroup v2" note "$(stat -fc %T /sys/fs/cgroup)" "$before" -

dpkg --force-depends -i first.deb >dpkg.log 2>&1 || report install "the package installs" FAIL "$(tail -n 2 dpkg.log)" - -
same installed "installed: neither enabled nor started" "disabled inactive" "$(systemctl is-enabled cachemate.service) $(property ActiveState)"
exposure=$(systemd-analyze security cachemate.service 2>/dev/null | sed -n 's/.*Overall exposure level[^:]*: \([0-9.]*\).*/\1/p')
verdict=FAIL
[ -n "$exposure" ] && awk "BEGIN { exit !($exposure <= 3.0) }" && verdict=met
report exposure "systemd-analyze security: overall exposure" "$verdict" "${exposure:-none}" - "at most 3.0"
systemd-analyze security --no-pager cachemate.service 2>/dev/null | grep '✗' | sed 's/^/# /'

cat >/etc/cachemate/cachemate.toml <<'END'
mode = "act"
window_ms = 500
profiles = ["/lab/profiles"]
[rollback]
enabled = false
[policy]
name = "dio"
parameters = { window_cycles = 500_000_000 }
[[rules]]
command = "stream"
[[rules]]
command = "stencil"
[[rules]]
command = "gawk"
[[rules]]
command = "gzip"
[[cpusets]]
cgroup = "/batch.slice"
cpus = "2-3"
END
systemctl start cachemate.service >start.log 2>&1 || report start "the unit starts" FAIL "$(tail -n 1 start.log)" "$(journalctl -u cachemate -n 3 -o cat)" -
stage started "started: ready by notification, and acting"

systemctl stop cachemate.service
restored_after stopped "stopped: everything is as before" 30

systemctl start cachemate.service
within 120 acts
systemctl kill --kill-whom=all -s KILL cachemate.service
killed=$(snapshot)
restarted() { [ "$(property NRestarts)" -ge 1 ] && acts; }
if within 180 restarted; then verdict=met; else verdict=FAIL; fi
report killed "kill -9 of daemon and guardian: restored by the unit, started again, and acting" "$verdict" "$(property NRestarts) restarts" "$killed / $(snapshot)" "acting again"
journalctl -u cachemate.service -o cat --no-pager | tail -n 5 | sed 's/^/# /'
systemctl stop cachemate.service
restored_after killed-restored "then stopped: everything is as before" 60

# A hang: the packaged unit's watchdog waits for 60 s, this one for 10.
mkdir -p /run/systemd/system/cachemate.service.d
printf '[Service]\nWatchdogSec=10\n' >/run/systemd/system/cachemate.service.d/lab.conf
systemctl daemon-reload
systemctl reset-failed cachemate.service
systemctl start cachemate.service
within 120 acts
hung=$(main_pid)
kill -STOP "$hung"
another() { [ "$(main_pid)" != "$hung" ] && [ "$(main_pid)" != 0 ] && acts; }
if within 180 another; then verdict=met; else verdict=FAIL; fi
report watchdog "SIGSTOP: the watchdog ends the daemon, and the next one acts" "$verdict" "$hung, then $(main_pid)" "$(property NRestarts) restarts" "another process"
rm -r /run/systemd/system/cachemate.service.d
systemctl daemon-reload

upgraded=$(main_pid)
dpkg --force-depends --force-confold -i second.deb >dpkg.log 2>&1 || report upgrade "the package upgrades" FAIL "$(tail -n 2 dpkg.log)" - -
newer() { [ "$(main_pid)" != "$upgraded" ] && [ "$(main_pid)" != 0 ] && acts; }
if within 180 newer; then verdict=met; else verdict=FAIL; fi
report upgraded "upgraded while it acts: the new daemon acts, the configuration stays" "$verdict" "$(dpkg-query -W -f '${Version}' cachemate)" \
    "$(grep -c batch.slice /etc/cachemate/cachemate.toml) of 1 own lines" "another process"

dpkg --force-depends -r cachemate >dpkg.log 2>&1 || report remove "the package goes" FAIL "$(tail -n 2 dpkg.log)" - -
restored_after removed "removed while it acts: everything is as before" 60
same gone "the unit and its processes" "not-found 0" "$(systemctl show -P LoadState cachemate.service) $(/lab/busybox pidof cachemate | wc -w)"
printf 'LAB\tend\t%s s in the guest\n' "$(cut -d' ' -f1 /proc/uptime)"
