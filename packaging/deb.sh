#!/bin/sh
# Makes a Debian package of a built command; `make deb` builds the command first. The script lays out the files, and
# dpkg-deb packs them. NAME is cachemate, or cachemate-daemon for a command that was built without the feature `complete`.
# Usage: deb.sh NAME CACHEMATE OUTPUT-FOLDER
set -eu
cd "$(dirname "$0")/.."
usage='usage: deb.sh NAME CACHEMATE OUTPUT-FOLDER'
name=${1:?$usage}
cachemate=$(realpath "${2:?$usage}")
out=${3:?$usage}
grep -qx "Package: $name" packaging/debian/control || { echo "deb.sh: found '$name', expected cachemate or cachemate-daemon" >&2; exit 1; }
# The experiments are only in the complete command.
if "$cachemate" repro --help >/dev/null 2>&1; then built=cachemate; else built=cachemate-daemon; fi
[ "$built" = "$name" ] || { echo "deb.sh: $cachemate is a command for $built, not for $name" >&2; exit 1; }
released=$(sed -n 's/^## \([0-9][^ ]*\) (.*/\1/p' CHANGELOG.md | head -n 1)
version=$released
date=$(sed -n 's/^## [^(]*(\(.*\))$/\1/p' CHANGELOG.md | head -n 1)
# Every commit after a release is a higher version, so that apt and dnf see an upgrade.
if commit=$(git rev-parse --short=12 HEAD 2>/dev/null) && ! git describe --exact-match --match "v$released" >/dev/null 2>&1; then
    version=$released+git$(git rev-list --count HEAD).$commit
    date=$(git log -1 --format=%cs)
fi
arch=$(dpkg --print-architecture)
# The package is reproducible: it contains no time of the build.
SOURCE_DATE_EPOCH=$(date -u -d "$date" +%s)
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf '[policy]\nname = "shake"\n' >"$work/chaos.toml"
if "$cachemate" --quiet manage --check --config "$work/chaos.toml" --state-dir "$work" --socket "$work/s" 2>/dev/null; then
    echo "deb.sh: $cachemate is built with --features chaos: policies of tests are no part of a package" >&2
    exit 1
fi
root=$work/$name
umask 022

install -D -m 755 "$cachemate" "$root/usr/bin/cachemate"
strip --strip-unneeded --remove-section=.comment --remove-section=.note "$root/usr/bin/cachemate"
mkdir -p "$root/usr/share/man/man1"
"$cachemate" completions --man "$root/usr/share/man/man1" --force >/dev/null
install -d "$root/usr/share/man/man5"
mv "$root/usr/share/man/man1/cachemate.toml.5" "$root/usr/share/man/man5/"
gzip -9n "$root"/usr/share/man/man1/*.1 "$root"/usr/share/man/man5/*.5
for shell in 'bash usr/share/bash-completion/completions/cachemate' 'zsh usr/share/zsh/vendor-completions/_cachemate' \
    'fish usr/share/fish/vendor_completions.d/cachemate.fish'; do
    target=$root/${shell#* }
    mkdir -p "$(dirname "$target")"
    "$cachemate" completions "${shell%% *}" >"$target"
done
install -d "$root/usr/lib/systemd/system"
sed 's|/usr/local/bin|/usr/bin|' packaging/cachemate.service >"$root/usr/lib/systemd/system/cachemate.service"
chmod 644 "$root/usr/lib/systemd/system/cachemate.service"
install -D -m 644 packaging/cachemate.toml "$root/etc/cachemate/cachemate.toml"
install -D -m 644 packaging/cachemate-progress.h "$root/usr/include/cachemate-progress.h"
install -d "$root/usr/share/cachemate"
if [ "$name" = cachemate ]; then
    install -d "$root/usr/share/cachemate/recordings/servers" "$root/usr/share/cachemate/machines"
    install -m 644 recordings/*.cmt "$root/usr/share/cachemate/recordings/"
    install -m 644 recordings/servers/*.cmt recordings/servers/*.threads "$root/usr/share/cachemate/recordings/servers/"
    install -m 644 machines/*.toml "$root/usr/share/cachemate/machines/"
fi
install -m 644 packaging/grafana.json packaging/alerts.yaml "$root/usr/share/cachemate/"

doc=$root/usr/share/doc/$name
install -D -m 644 packaging/debian/copyright "$doc/copyright"
# --help names pages as docs/PAGE.md.
install -m 644 README.md SECURITY.md "$doc/"
(find docs -type f ! -path 'docs/results/*' ! -path 'docs/evidence/*') | while read -r page; do
    install -D -m 644 "$page" "$doc/$page"
done
maintainer=$(sed -n 's/^Maintainer: //p' packaging/debian/control)
# All versions of CHANGELOG.md, newest first, in Debian's format.
{
    [ "$version" = "$released" ] || echo "Unreleased $version $date"
    sed -n 's/^## \([0-9][^ ]*\) (\(.*\))$/\1 \1 \2/p' CHANGELOG.md
} | while read -r section of on; do
    echo "$name ($of) unstable; urgency=medium"
    echo
    awk -v head="## $section" 'index($0, "## ") == 1 { inside = index($0, head) == 1; next } inside && (sub(/^- /, "  * ") || sub(/^  /, "    "))' CHANGELOG.md |
        fold -s -w 76 | sed 's/^\([^ ]\)/    \1/; s/ *$//'
    echo
    echo " -- $maintainer  $(LC_ALL=C date -u -d "$on" '+%a, %d %b %Y %T +0000')"
    echo
done | gzip -9n >"$doc/changelog.gz"

mkdir "$root/DEBIAN"
for script in postinst prerm postrm; do
    install -m 755 "packaging/debian/$script" "$root/DEBIAN/$script"
done
echo /etc/cachemate/cachemate.toml >"$root/DEBIAN/conffiles"
# Dependencies of the command, by the libraries that it is linked with. dpkg-shlibdeps requires a source package, so the
# command gets a minimal one.
mkdir "$work/debian"
cp packaging/debian/control "$work/debian/control"
depends=$(cd "$work" && dpkg-shlibdeps -O "$name/usr/bin/cachemate" 2>/dev/null | sed -n 's/^shlibs:Depends=//p')
# Its list of symbols takes what the C library has only moved since (threads, in 2.34) for new, so that an older Debian would
# refuse a command that starts there.
glibc=$(objdump -T "$root/usr/bin/cachemate" | grep -o 'GLIBC_[0-9.]*' | cut -d _ -f 2 | sort -Vu | tail -n 1)
depends=$(echo "$depends" | sed "s/libc6 (>= [^)]*)/libc6 (>= $glibc)/")
size=$(du -k -s --apparent-size "$root" | cut -f 1)
sed -n "/^Package: $name\$/,/^\$/p" packaging/debian/control | sed '/^$/d' | sed "s|^Architecture: .*|Architecture: $arch|; s|\${shlibs:Depends}|$depends|
/^Package:/a\\
Version: $version\\
Maintainer: $maintainer\\
Installed-Size: $size\\
Section: admin\\
Priority: optional" >"$root/DEBIAN/control"
(cd "$root" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
mkdir -p "$out"
dpkg-deb --root-owner-group --build "$root" "$out/${name}_${version}_$arch.deb" >/dev/null
echo "$out/${name}_${version}_$arch.deb"
