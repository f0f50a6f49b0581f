#!/bin/sh
# Makes everything that is given to users, in one folder: for x86-64 and arm64 the command with its man pages, completions
# and recordings, packages for Debian, rpm and Python, an image for containers, a list of the crates in it with their
# licenses (SBOM), and SHA256SUMS.
# Problem: a command that is built on a new distribution does not start on an older one, because it asks for symbols of the
# new C library. So Zig's compiler links it against the symbols of glibc 2.28 (Debian 10, RHEL 8, Ubuntu 20.04), for both
# architectures from either. It comes from the Python package index, into TOOLS.
# The same sources and tools give the same bytes: paths of this machine are mapped away, and all files have the time of the
# commit. What cannot be made here is said, and the rest is made.
# Usage: dist.sh OUTPUT-FOLDER TOOLS-FOLDER
set -eu
cd "$(dirname "$0")/.."
usage='usage: dist.sh OUTPUT-FOLDER TOOLS-FOLDER'
out=${1:?$usage}
tools=${2:?$usage}
glibc=2.28
not_made() { echo "dist: NOT MADE: $1" >&2; }
mkdir -p "$tools"
rm -rf "$out"
mkdir -p "$out"
out=$(realpath "$out")
tools=$(realpath "$tools")
[ -x "$tools/bin/cargo-zigbuild" ] || { python3 -m venv "$tools" && "$tools/bin/pip" --quiet --disable-pip-version-check \
    install ziglang==0.15.2 cargo-zigbuild==0.24.1; } || { echo 'dist: Zig cannot be installed: python3-venv, a network?' >&2; exit 1; }
PATH=$tools/bin:$PATH

SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)
version=$(sed -n '/^\[workspace.package\]/,/^version/s/^version = "\(.*\)"/\1/p' Cargo.toml)
target_dir=$(realpath -m "${CARGO_TARGET_DIR:-target}")
cargo_home=$(realpath -m "${CARGO_HOME:-$HOME/.cargo}")
RUSTFLAGS="--remap-path-prefix=$target_dir=/target --remap-path-prefix=$cargo_home=/cargo --remap-path-prefix=$PWD=/cachemate -C strip=symbols"
CFLAGS="-ffile-prefix-map=$target_dir=/target -ffile-prefix-map=$cargo_home=/cargo -ffile-prefix-map=$PWD=/cachemate"
export PATH SOURCE_DATE_EPOCH RUSTFLAGS CFLAGS
umask 022
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

own=$(uname -m)
case $own in x86_64 | aarch64) ;; *) echo "dist: this machine is $own, expected x86_64 or aarch64, whose command makes the pages" >&2; exit 1 ;; esac
archive() {
    find "$work/$1" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner -cf - "$1" | gzip -9n >"$out/$1.tar.gz"
}
# This machine's first, because it prints the pages of the other.
for arch in $own $(echo x86_64 aarch64 | tr ' ' '\n' | grep -vx "$own"); do
    name=cachemate-$version-linux-$arch
    if ! rustc --print target-libdir --target "$arch-unknown-linux-gnu" 2>/dev/null | xargs -r test -d; then
        not_made "$name: rustup target add $arch-unknown-linux-gnu"
        continue
    fi
    cargo zigbuild --release --locked -p cachemate-cli --target "$arch-unknown-linux-gnu.$glibc"
    built=$target_dir/$arch-unknown-linux-gnu/release/cachemate
    if [ "$arch" = "$own" ]; then
        own_built=$built
        DESTDIR=$work/$name scripts/install.sh '' "$built" >/dev/null
        install -m 644 README.md LICENSE CHANGELOG.md "$work/$name/"
    else
        cp -a "$work/cachemate-$version-linux-$own" "$work/$name"
        install -m 755 "$built" "$work/$name/bin/cachemate"
    fi
    archive "$name"
done

if command -v dpkg-deb >/dev/null 2>&1; then
    packaging/deb.sh cachemate "$own_built" "$out" >/dev/null
    cargo zigbuild --profile daemon --locked -p cachemate-cli --no-default-features --target "$own-unknown-linux-gnu.$glibc"
    packaging/deb.sh cachemate-daemon "$target_dir/$own-unknown-linux-gnu/daemon/cachemate" "$out" >/dev/null
else
    not_made 'Debian packages: dpkg-deb and dpkg-shlibdeps (package dpkg-dev)'
fi
if command -v rpmbuild >/dev/null 2>&1; then
    for package in "$out"/*.deb; do packaging/rpm.sh "$package" "$out" >/dev/null; done
else
    not_made 'rpm packages: rpmbuild (package rpm)'
fi
image=$out/cachemate-$version-linux-$own.oci.tar
python3 packaging/kubernetes/image.py "$own_built" "$image" >"$work/image.txt" 2>&1 ||
    { rm -f "$image"; not_made "the image: $(tail -n 1 "$work/image.txt")"; }
scripts/wheel.sh "$own_built" "$tools/wheel" --zig --compatibility manylinux_2_28 >"$work/wheel.txt" 2>&1 ||
    { cat "$work/wheel.txt" >&2; exit 1; }
cp "$tools"/wheel/*.whl "$out/" 2>/dev/null || not_made "the wheel: $(tail -n 1 "$work/wheel.txt")"
if cargo cyclonedx --version >/dev/null 2>&1; then
    # It writes a list beside the Cargo.toml of each crate; those of the command and of the wheel are given out.
    cargo cyclonedx --quiet --manifest-path crates/cli/Cargo.toml --format json --target "$own-unknown-linux-gnu" \
        --override-filename "cachemate-$version.cdx"
    for list in crates/cli/cachemate-$version.cdx.json python/cachemate-$version-python.cdx.json; do
        sed "s|file://$PWD|file:///cachemate|g" "${list%/*}/cachemate-$version.cdx.json" >"$out/${list##*/}"
    done
    find crates python benches xtask -name "cachemate-$version.cdx.json" -exec rm {} +
else
    not_made 'the list of crates (SBOM): cargo install --locked cargo-cyclonedx'
fi
(cd "$out" && LC_ALL=C sha256sum -- * >"$work/sums" && mv "$work/sums" SHA256SUMS)
(cd "$out" && for file in *; do echo "$(du -k --apparent-size "$file" | cut -f 1) KiB  $file"; done)
