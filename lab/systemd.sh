#!/usr/bin/env bash
# A guest with systemd as process 1 and cgroup v2: the packaged unit is installed, started, killed, upgraded and removed.
# The guest has no modeled caches, because nothing is measured. docs/lab-tests.md lists the questions.
# Usage: lab/systemd.sh BINARY    (a release build without --features chaos; results go to target/lab/systemd)
# LAB_CACHE: the directory of packages. LAB_LIMIT_SECONDS: limit of the guest.
set -euo pipefail
cd "$(dirname "$0")/.."
binary=${1:-target/release/cachemate}
cache=${LAB_CACHE:-${XDG_CACHE_HOME:-${HOME:-$PWD/target}/.cache}/cachemate/lab}
out=$PWD/target/lab/systemd
limit_default=900
mkdir -p "$out"
rm -f "$out"/*.log "$out/results.tsv" "$out/result.json"
started=$(date +%s)
[ -x "$binary" ] || { echo "lab: no $binary; make build makes it" >&2; exit 1; }
. lab/modeled-guest.sh
limit_seconds=${LAB_LIMIT_SECONDS:-$limit_default}
! has_chaos || not_run "$binary is built with --features chaos; a package has no policies of tests"
command -v dpkg-shlibdeps >/dev/null || not_run "dpkg-dev is missing on this host"

system=$cache/system-13
system_packages="systemd base-files base-passwd bash coreutils dash debianutils diffutils dpkg findutils grep gzip init-system-helpers
libc-bin mount perl-base procps sed tar util-linux"
# fetch_system: unpacks a Debian system from packages, without configuring any of them.
fetch_system() {
    apt_root trixie
    # shellcheck disable=SC2086 # the list is meant to be split
    in_root apt-get install -y --download-only --no-install-recommends $system_packages >>"$out/apt.log" 2>&1 ||
        not_run "systemd cannot be had (see $out/apt.log)"
    local package
    rm -rf "$system" "$system.new"
    mkdir -p "$system.new"
    # The links of the merged /usr must exist first.
    for package in "$root"/cache/archives/base-files_*.deb "$root"/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$system.new" || not_run "$package cannot be unpacked"
    done
    (cd "$system.new" && rm -rf usr/share/doc usr/share/man usr/share/locale usr/share/i18n usr/share/info usr/share/bug \
        usr/lib/x86_64-linux-gnu/gconv usr/share/zoneinfo usr/lib/udev/hwdb.d usr/lib/systemd/catalog)
    echo "$(dpkg-deb -f "$root"/cache/archives/systemd_*.deb Version)" >"$system.new/ready"
    mv "$system.new" "$system"
    rm -rf "$root"
}

# Builds the unit's package, and the same package with a higher version.
packages() {
    local package higher=$out/higher
    rm -rf "$out/packages" "$higher"
    mkdir -p "$out/packages"
    package=$(packaging/deb.sh cachemate "$binary" "$out/packages" 2>"$out/deb.log") || not_run "the package cannot be built (see $out/deb.log)"
    mv "$package" "$out/packages/first.deb"
    # Recordings are left out, because the guest does not need them and unpacking takes long.
    dpkg-deb -R "$out/packages/first.deb" "$higher"
    find "$higher/usr/share/cachemate/recordings" "$higher/usr/share/man" -type f -delete
    sed -i '\|usr/share/cachemate/recordings\|usr/share/man|d' "$higher/DEBIAN/md5sums"
    dpkg-deb -Znone --root-owner-group --build "$higher" "$out/packages/first.deb" >/dev/null
    sed -i 's/^Version: .*/&+lab1/' "$higher/DEBIAN/control"
    dpkg-deb -Znone --root-owner-group --build "$higher" "$out/packages/second.deb" >/dev/null
    rm -rf "$higher"
}

system_image() {
    local image=$out/image name unit
    rm -rf "$image"
    cp -a "$system" "$image"
    mkdir -p "$image"/{proc,sys,dev,run,tmp,root,lab/profiles,var/lib/dpkg/info,var/lib/dpkg/updates,var/log,etc/systemd/system}
    : >"$image/var/lib/dpkg/status"
    : >"$image/etc/machine-id"
    cp "$image/usr/share/base-passwd/passwd.master" "$image/etc/passwd"
    cp "$image/usr/share/base-passwd/group.master" "$image/etc/group"
    printf 'lab\n' >"$image/etc/hostname"
    ln -sf mawk "$image/usr/bin/awk"
    cp lab/guest/systemd.sh "$image/lab/test.sh"
    cp lab/guest/lab.service "$image/etc/systemd/system/"
    for unit in serial-getty@ttyS0.service getty.target systemd-hwdb-update.service ldconfig.service \
        systemd-journal-catalog-update.service systemd-update-done.service systemd-logind.service systemd-firstboot.service \
        systemd-modules-load.service systemd-pcrphase.service systemd-binfmt.service systemd-update-utmp.service; do
        ln -sf /dev/null "$image/etc/systemd/system/$unit"
    done
    cp "$out"/packages/*.deb "$image/lab/"
    cp "$(ls "$tree/bin/busybox" "$tree/usr/bin/busybox" 2>/dev/null | head -n 1)" "$image/lab/busybox"
    for name in stream stencil gawk gzip; do
        "$binary" --quiet profile "recordings/$name.cmt" -o "$image/lab/profiles/$name.json" --force >/dev/null
    done
    chmod +x "$image/lab/test.sh"
    (cd "$image" && find . | LC_ALL=C sort | "$out/busybox" cpio -o -H newc 2>/dev/null) >"$out/image.cpio"
    rm -rf "$image"
}

prepare
cp "$(ls "$tree/bin/busybox" "$tree/usr/bin/busybox" 2>/dev/null | head -n 1)" "$out/busybox"
exec 9>"$cache/lock"
flock 9
[ -s "$system/ready" ] || fetch_system
exec 9>&-
packages
system_image
one_guest
echo "guest 'systemd' (systemd $(cat "$system/ready")) ..."
timeout --kill-after=5 "$limit_seconds" nice -n "${LAB_NICE:-10}" "$loader" --library-path "$libraries" \
    "$tree/usr/bin/qemu-system-x86_64" -L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" -accel tcg,thread=multi -M q35 \
    -cpu max,vendor=GenuineIntel -smp 4,sockets=2,cores=2,threads=1 -m 1536M -nographic -nodefaults -no-reboot -serial stdio \
    -kernel "$kernel_tree/vmlinux" -initrd "$out/image.cpio" -append "console=ttyS0 quiet panic=-1 no_timer_check mitigations=off \
cryptomgr.notests initcall_blacklist=load_system_certificate_list rdinit=/usr/lib/systemd/systemd systemd.unit=lab.service \
systemd.show_status=0 systemd.default_timeout_start_sec=600 systemd.log_target=console systemd.log_level=warning" \
    </dev/null >"$out/systemd.log" 2>&1 8>&- &
trap "kill $! 2>/dev/null || true" EXIT
follow "$!"
guest_over
tr -d '\r' <"$out/systemd.log" | grep -ao 'LAB	.*' | cut -f2- >"$out/results.tsv" || true
if ! grep -q '^end	' "$out/results.tsv"; then
    verdict=FAIL
    why="ended after $limit_seconds s (see $out/systemd.log)"
    starved && verdict=note && why="NOT RUN: this host is busy: $ran s of CPU time, $waited s of waiting for it, in $limit_seconds s"
    printf 'systemd.end\tthe guest comes to its end\t%s\t-\t%s\t-\n' "$verdict" "$why" >>"$out/results.tsv"
else
    sed -i "s/^end	\(.*\)/systemd.end	the guest comes to its end	met	\1	$(($(date +%s) - started)) s here	-/" "$out/results.tsv"
fi
report
