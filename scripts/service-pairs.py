#!/usr/bin/env python3
"""Real services beside aggressors: do users lose what `cachemate status` states, and is the culprit named?

Redis, PostgreSQL and nginx serve clients on loopback, each beside four or five aggressors in turn (a stream through memory, a
spinner that touches no cache, a compiler, xz, a backup). The aggressor is frozen and thawed in alternation, so that a change
of the host's load is not taken for it. The measured loss of run time is that of the time for a request, as clients see it,
and the cache's that of CPU time for a request; each phase with the aggressor counts against those around it without it. The
last of them takes 11 s, after which the daemon is asked: its statement is about the last 10 s, and is judged by the loss of
that phase and by the median of all.

Takes 11 minutes for all twelve pairs, on a host that does nothing else. Needs root, cgroup v2, redis-server, redis-benchmark,
postgresql, nginx, ab, gcc and xz from PATH. Prints a table, and NOT RUN with the reason where something is missing. Exits
with 1 if a target is missed.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

PAIRS = [("redis", a) for a in ("stream", "spinner", "gcc", "xz", "tar")]
PAIRS += [("postgresql", a) for a in ("stream", "spinner", "xz", "gcc")]
PAIRS += [("nginx", a) for a in ("stream", "spinner", "tar")]
PHASE_S, ROUNDS, LAST_S = 4.0, 4, 11.0
TOOLS = ("redis-server", "redis-cli", "redis-benchmark", "psql", "nginx", "ab", "gcc", "xz", "tar", "runuser")
STREAM = """#include <stdlib.h>
int main(void) { size_t n = 6 << 20; double *a = calloc(n, 8), *b = calloc(n, 8), *c = calloc(n, 8);
for (;;) for (size_t i = 0; i < n; i++) a[i] = b[i] + 3 * c[i] + a[i]; }
"""
SPINNER = "int main(void) { volatile unsigned long x = 0; for (;;) x++; }\n"
NGINX = """daemon off; master_process off; worker_processes 1; pid {0}/nginx.pid; error_log /dev/null; user root;
events {{ worker_connections 1024; }}
http {{ access_log off; keepalive_requests 100000000;
server {{ listen 127.0.0.1:7393; root {0}/www; location = /status {{ stub_status; }} }} }}
"""
STARTED = []


def not_run(reason):
    print(f"NOT RUN: {reason}")
    sys.exit(0)


def wait(what, is_done, seconds=30):
    end = time.time() + seconds
    while not is_done():
        if time.time() > end:
            raise SystemExit(f"not within {seconds} s: {what}")
        time.sleep(0.2)


class Group:
    """A control group that the daemon takes for a unit."""

    def __init__(self, slice_dir, name):
        self.name, self.dir = f"pair-{name}.service", slice_dir / f"pair-{name}.service"
        if self.dir.exists():
            self.dir.rmdir()  # left empty by a run that was killed; one with processes stays, and is an error
        self.dir.mkdir(parents=True)

    def start(self, command, user=None):
        def enter():
            os.setsid()
            (self.dir / "cgroup.procs").write_text("0")

        command = ["runuser", "-u", user, "--", *command] if user else command
        null = subprocess.DEVNULL
        STARTED.append(subprocess.Popen(command, stdin=null, stdout=null, stderr=null, preexec_fn=enter))

    def cpu_s(self):
        words = (self.dir / "cpu.stat").read_text().split()
        return int(words[words.index("usage_usec") + 1]) / 1e6

    def freeze(self, is_frozen):
        (self.dir / "cgroup.freeze").write_text("1" if is_frozen else "0")

    def remove(self):
        self.freeze(False)
        for _ in range(100):
            pids = (self.dir / "cgroup.procs").read_text().split()
            if not pids:
                break
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            for process in STARTED:
                process.poll()
            time.sleep(0.1)
        self.dir.rmdir()


def busy_cpu_s():
    """CPU time of all programs on this host, without what the hypervisor took."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def output(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout


class Redis:
    def __init__(self, group, work_dir):
        group.start(["redis-server", "--port", "7391", "--bind", "127.0.0.1", "--save", "", "--dir", str(work_dir)])
        wait("redis-server answers", lambda: self.cli("ping").strip() == "PONG")
        self.cli("debug", "populate", "300000", "key", "256")
        group.start("redis-benchmark -p 7391 -t set,get -r 300000 -d 256 -n 1000000000 -c 16 -q".split())
        wait("redis-benchmark runs", lambda: self.requests() > 10000)

    def cli(self, *words):
        return output("redis-cli", "-p", "7391", *words)

    def requests(self):
        lines = self.cli("info", "stats").split()
        return next((int(line.split(":")[1]) for line in lines if line.startswith("total_commands_processed:")), 0)


class PostgreSql:
    def __init__(self, group, work_dir):
        self.base = "-h 127.0.0.1 -p 7392 -U postgres".split()
        programs = find_postgresql()
        # A new one each time, because the last server was killed.
        data = Path(tempfile.mkdtemp(dir=work_dir))
        shutil.chown(data, "postgres", "postgres")
        command = ["runuser", "-u", "postgres", "--", programs / "initdb", "-D", data, "-A", "trust"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        options = ("listen_addresses=127.0.0.1", "fsync=off", "synchronous_commit=off", "shared_buffers=256MB",
                   "full_page_writes=off", "autovacuum=off")
        options = [word for option in options for word in ("-c", option)]
        group.start([programs / "postgres", "-D", data, "-p", "7392", "-k", data, *options], user="postgres")
        wait("postgres answers", lambda: self.sql("select 1").strip() == "1")
        subprocess.run([programs / "pgbench", "-i", "-s", "10", "-q", *self.base, "postgres"], check=True, capture_output=True)
        group.start([programs / "pgbench", *"-c 2 -j 1 -M prepared -N -T 100000".split(), *self.base, "postgres"])
        first = self.requests()
        wait("pgbench runs", lambda: self.requests() > first + 500)

    def sql(self, text):
        return output("psql", *self.base, "-Atc", text, "postgres")

    def requests(self):
        return int(self.sql("select pg_snapshot_xmax(pg_current_snapshot())").strip() or 0)


class Nginx:
    def __init__(self, group, work_dir):
        (work_dir / "www").mkdir(exist_ok=True)
        (work_dir / "www/page.html").write_bytes(os.urandom(8192))
        (work_dir / "nginx.conf").write_text(NGINX.format(work_dir))
        group.start(["nginx", "-c", work_dir / "nginx.conf"])
        wait("nginx answers", lambda: self.requests() > 0)
        client = "while :; do ab -k -q -n 5000000 -c 16 http://127.0.0.1:7393/page.html; done"
        group.start(["sh", "-c", client])
        wait("ab runs", lambda: self.requests() > 10000)

    def requests(self):
        try:
            return int(urllib.request.urlopen("http://127.0.0.1:7393/status", timeout=5).read().split()[9])
        except OSError:
            return 0


SERVICES = {"redis": Redis, "postgresql": PostgreSql, "nginx": Nginx}


def find_postgresql():
    folders = [*Path("/usr/lib/postgresql").glob("*/bin"), *map(Path, os.get_exec_path())]
    programs = ("initdb", "postgres", "pgbench")
    return next((folder for folder in folders if all((folder / program).exists() for program in programs)), None)


def build_aggressors(work_dir):
    for name, text in (("stream", STREAM), ("spinner", SPINNER)):
        (work_dir / f"{name}.c").write_text(text)
        subprocess.run(["gcc", "-O2", "-o", work_dir / name, work_dir / f"{name}.c"], check=True)
    function = "int f{0}(int a, int b) {{ int s = 0; for (int i = 0; i < a; i++) {{ s += i * b ^ {0}; if (s & {1}) s -= b; }} return s; }}\n"
    (work_dir / "large.c").write_text("".join(function.format(i, i % 31) for i in range(6000)))
    (work_dir / "data").write_bytes(b"".join(os.urandom(1 << 19) + bytes(range(256)) * 2048 for _ in range(60)))
    forever = lambda command: ["sh", "-c", f"while :; do {command}; done"]
    return {
        "stream": [work_dir / "stream"],
        "spinner": [work_dir / "spinner"],
        "gcc": forever(f"gcc -O2 -c {work_dir}/large.c -o {work_dir}/large.o"),
        "xz": forever(f"xz -6 -T1 -c {work_dir}/data"),
        "tar": forever("tar -cf - /usr/lib /usr/include /usr/share 2>/dev/null | gzip -1"),
    }


def losses(phases, value):
    """Percent by which each phase with the aggressor is above the mean of those around it without it."""
    found = []
    for number, phase in enumerate(phases):
        if phase["is_on"]:
            around = [value(phases[other]) for other in (number - 1, number + 1) if other < len(phases)]
            found.append(100 * (value(phase) / statistics.mean(around) - 1))
    return found


def measure(slice_dir, work_dir, service, aggressor, command, read_status):
    groups = []
    try:
        groups.append(Group(slice_dir, service))
        groups.append(Group(slice_dir, aggressor))
        server, (mine, other) = SERVICES[service](groups[0], work_dir), groups
        # A process that enters a frozen group never reaches its program.
        other.start(command)
        other.freeze(True)
        time.sleep(2)
        phases = []
        for number in range(2 * ROUNDS + 2):
            is_on = number % 2 == 1
            other.freeze(not is_on)
            time.sleep(0.3)
            other_cpu_s = lambda: busy_cpu_s() - mine.cpu_s() - other.cpu_s()
            begin, requests, cpu_s, others_s = time.time(), server.requests(), mine.cpu_s(), other_cpu_s()
            time.sleep((LAST_S if number == 2 * ROUNDS + 1 else PHASE_S) - 0.3)
            seconds, done, cpu_s = time.time() - begin, max(1, server.requests() - requests), mine.cpu_s() - cpu_s
            phases.append({"is_on": is_on, "seconds": seconds / done, "cpu_seconds": cpu_s / done,
                           "cpus": cpu_s / seconds, "other_cpus": (other_cpu_s() - others_s) / seconds})
        services = read_status()["services"]
        stated = next((found for found in services if found["name"] == mine.name), {})
        return phases, stated
    finally:
        for group in groups:
            group.remove()


def describe(values):
    return f"{values[-1]:+.1f}, {statistics.median(values):+.1f} ({min(values):+.0f} to {max(values):+.0f})"


def describe_stated(value, ends):
    return "unknown" if value is None else f"{value:+.1f} ({ends[0]:+.0f} to {ends[1]:+.0f})"


def is_within(value, ends):
    return None if ends is None else ends[0] <= value <= ends[1]


def judge(number, service, aggressor, phases, stated):
    run_time, cache = (losses(phases, lambda phase: phase[key]) for key in ("seconds", "cpu_seconds"))
    by_cache = [cause["service"] for cause in stated.get("cache_by", [])]
    by_waiting = [cause["service"] for cause in stated.get("waiting_by", [])]
    answer = {
        "run time": is_within(run_time[-1], stated.get("run_time_range_percent")),
        "cache": is_within(cache[-1], stated.get("cache_range_percent")),
        "run time, median": is_within(statistics.median(run_time), stated.get("run_time_range_percent")),
        "cache, median": is_within(statistics.median(cache), stated.get("cache_range_percent")),
        "culprit": f"pair-{aggressor}.service" in by_cache[:1] + by_waiting[:1],
        "spinner": "pair-spinner.service" in by_cache,
    }
    short = lambda names: ", ".join(str(name).removeprefix("pair-").removesuffix(".service") for name in names[:2]) or "none"
    words = {True: "yes", False: "NO", None: "unknown"}
    print(f"| {number} | {service} | {aggressor} | {describe(run_time)} | "
          f"{describe_stated(stated.get('run_time_percent'), stated.get('run_time_range_percent'))} {words[answer['run time']]} | "
          f"{describe(cache)} | {describe_stated(stated.get('cache_percent'), stated.get('cache_range_percent'))} {words[answer['cache']]} | "
          f"{short(by_cache)} | {short(by_waiting)} | {max(phase['other_cpus'] for phase in phases):.2f} |", flush=True)
    return answer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cachemate", type=os.path.abspath)
    parser.add_argument("--pairs", help="numbers of the pairs to measure, from 1, such as 1,6; all")
    parser.add_argument("--json", type=Path, help="write the phases and what the daemon stated to this file")
    arguments = parser.parse_args()
    chosen = range(1, len(PAIRS) + 1) if arguments.pairs is None else [int(number) for number in arguments.pairs.split(",")]
    if os.geteuid() != 0:
        not_run("control groups need root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None] + ([] if find_postgresql() else ["initdb and pgbench"])
    if missing:
        not_run(f"not in PATH: {', '.join(missing)} (packages redis, postgresql, nginx-light, apache2-utils, gcc, xz-utils)")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    mount = next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)
    if mount is None:
        not_run("no cgroup v2 is mounted")
    with tempfile.TemporaryDirectory() as folder:
        work_dir = Path(folder)
        work_dir.chmod(0o755)
        aggressors = build_aggressors(work_dir)
        (work_dir / "c.toml").write_text('window_ms = 500\n[[rules]]\nkind = "unit"\n')
        socket = work_dir / "s"
        daemon = subprocess.Popen([arguments.cachemate, "--quiet", "manage", "--config", work_dir / "c.toml", "--state-dir",
                                   work_dir / "state", "--socket", socket])
        read_status = lambda: json.loads(output(arguments.cachemate, "status", "--json", "--socket", socket))
        answers, records = [], []
        try:
            wait("the daemon answers", socket.exists, 60)
            time.sleep(8)
            print("| n | service | aggressor | run time, last, median (range), % | stated (interval), holds it | CPU by request, last, median (range), % | "
                  "cache, stated, holds it | cache by | waiting by | most CPUs of others |\n|---|---|---|---|---|---|---|---|---|---|")
            for number in chosen:
                service, aggressor = PAIRS[number - 1]
                phases, stated = measure(mount / "system.slice", work_dir, service, aggressor, aggressors[aggressor], read_status)
                answers.append(judge(number, service, aggressor, phases, stated))
                records.append({"service": service, "aggressor": aggressor, "phases": phases, "stated": stated})
                if arguments.json:
                    arguments.json.write_text(json.dumps(records, indent=1))
        finally:
            daemon.terminate()
            daemon.wait()
    held = lambda keys: [answer[key] for answer in answers for key in keys if answer[key] is not None]
    known, medians = held(("run time", "cache")), held(("run time, median", "cache, median"))
    share = sum(known) / max(1, len(known))
    culprits, blamed = sum(answer["culprit"] for answer in answers), sum(answer["spinner"] for answer in answers)
    is_met = 0.85 <= share <= 0.95, culprits >= 11 / 12 * len(answers), blamed == 0
    words = {True: "met", False: "MISSED"}
    print(f"\nintervals that hold the measured loss: {sum(known)} of {len(known)} (85 to 95 %), its median {sum(medians)}: "
          f"{words[is_met[0]]}")
    print(f"culprits: {culprits} of {len(answers)} (11 of 12): {words[is_met[1]]}")
    print(f"a spinner blamed for the cache: {blamed} (0): {words[is_met[2]]}")
    sys.exit(0 if all(is_met) else 1)


if __name__ == "__main__":
    main()
