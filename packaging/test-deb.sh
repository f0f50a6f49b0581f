#!/bin/sh
# Tests that each package passes lintian, upgrades 0.1.0, upgrades under a running daemon, keeps an edited configuration,
# restarts the daemon only if that is valid, gives way to the other under a running daemon, and is removed without a trace.
# The test needs root rights and a network for a separate system (debootstrap, below target/); without them, it reports what
# was not checked.
# Usage: test-deb.sh CACHEMATE.deb CACHEMATE-DAEMON.deb
set -eu
cd "$(dirname "$0")/.."
usage='usage: test-deb.sh CACHEMATE.deb CACHEMATE-DAEMON.deb'
complete=$(realpath "${1:?$usage}")
daemon_only=$(realpath "${2:?$usage}")
not_shown() { echo "not shown here: $1"; exit 0; }
fail() { echo "test-deb: $1" >&2; exit 1; }

if command -v lintian >/dev/null 2>&1; then
    lintian --allow-root --fail-on error "$complete" "$daemon_only" || fail 'lintian has errors'
else
    echo 'not shown here: lintian is not installed'
fi
# The simulators weigh more than the daemon.
bytes=$(dpkg-deb --fsys-tarfile "$daemon_only" | tar -xO ./usr/bin/cachemate | wc -c)
[ "$bytes" -le 15000000 ] || fail "the command of cachemate-daemon has $bytes bytes, expected at most 15 MB"
[ "$(id -u)" = 0 ] || not_shown 'a chroot needs root'
command -v debootstrap >/dev/null 2>&1 || not_shown 'debootstrap is not installed'
base=$(pwd)/target/debian/base
if [ ! -e "$base/done" ]; then
    rm -rf "$base"
    debootstrap --variant=minbase "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$base" >/dev/null || not_shown 'debootstrap had no network'
    touch "$base/done"
fi
root=$(mktemp -d)
daemon=''
cleanup() {
    [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
    umount "$root/proc" "$root/sys" 2>/dev/null || true
    rm -rf --one-file-system "$root"
}
trap cleanup EXIT
cp -a "$base/." "$root/"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
within() { chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"; }

# Makes NAME.deb, the package as another version, in which the text of the configuration differs.
# Usage: as_version NAME VERSION
as_version() {
    dpkg-deb -R "$package" "$root/unpacked"
    sed -i "s/^Version: .*/Version: $2/" "$root/unpacked/DEBIAN/control"
    echo "# of version $2" >>"$root/unpacked/etc/cachemate/cachemate.toml"
    dpkg-deb -Znone --root-owner-group --build "$root/unpacked" "$root/$1.deb" >/dev/null
    rm -rf "$root/unpacked"
}

test_package() {
package=$1 other=$2
name=$(dpkg-deb -f "$package" Package)
within find / -xdev -path /proc -prune -o -path /sys -prune -o -print | sort >"$root.before"
cp "$package" "$root/package.deb"
version=$(dpkg-deb -f "$package" Version)
as_version lower 0.1.0
as_version higher "$version+test1"
within dpkg -i /lower.deb >/dev/null || fail 'it does not install'
within dpkg -i --refuse-downgrade /package.deb >/dev/null 2>&1 || fail 'it does not upgrade 0.1.0'
[ "$(within dpkg-query -W -f '${Version}' "$name")" = "$version" ] || fail "$version is lower than 0.1.0"
cmp -s "$root/etc/cachemate/cachemate.toml" packaging/cachemate.toml || fail 'the upgrade from 0.1.0 left the old configuration, which nobody had edited'
case $(within cachemate --version) in
    "cachemate ${version%%+*} ("*')') ;;
    "cachemate ${version%%+*}") echo 'not shown here: the commit in --version, as this is no release build of a repository' ;;
    *) fail "--version says $(within cachemate --version), expected $version" ;;
esac
zcat "$root/usr/share/doc/$name/changelog.gz" | head -n 1 | grep -q "^$name ($version) " || fail 'the changelog begins with another version'
within cachemate topology >/dev/null || fail 'the command does not run'
for file in /usr/share/man/man1/cachemate.1.gz /usr/lib/systemd/system/cachemate.service \
    /usr/share/bash-completion/completions/cachemate /etc/cachemate/cachemate.toml /usr/share/doc/$name/copyright /usr/share/doc/$name/docs/live.md; do
    [ -e "$root$file" ] || fail "$file is missing"
done
within dpkg-query -W -f '${Conffiles}' "$name" | grep -q /etc/cachemate/cachemate.toml || fail 'the configuration is no conffile'
within dpkg --verify "$name" || fail 'files differ from their sums'

# State before the upgrade: the daemon runs, and the administrator has edited the configuration.
echo 'window_ms = 500' >>"$root/etc/cachemate/cachemate.toml"
mkdir -p "$root/run/cachemate" "$root/var/lib/cachemate"
# The function above would return the shell's process id instead of the daemon's.
chroot "$root" env -i PATH=/usr/bin cachemate --quiet manage --observe-only &
daemon=$!
answers() { within cachemate status --json 2>/dev/null | grep -q '"windows"'; }
for _ in $(seq 1 120); do answers && break; sleep 0.5; done
answers || fail 'the daemon does not answer'
within dpkg --force-confold -i /higher.deb >/dev/null || fail 'it does not upgrade'
answers || fail 'the daemon does not answer after the upgrade'
grep -q 'window_ms = 500' "$root/etc/cachemate/cachemate.toml" || fail 'the upgrade took the edited configuration'
# Would systemd be told to restart the daemon, with a valid configuration and with an invalid one? A stand-in for systemctl
# writes down what it is asked.
asked=$root/asked
mkdir -p "$root/run/systemd/system"
printf '#!/bin/sh\necho "$*" >>/asked\n' >"$root/usr/bin/systemctl"
chmod 755 "$root/usr/bin/systemctl"
restarts() {
    : >"$asked"
    within dpkg --force-confold -i /higher.deb >/dev/null 2>"$root.said" || fail 'it does not upgrade under systemd'
    grep -q 'restart cachemate.service' "$asked"
}
restarts || fail "an upgrade does not restart the daemon: $(cat "$asked" "$root.said")"
sed -i 's/^window_ms = 500$/window_ms = "half"/' "$root/etc/cachemate/cachemate.toml"
! restarts || fail 'an upgrade restarts the daemon with a configuration that it refuses'
grep -q 'cachemate.toml:.*window_ms' "$root.said" || fail "an upgrade does not say why the daemon is not restarted: $(cat "$root.said")"
sed -i 's/^window_ms = "half"$/window_ms = 500/' "$root/etc/cachemate/cachemate.toml"
rm -rf "$root/run/systemd" "$root/usr/bin/systemctl" "$asked" "$root.said"
# The other package takes over: daemon and configuration stay.
cp "$other" "$root/other.deb"
within dpkg --force-confold --auto-deconfigure -i /other.deb >/dev/null || fail "$name does not give way to the other package"
[ "$(within dpkg-query -W -f '${db:Status-Status}' "$name")" != installed ] || fail "$name stays beside the other package"
answers || fail 'the daemon does not answer after the exchange'
grep -q 'window_ms = 500' "$root/etc/cachemate/cachemate.toml" || fail 'the exchange took the edited configuration'
within dpkg -P "$name" >/dev/null 2>&1 || true
[ -e "$root/usr/bin/cachemate" ] && [ -e "$root/var/lib/cachemate" ] && [ -e "$root/etc/cachemate/cachemate.toml" ] || fail "purging $name took what belongs to the other package"
cp "$package" "$root/package.deb"
within dpkg --force-confold -i /package.deb >/dev/null || fail "$name does not come back"
kill "$daemon"
wait "$daemon" || true
daemon=''

said=$(within dpkg -r "$name" 2>&1) || fail "it does not go: $said"
case $said in *'could not be restored'*) fail "$said" ;; esac
[ ! -e "$root/usr/bin/cachemate" ] || fail 'the command is still there'
[ -e "$root/etc/cachemate/cachemate.toml" ] || fail 'removing took the configuration'
within dpkg -P "$name" >/dev/null 2>&1 || fail 'it cannot be purged'
within dpkg -P cachemate cachemate-daemon >/dev/null 2>&1 || true
rm -f "$root/package.deb" "$root/lower.deb" "$root/higher.deb" "$root/other.deb"
within find / -xdev -path /proc -prune -o -path /sys -prune -o -print | sort >"$root.after"
left=$(comm -13 "$root.before" "$root.after" | grep -v -e '^/var/lib/dpkg' -e '^/var/log' -e '^/run' -e '^/tmp' || true)
rm -f "$root.before" "$root.after"
[ -z "$left" ] || fail "left behind: $left"
echo "$name installs, upgrades and is exchanged under a running daemon, keeps the configuration, goes without a trace"
}

test_package "$complete" "$daemon_only"
test_package "$daemon_only" "$complete"
