#!/bin/sh
# Epilog of Slurm: removes the file that prolog.sh has written.
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
rm -f "${CACHEMATE_JOBS:-/run/cachemate/jobs}/$SLURM_JOB_ID"
exit 0
