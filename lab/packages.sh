# Sourced by the lab's scripts: packages of Debian in a root of the lab's own, verified by apt's signatures; nothing of the
# host is installed or changed. Expects $cache and $out (folders).
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

not_run() {
    printf '\nlab: NOT RUN: %s\n' "$*" >&2
    printf '{ "ran": false, "why": "%s" }\n' "${*//\"/\'}" >"$out/result.json"
    exit 0
}

# Programs are killed under a policy that only tests have: is the binary built with it (make lab)?
NO_CHAOS='a binary built without --features chaos, which has no policy shake'
has_chaos() {
    printf '[policy]\nname = "shake"\n' >"$out/chaos.toml"
    "$binary" --quiet manage --check --config "$out/chaos.toml" --state-dir "$out" --socket "$out/chaos.sock" 2>/dev/null
}

# The Debian mirror that this host's own apt uses.
mirror() {
    apt-get indextargets --format '$(REPO_URI) $(LABEL)' 'Created-By: Packages' 2>/dev/null |
        awk '$1 ~ /\/debian\/?$/ && $2 !~ /Security/ { print $1; exit }'
}

in_root() {
    local command=$1
    shift
    "$command" -q -c "$cache/root/apt.conf" "$@"
}

# The host's apt with its proxies, but with folders and sources of our own, and without its hooks after an update.
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

# fetch TREE 'SUITE...' QEMU-SUITE KERNEL-FUNCTION: QEMU, busybox and the kernel that the function names, unpacked in TREE.
fetch() {
    local root=$cache/root tree=$1 suites=$2 qemu_suite=$3 choose=$4 uri kernel suite
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || not_run "this is not a Debian system (no apt-get)"
    [ "$(dpkg --print-architecture)" = amd64 ] || not_run "the lab's packages are for amd64"
    [ -r "$keyring" ] || not_run "$keyring is missing (package debian-archive-keyring)"
    uri=$(mirror)
    [ -n "$uri" ] || not_run "this host's apt knows no Debian mirror"
    rm -rf "$root" "$tree" "$tree.new"
    mkdir -p "$root/state/lists/partial" "$root/cache/archives/partial" "$tree.new"
    : >"$root/status"
    apt_conf >"$root/apt.conf"
    for suite in $suites; do
        echo "deb [signed-by=$keyring] $uri $suite main"
    done >"$root/sources.list"
    echo "fetching packages (once; kept in $cache)"
    in_root apt-get update >"$out/apt.log" 2>&1 || not_run "package lists cannot be had (see $out/apt.log)"
    kernel=$($choose)
    [ -n "$kernel" ] || not_run "no suitable kernel package on the mirror"
    in_root apt-get install -y --download-only --no-install-recommends -t "$qemu_suite" \
        qemu-system-x86 busybox-static >>"$out/apt.log" 2>&1 || not_run "QEMU cannot be had (see $out/apt.log)"
    (cd "$root/cache/archives" && in_root apt-get download "$kernel") >>"$out/apt.log" 2>&1 ||
        not_run "$kernel cannot be had (see $out/apt.log)"
    # Complete with its libraries down to the C library: nothing of this host is used or changed.
    for package in "$root"/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$tree.new" || not_run "$package cannot be unpacked"
    done
    mv "$tree.new" "$tree"
    rm -rf "$root"
    basename "$tree"/boot/vmlinuz-* >"$tree/ready"
}
