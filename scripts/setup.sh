#!/bin/sh
# Prepares this machine for a target: checks the Rust version, then the Debian packages.
# With root rights (or sudo without a password) and a network, missing packages are installed. Otherwise the script lists
# what is missing, and what works without it. It changes nothing else.
# On a terminal it asks first, because whoever builds a program need not want packages on the whole host. YES=1 agrees
# beforehand, and nobody is asked where nobody could answer: without a terminal, or with CI set.
# Usage: [YES=1] setup.sh build|demo|test|wheel
set -eu
cd "$(dirname "$0")/.."

need=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
if ! command -v cargo >/dev/null 2>&1; then
    echo "cachemate needs Rust $need or newer, and no cargo was found: install it from https://rustup.rs" >&2
    exit 1
fi
have=$(rustc --version | sed 's/^rustc \([0-9.]*\).*/\1/')
oldest=$(printf '%s\n%s\n' "$need" "$have" | sort -t. -k1,1n -k2,2n -k3,3n | head -n 1)
if [ "$oldest" != "$need" ] && [ "${have%.*}" != "$need" ]; then
    echo "cachemate needs Rust $need or newer; this is $have: run 'rustup update' (Debian's own rustc may be too old)" >&2
    exit 1
fi

packages='gcc libc6-dev make'
optional=''
case "${1:-build}" in
    build) ;;
    wheel) python3 -c 'import venv, ensurepip' 2>/dev/null || packages="$packages python3 python3-venv" ;;
    demo) packages="$packages valgrind gzip bzip2 xz-utils python3 perl sqlite3 coreutils" ;;
    test) packages="$packages valgrind gzip bzip2 xz-utils python3 perl sqlite3 coreutils procps"
        optional='chromium-headless-shell' ;;
    *) echo "setup.sh: '$1' is not one of build, demo, test, wheel" >&2; exit 2 ;;
esac

# Packages whose absence is not an error: the tests then report what they cannot check.
for package in $optional; do
    apt-cache show "$package" >/dev/null 2>&1 && packages="$packages $package"
done

missing=''
for package in $packages; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
without='without Valgrind, cachemate works on its shipped recordings; without a C compiler it cannot be built'

if ! command -v apt-get >/dev/null 2>&1; then
    echo "missing (this is not a Debian system, install their equivalents):$missing" >&2
    exit 0
fi
if [ "$(id -u)" = 0 ]; then
    as_root=''
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root='sudo -n'
else
    echo "missing, and no root to install them:$missing" >&2
    echo "  apt-get install$missing" >&2
    echo "$without" >&2
    exit 0
fi
if [ -t 0 ] && [ -t 2 ] && [ "${YES:-}" != 1 ] && [ -z "${CI:-}" ]; then
    printf 'install%s by apt-get? (y/N) ' "$missing" >&2
    read -r answer || { answer=''; echo >&2; }
    case "$answer" in
        [yY] | [yY][eE][sS]) ;;
        *)
            printf 'not installed:%s\n%s\n' "$missing" "$without" >&2
            exit 0
            ;;
    esac
fi
echo "installing:$missing" >&2
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # the list is meant to be split
if ! { $as_root apt-get install -y --no-install-recommends $missing >/dev/null 2>&1 ||
    { $as_root apt-get update >/dev/null 2>&1 &&
        $as_root apt-get install -y --no-install-recommends $missing >/dev/null 2>&1; }; }; then
    echo "could not install (no network?):$missing" >&2
    echo "$without" >&2
fi
