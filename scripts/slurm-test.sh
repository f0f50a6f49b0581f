#!/bin/sh
# Tests the scripts of packaging/slurm with Debian's Slurm: a controller and a node on the loopback address, without
# installation. Packages are downloaded and unpacked below target/. If that is impossible, the script prints NOT RUN with
# the reason.
set -eu
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
	printf '#!/bin/sh\nexport CACHEMATE_JOBS=%s\nexec %s\n' "$work/run/jobs" "$scripts/$script.sh" >$script.sh
	chmod 755 $script.sh
done
host=$(hostname -s)
cat >slurm.conf <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=17817
SlurmdPort=17818
AuthType=auth/none
CredType=cred/none
SlurmUser=root
PluginDir=$libraries/slurm-wlm
StateSaveLocation=$work/run/state
SlurmdSpoolDir=$work/run/spool
SlurmctldPidFile=$work/run/slurmctld.pid
SlurmdPidFile=$work/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
JobSubmitPlugins=lua
PrologFlags=Alloc
Prolog=$work/prolog.sh
Epilog=$work/epilog.sh
TaskProlog=$work/task-prolog.sh
NodeName=$host NodeAddr=127.0.0.1 CPUs=1
PartitionName=test Nodes=$host Default=YES
END
system/usr/sbin/slurmctld-wlm -D >run/slurmctld.log 2>&1 &
controller=$!
system/usr/sbin/slurmd-wlm -D -d "$work/system/usr/sbin/slurmstepd-wlm" >run/slurmd.log 2>&1 &
node=$!
trap 'kill $controller $node 2>/dev/null; wait' EXIT
for _ in $(seq 60); do
	[ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && break
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
ask "a job with another comment runs" runs "$(srun -Q --comment mine echo runs)"
refusal=$(srun --comment cachemate:class=king true 2>&1 | grep -c "found 'class=king', expected" || true)
ask "a wrong comment is refused with what was expected" 1 "$refusal"
for _ in $(seq 20); do [ -z "$(ls run/jobs)" ] && break; sleep 1; done
ask "the epilog leaves no file" "" "$(ls run/jobs)"
exit $failed
