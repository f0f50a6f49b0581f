#!/bin/sh
# Makes an rpm with the files of a Debian package of this project, so that both have one layout. `make rpm` builds it
# first. Needs rpmbuild and dpkg-deb.
# Usage: rpm.sh PACKAGE.deb OUTPUT-FOLDER
set -eu
cd "$(dirname "$0")/.."
package=$(realpath "${1:?usage: rpm.sh PACKAGE.deb OUTPUT-FOLDER}")
out=${2:?usage: rpm.sh PACKAGE.deb OUTPUT-FOLDER}
command -v rpmbuild >/dev/null 2>&1 || { echo 'rpm.sh: rpmbuild is not installed (package rpm)' >&2; exit 1; }
field() { dpkg-deb -f "$package" "$1"; }
version=$(field Version)
name=$(field Package)
other=cachemate-daemon
[ "$name" = cachemate ] || other=cachemate
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
dpkg-deb -x "$package" "$work/files"
# On Fedora, RHEL and SUSE, zsh reads another folder.
mkdir -p "$work/files/usr/share/zsh/site-functions"
mv "$work/files/usr/share/zsh/vendor-completions/_cachemate" "$work/files/usr/share/zsh/site-functions/"
rmdir "$work/files/usr/share/zsh/vendor-completions"
cat >"$work/cachemate.spec" <<SPEC
Name: $name
Version: $version
Release: 1
Summary: $(field Description | head -n 1)
License: Apache-2.0
Requires(post): systemd
Requires(preun): systemd
Conflicts: $other
$(field Recommends | sed 's/^./Recommends: &/')
%global debug_package %{nil}
%global __strip /bin/true
%define _build_id_links none

%description
$(field Description | sed '1d; s/^ //; s/^\.$//')

%install
cp -a "$work/files/." "%{buildroot}/"

%post
# The service is installed but not enabled, because the administrator decides.
$(sed -n '/^restart_daemon() {$/,/^}$/p' packaging/debian/postinst | sed 's/deb-systemd-invoke/systemctl/')
[ ! -d /run/systemd/system ] || restart_daemon

%preun
# The daemon restores the host when it stops; changes that a crashed daemon left are restored as well.
if [ "\$1" = 0 ]; then
    [ ! -d /run/systemd/system ] || systemctl stop cachemate.service >/dev/null || :
    [ ! -d /var/lib/cachemate ] || cachemate --quiet restore ||
        echo "cachemate: something could not be restored; the journal stays in /var/lib/cachemate" >&2
fi

%postun
[ ! -d /run/systemd/system ] || systemctl --system daemon-reload >/dev/null || :

%files
%defattr(-,root,root)
%config(noreplace) /etc/cachemate/cachemate.toml
/usr/bin/cachemate
/usr/include/cachemate-progress.h
/usr/lib/systemd/system/cachemate.service
/usr/share/*/*
SPEC
SOURCE_DATE_EPOCH=$(stat -c %Y "$work/files/usr/bin/cachemate")
export SOURCE_DATE_EPOCH
rpmbuild -bb --quiet --define "_topdir $work/rpm" --define "_rpmdir $work/out" \
    --define 'use_source_date_epoch_as_buildtime 1' --define 'clamp_mtime_to_source_date_epoch 1' \
    --define '_buildhost reproducible' "$work/cachemate.spec"
mkdir -p "$out"
find "$work/out" -name '*.rpm' -exec cp {} "$out/" ';'
find "$out" -name "$name-$version-1.*.rpm"
