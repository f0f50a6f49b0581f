# Sourced by the lab's scripts: installs Debian packages in a separate root, verified by apt's signatures; nothing on
# the host is installed or changed. Expects $cache and $out (directories).
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

not_run() {
    printf '\nlab: NOT RUN: %s\n' "$*" >&2
    printf '{ "ran": false, "reason": "%s" }\n' "${*//\"/\'}" >"$out/result.json"
    exit 0
}

# The lab kills programs under a policy that only test builds contain: was the binary built with it (make lab)?
NO_CHAOS='a binary built without --features chaos, which has no policy shake'
has_chaos() {
    printf '[policy]\nname = "shake"\n' >"$out/chaos.toml"
    "$binary" --quiet manage --check --config "$out/chaos.toml" --state-dir "$out" --socket "$out/chaos.sock" 2>/dev/null
}

# URL of the Debian mirror that this host's apt uses.
mirror() {
    apt-get indextargets --format '$(REPO_URI) $(LABEL)' 'Created-By: Packages' 2>/dev/null |
        awk '$1 ~ /\/debian\/?$/ && $2 !~ /Security/ { print $1; exit }'
}

in_root() {
    local command=$1
    shift
    "$command" -q -c "$cache/root/apt.conf" "$@"
}

# Configuration of apt: the host's proxies, but separate directories and sources, and no hooks after an update.
apt_conf() {
    local root=$cache/root
    cat <<EOF
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
Dir::State "$root/state";
Dir::State::status "$root/status";
Dir::Cache "$root/cache";
Dir::Etc::sourcelist "$root/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Sandbox::User "";
APT::Architecture "amd64";
Debug::NoLocking "true";
APT::Update::Error-Mode "any";
EOF
}

# one_guest: waits for other labs on this machine, because two concurrent guests slow each other down and their limits
# are in host time. `guest_over` releases the lock. The lock belongs to the script, not to its guest, so a killed
# script does not block others.
one_guest() {
    [ -z "${guest_locked:-}" ] || return 0
    exec 8>"$cache/guest.lock"
    flock -n 8 || { echo "waiting for another lab's guest ..." && flock 8; }
    guest_locked=yes
}
guest_over() {
    flock -u 8
    exec 8>&-
    guest_locked=
}

# apt_root 'SUITE...': creates a root for apt with the package lists of these suites, in $root.
apt_root() {
    local uri suite
    root=$cache/root
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || not_run "this is not a Debian system (no apt-get)"
    [ "$(dpkg --print-architecture)" = amd64 ] || not_run "the lab's packages are for amd64"
    [ -r "$keyring" ] || not_run "$keyring is missing (package debian-archive-keyring)"
    uri=$(mirror)
    [ -n "$uri" ] || not_run "this host's apt knows no Debian mirror"
    rm -rf "$root"
    mkdir -p "$root/state/lists/partial" "$root/cache/archives/partial"
    : >"$root/status"
    apt_conf >"$root/apt.conf"
    for suite in $1; do
        echo "deb [signed-by=$keyring] $uri $suite main"
    done >"$root/sources.list"
    echo "fetching packages (once; kept in $cache)"
    in_root apt-get update >"$out/apt.log" 2>&1 || not_run "package lists cannot be had (see $out/apt.log)"
}

# download PACKAGE: downloads into the root's archives.
download() {
    [ -n "$1" ] || not_run "no suitable kernel package on the mirror"
    (cd "$root/cache/archives" && in_root apt-get download "$1") >>"$out/apt.log" 2>&1 ||
        not_run "$1 cannot be had (see $out/apt.log)"
}

# unpacked TREE: unpacks all archives of the root, with their libraries including the C library, so that nothing of
# this host is used or changed. The kernel's name is written to the file `ready`.
unpacked() {
    local package
    rm -rf "$1" "$1.new"
    mkdir -p "$1.new"
    for package in "$root"/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$1.new" || not_run "$package cannot be unpacked"
    done
    mv "$1.new" "$1"
    rm -rf "$root"
    kernel_file "$1" | sed 's|.*/modules/\(.*\)/vmlinuz$|vmlinuz-\1|; s|.*/||' >"$1/ready"
}
# kernel_file TREE: path of the kernel's image; from 6.19 it is in the directory of its modules.
kernel_file() { find "$1/boot" "$1/usr/lib/modules" -name 'vmlinuz*' 2>/dev/null | sort | sed -n 1p || true; }

# fetch TREE 'SUITE...' QEMU-SUITE KERNEL-FUNCTION: unpacks QEMU, busybox and the kernel that the function selects in
# TREE.
fetch() {
    apt_root "$2"
    in_root apt-get install -y --download-only --no-install-recommends -t "$3" \
        qemu-system-x86 busybox-static >>"$out/apt.log" 2>&1 || not_run "QEMU cannot be had (see $out/apt.log)"
    download "$($4)"
    unpacked "$1"
}

# fetch_kernel TREE 'SUITE...' SERIES: only the newest kernel of a series. From 6.19, the image is in the package
# linux-binary.
fetch_kernel() {
    apt_root "$2"
    download "$(in_root apt-cache pkgnames linux-binary-"$3" | grep -E "^linux-binary-$3[0-9.]*\+deb13-cloud-amd64\$" | sort -V | tail -n 1)"
    unpacked "$1"
}
