#!/bin/sh
# Installs the command, its man pages, completions, recordings and the service (not enabled) below PREFIX, or below
# $DESTDIR$PREFIX for a package. `make install` builds first.
# Usage: [DESTDIR=FOLDER] install.sh PREFIX [CACHEMATE]
set -eu
cd "$(dirname "$0")/.."
prefix=${1?usage: install.sh PREFIX [CACHEMATE]}
cachemate=${2:-target/release/cachemate}
[ -x "$cachemate" ] || { echo "$cachemate is not there: run 'make build' first" >&2; exit 1; }
to=${DESTDIR:-}$prefix

install -D -m 755 "$cachemate" "$to/bin/cachemate"
mkdir -p "$to/share/man/man1" "$to/share/cachemate/recordings/servers"
"$cachemate" completions --man "$to/share/man/man1" --force
mkdir -p "$to/share/man/man5"
mv "$to/share/man/man1/cachemate.toml.5" "$to/share/man/man5/"
install -d "$to/share/bash-completion/completions" "$to/share/zsh/site-functions" \
    "$to/share/fish/vendor_completions.d"
"$cachemate" completions bash >"$to/share/bash-completion/completions/cachemate"
"$cachemate" completions zsh >"$to/share/zsh/site-functions/_cachemate"
"$cachemate" completions fish >"$to/share/fish/vendor_completions.d/cachemate.fish"
install -m 644 recordings/*.cmt recordings/README.md "$to/share/cachemate/recordings/"
install -m 644 recordings/servers/*.cmt recordings/servers/*.threads "$to/share/cachemate/recordings/servers/"
install -d "$to/lib/systemd/system" "$to/share/doc/cachemate"
# An archive without a prefix is unpacked below /usr/local.
sed "s|/usr/local/bin|${prefix:-/usr/local}/bin|" packaging/cachemate.service >"$to/lib/systemd/system/cachemate.service"
install -m 644 packaging/cachemate.toml "$to/share/doc/cachemate/cachemate.toml"
install -D -m 644 packaging/cachemate-progress.h "$to/include/cachemate-progress.h"
echo "installed below ${to:-/}"
