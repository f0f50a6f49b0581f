#!/bin/sh
# Runs one shard of a command as a task of a job array (docs/shards.md):
#     sbatch --array=1-16 --requeue shards.sh STORE COMMAND [ARGUMENT...]
# STORE is a directory that all nodes share. Without one, pass a directory of each node, and merge the stores afterwards.
# CACHEMATE names the command [default: cachemate].
#SBATCH --open-mode=append
set -eu
if [ $# -lt 2 ] || [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then
    echo "usage: sbatch --array=1-N $0 STORE COMMAND [ARGUMENT...]" >&2
    exit 2
fi
store=$1
shift
# Arrays may begin at any number.
part=$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN + 1))
exec "${CACHEMATE:-cachemate}" "$@" --shard "$part/$SLURM_ARRAY_TASK_COUNT" --store "$store"
