#!/bin/sh
# Prolog of Slurm (PrologFlags=Alloc): writes a job's profile, limit and class for its tasks. Never fails a job.
set -u
folder=${CACHEMATE_JOBS:-/run/cachemate/jobs}
comment=${SLURM_JOB_COMMENT:-}
case $comment in cachemate:*) ;; *) exit 0 ;; esac
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
marks=${comment#cachemate:}
# The comment is the user's text: only known keys with plain values are written.
lines=$(printf '%s' "$marks" | tr ',' '\n' | grep -E '^(profile=[A-Za-z0-9.-]{1,253}|max-slowdown=[0-9]{1,5}(\.[0-9]{1,3})?%?|class=(victim|aggressor))$')
[ -n "$lines" ] || exit 0
umask 022
mkdir -p "$folder" 2>/dev/null || exit 0
new=$(mktemp "$folder/.job.XXXXXX" 2>/dev/null) || exit 0
printf '%s\n' "$lines" >"$new" && chmod 644 "$new" && mv -f "$new" "$folder/$SLURM_JOB_ID" || rm -f "$new"
exit 0
