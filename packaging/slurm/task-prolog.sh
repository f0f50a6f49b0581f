#!/bin/sh
# TaskProlog of Slurm: tells a task its class and profile by its environment. Slurm reads "export" lines from the output.
# The task's CPUs stay those of its job.
set -u
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
file=${CACHEMATE_JOBS:-/run/cachemate/jobs}/$SLURM_JOB_ID
[ -r "$file" ] || exit 0
while IFS== read -r key value; do
	case $key in
	class) echo "export CACHEMATE_CLASS=$value" ;;
	profile) echo "export CACHEMATE_PROFILE=$value" ;;
	max-slowdown) echo "export CACHEMATE_MAX_SLOWDOWN=$value" ;;
	esac
done <"$file"
exit 0
