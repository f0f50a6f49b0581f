#!/bin/sh
# slurm-test.sh CACHEMATE
# Tests the scripts of packaging/slurm, and the features of nodes, with Debian's Slurm: a controller and two nodes on the
# loopback address, without installation. Each node has a host name of its own, for which root is needed. Packages are
# downloaded and unpacked below target/. If that is impossible, the script prints NOT RUN with the reason.
set -eu
cachemate=$(realpath "$1")
root=$(cd "$(dirname "$0")/.." && pwd)
work=$root/target/slurm-test
scripts=$root/packaging/slurm
mkdir -p "$work/packages" && cd "$work"
if [ ! -x system/usr/sbin/slurmctld-wlm ]; then
	command -v apt-get >/dev/null || { echo "NOT RUN: no apt-get"; exit 0; }
	(cd packages && timeout 120 apt-get -qq download slurmctld slurmd slurm-client slurm-wlm-basic-plugins \
		slurm-wlm-plugins libhwloc15 liblua5.1-0) || { echo "NOT RUN: the packages cannot be downloaded"; exit 0; }
	for package in packages/*.deb; do dpkg -x "$package" system; done
fi
libraries=$work/system/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH="$libraries/slurm-wlm:$libraries" SLURM_CONF="$work/slurm.conf" PATH="$work/system/usr/bin:$PATH"
rm -rf run && mkdir -p run/spool run/state run/jobs
cp "$scripts/job_submit.lua" .
for script in prolog epilog task-prolog; do
	printf '#!/bin/sh\nexport CACHEMATE_JOBS=%s/$(hostname)\nexec %s\n' "$work/run/jobs" "$scripts/$script.sh" >$script.sh
	chmod 755 $script.sh
done
host=$(hostname -s)
features=$("$cachemate" topology --slurm-features)
cat >slurm.conf <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=17817
AuthType=auth/none
CredType=cred/none
SlurmUser=root
PluginDir=$libraries/slurm-wlm
StateSaveLocation=$work/run/state
SlurmdSpoolDir=$work/run/spool.%n
SlurmctldPidFile=$work/run/slurmctld.pid
SlurmdPidFile=$work/run/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
JobSubmitPlugins=lua
PrologFlags=Alloc
Prolog=$work/prolog.sh
Epilog=$work/epilog.sh
TaskProlog=$work/task-prolog.sh
NodeName=cm-one NodeAddr=127.0.0.1 Port=17818 CPUs=1 $features
NodeName=cm-two NodeAddr=127.0.0.1 Port=17819 CPUs=1
PartitionName=test Nodes=cm-one,cm-two Default=YES
END
unshare --uts true 2>/dev/null || { echo "NOT RUN: host names of their own are not permitted (unshare --uts)"; exit 0; }
system/usr/sbin/slurmctld-wlm -D >run/slurmctld.log 2>&1 &
controller=$!
nodes=
for name in cm-one cm-two; do
	unshare --uts sh -c 'hostname $1 && exec "$2/slurmd-wlm" -D -d "$2/slurmstepd-wlm"' node $name \
		"$work/system/usr/sbin" >run/slurmd.$name.log 2>&1 &
	nodes="$nodes $!"
done
trap 'kill $controller $nodes 2>/dev/null; wait' EXIT
for _ in $(seq 60); do
	[ "$(sinfo -h -o "%T %D" 2>/dev/null)" = "idle 2" ] && break
	sleep 1
done
failed=0
# ask QUESTION EXPECTED ACTUAL
ask() {
	if [ "$2" = "$3" ]; then echo "$1: met"; else failed=1 && echo "$1: found '$3', expected '$2': MISSED"; fi
}
marks=$(srun -Q --comment cachemate:profile=index,max-slowdown=10,class=victim env | grep ^CACHEMATE_ | sort | tr '\n' ' ')
ask "a task knows its class, limit and profile" \
	"CACHEMATE_CLASS=victim CACHEMATE_MAX_SLOWDOWN=10 CACHEMATE_PROFILE=index " "$marks"
both=$(srun -Q -N2 --comment cachemate:class=aggressor sh -c 'echo $SLURMD_NODENAME $CACHEMATE_CLASS' | sort | tr '\n' ' ')
ask "the tasks of a job on two nodes both know its class" "cm-one aggressor cm-two aggressor " "$both"
ask "a job with another comment runs" runs "$(srun -Q --comment mine echo runs)"
refusal=$(srun --comment cachemate:class=king true 2>&1 | grep -c "found 'class=king', expected" || true)
ask "a wrong comment is refused with what was expected" 1 "$refusal"
# A shard of an array is killed and requeued by Slurm; the joined runs are those of one process, byte for byte.
repro='repro CA-2 CP-6 --sample --seeds 2'
CACHEMATE=$cachemate sbatch -Q --wait --array=1-2 --requeue --export=ALL -o run/shard.%a "$scripts/shards.sh" \
	"$work/run/runs" $repro >/dev/null &
array=$!
for _ in $(seq 100); do
	ls run/runs/* >/dev/null 2>&1 && break
	sleep 0.1
done
pkill -9 -f -- "--shard 1/2 --store $work/run/runs" || true
wait $array || "$cachemate" $repro --shard 1/2 --store "$work/run/runs" >/dev/null
results() { "$cachemate" $repro --json "$@" | python3 -c 'import json, sys; print(json.load(sys.stdin)["results"])' | sha256sum; }
ask "shards of an array, one of them killed, give the digits of one process" "$(results --no-store)" \
	"$(results --store "$work/run/runs")"
first=${features#Features=}
ask "a job that asks for the cache of a node gets that node" cm-one \
	"$(srun -Q --constraint "${first%%,*}" sh -c 'echo $SLURMD_NODENAME')"
ask "a job that asks for a cache that no node has is refused" 1 \
	"$(srun --constraint l3-1b true 2>&1 | grep -c 'Invalid feature' || true)"
for _ in $(seq 20); do [ -z "$(find run/jobs -type f)" ] && break; sleep 1; done
ask "both nodes had a file for their jobs" "cm-one cm-two " "$(ls run/jobs | tr '\n' ' ')"
ask "the epilogs leave no file" "" "$(find run/jobs -type f)"
exit $failed
