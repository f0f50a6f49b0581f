#!/bin/sh
# Installs the command, its man pages, completions, recordings and the service (not enabled) below PREFIX.
# `make install` builds first.
# Usage: install.sh PREFIX
set -eu
cd "$(dirname "$0")/.."
prefix=${1:?usage: install.sh PREFIX}
cachemate=target/release/cachemate
[ -x "$cachemate" ] || { echo "$cachemate is not there: run 'make build' first" >&2; exit 1; }

install -D -m 755 "$cachemate" "$prefix/bin/cachemate"
mkdir -p "$prefix/share/man/man1" "$prefix/share/cachemate/recordings/servers"
"$cachemate" completions --man "$prefix/share/man/man1" --force
mkdir -p "$prefix/share/man/man5"
mv "$prefix/share/man/man1/cachemate.toml.5" "$prefix/share/man/man5/"
install -d "$prefix/share/bash-completion/completions" "$prefix/share/zsh/site-functions" \
    "$prefix/share/fish/vendor_completions.d"
"$cachemate" completions bash >"$prefix/share/bash-completion/completions/cachemate"
"$cachemate" completions zsh >"$prefix/share/zsh/site-functions/_cachemate"
"$cachemate" completions fish >"$prefix/share/fish/vendor_completions.d/cachemate.fish"
install -m 644 recordings/*.cmt recordings/README.md "$prefix/share/cachemate/recordings/"
install -m 644 recordings/servers/*.cmt recordings/servers/*.threads "$prefix/share/cachemate/recordings/servers/"
install -d "$prefix/lib/systemd/system" "$prefix/share/doc/cachemate"
sed "s|/usr/local/bin|$prefix/bin|" packaging/cachemate.service >"$prefix/lib/systemd/system/cachemate.service"
install -m 644 packaging/cachemate.toml "$prefix/share/doc/cachemate/cachemate.toml"
install -D -m 644 packaging/cachemate-progress.h "$prefix/include/cachemate-progress.h"
echo "installed below $prefix"
