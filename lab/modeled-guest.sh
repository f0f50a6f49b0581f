# Sourced by the lab's scripts: builds the files of a guest on a modeled machine, and boots the guest. Expects $binary
# (cachemate), $cache and $out (directories). Both `make lab` and `cachemate lab run` use it.
. lab/packages.sh
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
tree=$cache/tree-11
kernel_pinned=linux-image-6.18.15+deb13-cloud-amd64
limit_seconds=${LAB_LIMIT_SECONDS:-1200} # a guest that hangs is ended

# The kernel with which the lab was developed or, if it is not available, the newest of its series.
kernel_package() {
    in_root apt-cache pkgnames linux-image-6.18. | grep -E '^linux-image-[0-9.]+\+deb13-cloud-amd64$' | sort -V |
        awk -v pinned="$kernel_pinned" '{ last = $1 } $1 == pinned { found = $1 } END { print found ? found : last }'
}

# vmlinux FILE: extracts the kernel from its compressed image, because it then boots in half the time.
vmlinux() {
    local magic unpack offset
    for magic in '\x28\xb5\x2f\xfd zstd' '\xfd7zXZ\x00 xz'; do
        unpack=${magic#* }
        for offset in $(LC_ALL=C grep -aboP "${magic% *}" "$1" | cut -d: -f1); do
            tail -c +$((offset + 1)) "$1" | "$unpack" -dc 2>/dev/null >"$2.new" || true
            [ "$(stat -c %s "$2.new")" -gt 10000000 ] && mv "$2.new" "$2" && return
        done
    done
    rm -f "$2.new"
    return 1
}

# Prepares packages, the kernel's image, the machine and the guest's programs; reports NOT RUN if one of them is not
# available.
prepare() {
    for tool in cc make zstd xz flock; do
        command -v "$tool" >/dev/null || not_run "$tool is missing on this host"
    done
    exec 9>"$cache/lock" # one at a time: another lab on this machine may be fetching just now
    flock 9
    [ -s "$tree/ready" ] || fetch "$tree" 'trixie trixie-backports' trixie-backports kernel_package
    kernel_tree=$tree
    if [ -n "${LAB_KERNEL:-}" ]; then
        kernel_tree=$cache/kernel-$LAB_KERNEL
        [ -s "$kernel_tree/ready" ] || fetch_kernel "$kernel_tree" trixie-backports "$LAB_KERNEL"
    fi
    [ -s "$kernel_tree/vmlinux" ] || vmlinux "$(kernel_file "$kernel_tree")" "$kernel_tree/vmlinux" ||
        not_run "the kernel's image cannot be unpacked"
    kernel=$(cat "$kernel_tree/ready")
    exec 9>&-
    loader=$(echo "$tree"/usr/lib64/ld-linux-x86-64.so.2)
    libraries=$tree/usr/lib/x86_64-linux-gnu
    make -s -C lab/machine OUT="$out/machine" >"$out/make.log" 2>&1 || not_run "the machine cannot be built (see $out/make.log)"
    for program in program phase kernels; do
        cc -O2 -o "$out/machine/lab-$program" "lab/guest/$program.c" -lpthread >>"$out/make.log" 2>&1 ||
            not_run "the guest's programs cannot be built (see $out/make.log)"
    done
}

# with_libraries FILE ROOT: a program in /bin, and its libraries.
with_libraries() {
    cp "$1" "$2/bin/"
    libraries_of "$1" "$2"
}
# libraries_of FILE ROOT: copies the host's libraries to which a program is linked; a script or a static program has none.
libraries_of() {
    local library
    { ldd "$1" 2>/dev/null || true; } | sed -n 's|^[^/]*\(/[^ ]*\).*|\1|p' | while read -r library; do
        mkdir -p "$2$(dirname "$library")"
        cp -L "$library" "$2$library"
    done
}

# with_interpreter SCRIPT: the program that its first line names, unless the guest has it; that of `env` is found by name.
with_interpreter() {
    local interpreter name
    read -r interpreter name _ < <(LC_ALL=C sed -n '1s/^#! *//p; q' "$1" | tr -d '\0') || true
    case $interpreter in
        */env) mkdir -p "$out/initramfs/usr/bin" && ln -sf /bin/busybox "$out/initramfs$interpreter" && interpreter=$(command -v "$name" || true) ;;
    esac
    [ -x "${interpreter:-/}" ] && [ ! -d "$interpreter" ] && [ ! -e "$out/initramfs$interpreter" ] || return 0
    case $interpreter in /bin/sh | /usr/bin/sh) return 0 ;; esac # busybox
    libraries_of "$interpreter" "$out/initramfs"
    mkdir -p "$out/initramfs$(dirname "$interpreter")"
    cp -L "$interpreter" "$out/initramfs$interpreter"
}

# with_programs FILE: the programs of command lines that name a path of this host, in $out/initramfs.
with_programs() {
    local program
    while read -r program _; do
        case $program in
            /*)
                [ -x "$program" ] || continue
                # Not in /bin, where it could replace a program that the guest itself needs.
                libraries_of "$program" "$out/initramfs"
                mkdir -p "$out/initramfs$(dirname "$program")"
                cp "$program" "$out/initramfs$program"
                with_interpreter "$program"
                ;;
        esac
    done <"$1"
}

# Creates the guest's files in $out/initramfs; `pack` makes the archive.
initramfs() {
    local root=$out/initramfs
    rm -rf "$root"
    mkdir -p "$root/bin" "$root/lab"
    cp "$(ls "$tree/bin/busybox" "$tree/usr/bin/busybox" 2>/dev/null | head -n 1)" "$root/bin/"
    with_libraries "$binary" "$root"
    strip "$root/bin/$(basename "$binary")" 2>/dev/null || true
    [ "$(basename "$binary")" = cachemate ] || mv "$root/bin/$(basename "$binary")" "$root/bin/cachemate"
    with_libraries "$out/machine/lab-program" "$root"
    with_libraries "$out/machine/lab-phase" "$root"
    with_libraries "$out/machine/lab-kernels" "$root"
    cp lab/guest/init "$root/init"
    cp lab/guest/{scenarios,deaths,programs,evidence,auto,nodes,sweep,traces,host-changes,services,shell}.sh "$root/lab/"
    chmod +x "$root/init"
}
pack() { (cd "$out/initramfs" && find . | LC_ALL=C sort | bin/busybox cpio -o -H newc 2>/dev/null) >"$out/initramfs.cpio"; }

progress() { :; } # of a guest, once per second
# follow PID: waits for a guest's `timeout`. The seconds that its threads ran, and waited for a CPU of this host, are
# in $ran and $waited; $code is 124 if the guest was killed at the limit.
follow() {
    local guest
    ran=0 waited=0 code=0
    while kill -0 "$1" 2>/dev/null; do
        guest=$(cut -d' ' -f1 "/proc/$1/task/$1/children" 2>/dev/null || true)
        read -r ran waited < <(cat /proc/"${guest:-none}"/task/*/schedstat 2>/dev/null |
            awk -v ran="$ran" -v waited="$waited" '{ r += $1; w += $2 }
                END { print r ? int(r / 1e9) : ran, r ? int(w / 1e9) : waited }')
        progress
        sleep 1
    done
    wait "$1" || code=$?
    trap - EXIT
}
# starved: true if the guest was killed although it might have finished on an idle host. Code 137 means SIGKILL.
starved() { { [ "$code" = 124 ] || [ "$code" = 137 ]; } && [ $((4 * waited)) -gt "$limit_seconds" ]; }

# machine_command NAME MACHINE-CONFIG INITRAMFS: the emulator's command for a modeled machine, in $machine_command. In
# the configuration, `# cpu OPTIONS` adds options of the processor, and `# qemu OPTIONS` adds other options. `rdt=`: an
# erratum of the processor whose PEBS is modeled lets the kernel disable way masks and occupancy, which the model has.
machine_command() {
    local name=$1 config=$2 initramfs=$3 smp memory processor more=()
    smp=$(awk '$1 == "cpus" { cpus = $2 } $1 == "cpus_per_l3" { each = $2 }
        END { print cpus ",sockets=" cpus / each ",cores=" each ",threads=1" }' "$config")
    processor=$(sed -n 's/^# cpu /,/p' "$config")
    read -ra more < <(sed -n 's/^# qemu //p' "$config") || true
    memory=$(awk '$1 == "memory_bytes" { print $2 / 1048576 "M" }' "$config")
    machine_command=(nice -n "${LAB_NICE:-10}" "$loader" --preload "$out/machine/machine.so"
        --library-path "$libraries" "$tree/usr/bin/qemu-system-x86_64" -L "$tree/usr/share/qemu"
        -L "$tree/usr/share/seabios" -accel tcg,thread=multi -M q35
        -cpu "max,vendor=GenuineIntel,-monitor,level=0x16$processor" -smp "$smp" -m "$memory" -nographic -nodefaults -no-reboot
        "${more[@]}" -rtc clock=vm -chardev stdio,signal=off,id=console -serial chardev:console
        -kernel "$kernel_tree/vmlinux" -initrd "$initramfs"
        -plugin "$out/machine/machine.so,config=$config" -append "console=ttyS0 quiet panic=-1 tsc=reliable idle=halt
no_timer_check rdt=cmt,l3cat mitigations=off nmi_watchdog=0 nokaslr lpj=8000000 cryptomgr.notests
initcall_blacklist=load_system_certificate_list,tracer_init_tracefs,event_trace_init lab=$name")
    machine_command[-1]=${machine_command[-1]//$'\n'/ }
}

# boot NAME MACHINE-CONFIG INITRAMFS: runs one guest until it powers off; its console output is in $out/NAME.log.
boot() {
    local name=$1
    machine_command "$@"
    one_guest
    timeout --kill-after=5 "$limit_seconds" "${machine_command[@]}" </dev/null >"$out/$name.log" 2>&1 8>&- &
    trap "kill $! 2>/dev/null || true" EXIT
    follow "$!"
    guest_over
    if grep -q 'version 7 of the plugin' "$out/$name.log"; then
        not_run "this QEMU is not 11.1: its plugin interface is another one"
    fi
}

# programs_run CONSOLE: the lines of lab-phase about programs that have run
programs_run() { tr -d '\r' <"$1" | grep -ao 'PROGRAM	.*' | cut -f2- || true; }
# phase_table TRUTH RAN: these lines with each process's counts in the truth file (lab/programs.sh has the columns)
phase_table() {
    awk -F '\t' -v OFS='\t' '
        FNR == 1 && NR == 1 { for (i = 1; i <= NF; i++) { at[$i] = i; if ($i ~ /^l3_.*_lines$/) l3[i] }; next }
        FNR == NR {
            if (NF < at["cycles"] || $at["name"] == "lab-phase") next # before it becomes the program
            thread = $at["tid"] " " $at["name"]
            process[thread] = $at["pid"]
            instructions[thread] = $at["instructions"]; user[thread] = $at["user_instructions"]; cycles[thread] = $at["cycles"]
            misses[thread] = $at["l3_misses"]; others[thread] = $at["others"]
            bandwidth[thread] = $at["bandwidth_cycles"]
            lines[thread] = $at["read_lines"] + $at["written_lines"]
            for (i in l3) if ($i > most[thread]) most[thread] = $i
            next
        }
        {
            i = u = c = m = o = b = h = w = found = 0
            for (t in process) if (process[t] == $4) {
                found = 1
                i += instructions[t]; u += user[t]; c += cycles[t]; m += misses[t]; o += others[t]; b += 64 * lines[t]; h += 64 * most[t]; w += bandwidth[t]
            }
            printf "%s\t%s\t%s\t%s\t%s\t%s\t%s", $1, $2, $3, $5, $6, $7, $8
            if (found) printf "\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\n", i, u, c, m, o, b, h, w
            else printf "\t-\t-\t-\t-\t-\t-\t-\t-\n"
        }' "$@"
}

# lab_command: the command that repeats this run.
lab_command() {
    local variable
    for variable in LAB_SCENARIOS LAB_FULL LAB_SEED LAB_PAIRS LAB_DEATHS LAB_MEASURED LAB_REMEASURED LAB_MACHINE LAB_KERNEL; do
        [ -z "${!variable:-}" ] || printf "%s='%s' " "$variable" "${!variable}"
    done
    echo "make lab"
}

# report: prints the table and writes $out/result.json. A missed target does not fail the run, whereas a figure that
# could not be measured, or a host that was not restored, does.
report() {
    local failed missed
    printf '\nFigures of a modeled machine\n'
    awk -F '\t' '{ printf "%-24s %-6s %-58s %-34s %-34s %s\n", $1, $3, substr($2, 1, 58), substr($4, 1, 34), substr($5, 1, 34), $6 }' \
        "$out/results.tsv"
    awk -F '\t' -v kernel="$kernel" -v commit="$(git rev-parse --short=12 HEAD 2>/dev/null || true)" \
        -v command="$(lab_command)" -v seconds=$(($(date +%s) - started)) '
        function text(s) { gsub(/\\/, "\\\\", s); gsub(/"/, "\\\"", s); gsub(/[[:cntrl:]]/, " ", s); return "\"" s "\"" }
        function passed(s) { return s == "met" ? "true" : s == "FAIL" || s == "missed" ? "false" : "null" }
        BEGIN { printf "{\n  \"ran\": true,\n  \"machine\": \"modeled\",\n  \"kernel\": %s,\n  \"commit\": %s,\n  \"command\": %s,\n  \"lines\": [", text(kernel), commit == "" ? "null" : text(commit), text(command) }
        { printf "%s\n    { \"id\": %s, \"title\": %s, \"passed\": %s, \"reported\": %s, \"modeled\": %s, \"target\": %s }",
              (NR > 1 ? "," : ""), text($1), text($2), passed($3), text($4), text($5), text($6)
          failed += $3 == "FAIL"; missed += $3 == "missed"; met += $3 == "met" }
        END { printf "\n  ],\n  \"met\": %d,\n  \"missed\": %d,\n  \"failed\": %d,\n  \"seconds\": %d\n}\n", met, missed, failed, seconds }
    ' "$out/results.tsv" >"$out/result.json"
    failed=$(awk -F '\t' '$3 == "FAIL"' "$out/results.tsv" | wc -l)
    missed=$(awk -F '\t' '$3 == "missed"' "$out/results.tsv" | wc -l)
    printf '\n%s: %s lines, %s targets missed, %s failed, %s s; %s\n' "$kernel" "$(wc -l <"$out/results.tsv")" \
        "$missed" "$failed" $(($(date +%s) - started)) "$out/result.json"
    [ "$failed" = 0 ]
}
