#!/usr/bin/env bash
# The lab without a cache model: boots a current Linux kernel under an emulated machine (QEMU, no KVM needed) and runs
# in it the same cachemate binary as on this host. It covers two and four last-level caches, affinities on eight CPUs,
# the real resctrl with its real refusals, and restoring after kill -9. docs/lab-tests.md describes what it shows and its
# limits.
# Needs apt on a Debian host: QEMU, kernel and busybox come from Debian packages in a separate root, verified by apt's
# signatures; nothing is installed. If they are not available, it prints NOT RUN and exits with 0.
# Usage: lab/run.sh [BINARY]    (target/chaos/cachemate, which make lab builds; results go to target/lab/plain)
# LAB_CACHE: directory of packages. LAB_PARTS: run only these guests. LAB_LIMIT_SECONDS: limit of one guest.
set -euo pipefail
cd "$(dirname "$0")/.."
binary=${1:-target/chaos/cachemate}
cache=${LAB_CACHE:-${XDG_CACHE_HOME:-${HOME:-$PWD/target}/.cache}/cachemate/lab}
out=target/lab/plain
parts=${LAB_PARTS:-two four ways}
limit_seconds=${LAB_LIMIT_SECONDS:-600} # a guest that hangs is ended
started=$(date +%s)
mkdir -p "$out" "$cache"
cache=$(cd "$cache" && pwd)
tree=$cache/tree
rm -f "$out"/*.log "$out/results.tsv" "$out/result.json"

. lab/packages.sh

# ---- packages -------------------------------------------------------------------------------------------------------

# The kernel: the newest of the series with which the lab was developed, or of the nearest series with all required
# features.
kernel_package() {
    local series found
    for series in 6.18 6.17 6.16 6.19; do
        found=$(in_root apt-cache pkgnames "linux-image-$series." | grep -E '^linux-image-[0-9.]+\+deb13-cloud-amd64$' |
            sort -V | tail -n 1)
        [ -n "$found" ] && echo "$found" && return
    done
}

[ -x "$binary" ] || { echo "lab: no $binary; make lab makes it" >&2; exit 1; }
has_chaos || not_run "$NO_CHAOS"
# One at a time, because another lab on this machine may be fetching packages.
exec 9>"$cache/lock"
flock 9
[ -s "$tree/ready" ] || fetch "$tree" 'bookworm bookworm-backports trixie-backports' bookworm-backports kernel_package
exec 9>&-
loader=$tree/lib64/ld-linux-x86-64.so.2
libraries=$tree/lib/x86_64-linux-gnu:$tree/usr/lib/x86_64-linux-gnu
qemu() {
    "$loader" --library-path "$libraries" "$tree/usr/bin/qemu-system-x86_64" \
        -L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" "$@"
}
vmlinuz=$(echo "$tree"/boot/vmlinuz-*)
qemu --version >"$out/qemu.log" 2>&1 || not_run "QEMU does not start (see $out/qemu.log)"

# ---- what the guest has ---------------------------------------------------------------------------------------------

initramfs() {
    local root=$out/initramfs library
    rm -rf "$root"
    mkdir -p "$root/bin" "$root/lab/profiles"
    cp "$tree/bin/busybox" "$root/bin/"
    cp lab/guest.sh "$root/init"
    cp "$binary" "$root/bin/cachemate"
    strip "$root/bin/cachemate" 2>/dev/null || true # symbols of a release build are many times its size
    # The same binary as on this host, with its libraries.
    ldd "$binary" 2>/dev/null | grep -o '/[^ ]*' | while read -r library; do
        mkdir -p "$root$(dirname "$library")"
        cp -L "$library" "$root$library"
    done
    for name in stream stencil link-parser cc1 perl povray gawk gzip; do
        "$binary" --quiet profile "recordings/$name.cmt" -o "$root/lab/profiles/$name.json" --force >/dev/null
    done
    chmod +x "$root/init"
    (cd "$root" && find . | LC_ALL=C sort | bin/busybox cpio -o -H newc 2>/dev/null) >"$out/initramfs.cpio"
}

# guest PART SMP CPU KERNEL-OPTIONS
# no_timer_check: on a busy host, the kernel would otherwise conclude that its timer does not tick, and panic.
guest() {
    local part=$1 since seconds
    one_guest
    since=$(date +%s)
    echo "guest '$part' ..."
    timeout --kill-after=5 "$limit_seconds" "$loader" --library-path "$libraries" "$tree/usr/bin/qemu-system-x86_64" \
        -L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" \
        -accel tcg,thread=multi -M q35 -cpu "$3" -smp "$2" -m 1G -nographic -nodefaults -no-reboot -serial stdio \
        -kernel "$vmlinuz" -initrd "$out/initramfs.cpio" -append "console=ttyS0 quiet panic=-1 no_timer_check $4 lab=$part" \
        </dev/null >"$out/$part.log" 2>&1 8>&- || true
    guest_over
    seconds=$(($(date +%s) - since))
    tr -d '\r' <"$out/$part.log" | grep -ao 'LAB	.*' | cut -f2- >"$out/$part.tsv" || true
    if ! grep -q '	end	ok	' "$out/$part.tsv"; then
        printf '%s\tend\tFAIL\tthe guest did not come to its end, %s s of at most %s (see %s)\n' "$part" "$seconds" "$limit_seconds" \
            "$out/$part.log" >>"$out/$part.tsv"
    fi
    sed "s/\(	end	ok	.*\)/\1, $seconds s here/" "$out/$part.tsv" >>"$out/results.tsv"
    rm "$out/$part.tsv"
}

initramfs
for part in $parts; do
    case $part in
        two) guest two 8,sockets=2,cores=4,threads=1 max,vendor=GenuineIntel '' ;;
        four) guest four 8,sockets=4,cores=2,threads=1 max,vendor=GenuineIntel setcpuid=rdt_a,cat_l3 ;;
        # These options give the emulated machine eight classes of service, and disable load balancing.
        ways) guest ways 8,sockets=2,cores=4,threads=1 max,vendor=GenuineIntel,level=0xb \
            'setcpuid=rdt_a,cat_l3 isolcpus=domain,0-6' ;;
        *) echo "lab: no part '$part'" >&2; exit 2 ;;
    esac
done

# ---- results --------------------------------------------------------------------------------------------------------

printf '\n'
awk -F '\t' '{ printf "%-5s %-5s %-46s %s\n", $1, $3, $2, substr($4, 1, 150) }' "$out/results.tsv"
awk -F '\t' -v kernel="$(cat "$tree/ready")" -v seconds=$(($(date +%s) - started)) '
    function text(s) { gsub(/\\/, "\\\\", s); gsub(/"/, "\\\"", s); gsub(/[[:cntrl:]]/, " ", s); return "\"" s "\"" }
    function passed(s) { return s == "ok" ? "true" : s == "FAIL" ? "false" : "null" }
    BEGIN { printf "{\n  \"ran\": true,\n  \"kernel\": %s,\n  \"checks\": [", text(kernel) }
    { printf "%s\n    { \"part\": %s, \"check\": %s, \"passed\": %s, \"detail\": %s }", (NR > 1 ? "," : ""),
          text($1), text($2), passed($3), text($4); failed += $3 == "FAIL"; passes += $3 == "ok" }
    END { printf "\n  ],\n  \"passed\": %d,\n  \"failed\": %d,\n  \"seconds\": %d\n}\n", passes, failed, seconds }
' "$out/results.tsv" >"$out/result.json"
failed=$(grep -c '	FAIL	' "$out/results.tsv" || true)
printf '\n%s: %s checks, %s failed, %s s; %s\n' "$(cat "$tree/ready")" "$(grep -vc '	note	' "$out/results.tsv")" "$failed" \
    $(($(date +%s) - started)) "$out/result.json"
[ "$failed" = 0 ]
