#!/usr/bin/env python3
"""Real containers: does the daemon name every one, whatever starts, ends and restarts, at which cost, and leave the changes
of owners alone?

Needs root, containerd, ctr, runc and busybox, from PATH or unpacked into --tools (with --download: from Debian's packages,
once), and no registry: the image is built here. Prints a table, and NOT RUN with the reason where something is missing.
Exits with 1 if a target is missed.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

IMAGE = "local/cachemate-test:1"
GROUP = "/cachemate-test"
PACKAGES = ("containerd", "runc", "busybox-static")
PATIENCE_S = 120
# Targets, in percent of a CPU with windows of 200 ms.
MAX_COST_PERCENT = {40: 1.0, 500: 5.0}
ROWS = []


def row(question, answer, is_met=None):
    """A line of the table; `None` = not run."""
    verdict = {None: "NOT RUN", True: "met", False: "MISSED"}[is_met]
    ROWS.append((question, answer, verdict))
    print(f"{question}: {answer}: {verdict}", flush=True)


def table():
    widths = [max(len(line[column]) for line in ROWS) for column in range(3)]
    print("\n" + "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in ROWS))
    return 1 if any(verdict == "MISSED" for _, _, verdict in ROWS) else 0


def not_run(reason):
    print(f"NOT RUN: {reason}")
    sys.exit(0)


def download(folder):
    """Unpacks the packages; nothing is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "usr/bin/containerd").exists() or shutil.which("apt-get") is None:
        return
    with tempfile.TemporaryDirectory(dir=folder) as place:
        fetched = subprocess.run(["apt-get", "download", *PACKAGES], cwd=place, capture_output=True, text=True)
        if fetched.returncode != 0:
            not_run(f"packages cannot be downloaded: {fetched.stderr.strip().splitlines()[-1]}")
        for package in Path(place).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, folder], check=True)


def wait(question, is_done, seconds=PATIENCE_S):
    start = time.monotonic()
    while not is_done():
        if time.monotonic() - start > seconds:
            sys.exit(f"FAILED: {question}: not within {seconds} s")
        time.sleep(0.2)
    return time.monotonic() - start


def image(busybox, path):
    """An OCI image of one static program."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(busybox, arcname="bin/busybox")
    raw = layer.getvalue()
    packed = gzip.compress(raw, 1, mtime=0)

    def digest(content):
        return "sha256:" + hashlib.sha256(content).hexdigest()

    kind = "application/vnd.oci.image"
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/bin"]},
                         "rootfs": {"type": "layers", "diff_ids": [digest(raw)]}}).encode()

    def entry(media, content, **more):
        return {"mediaType": f"{kind}.{media}", "digest": digest(content), "size": len(content), **more}

    manifest = json.dumps({"schemaVersion": 2, "mediaType": f"{kind}.manifest.v1+json",
                           "config": entry("config.v1+json", config),
                           "layers": [entry("layer.v1.tar+gzip", packed)]}).encode()
    names = {"io.containerd.image.name": IMAGE, "org.opencontainers.image.ref.name": "1"}
    index = json.dumps({"schemaVersion": 2, "manifests": [
        entry("manifest.v1+json", manifest, annotations=names, platform={"architecture": "amd64", "os": "linux"})]})
    with tarfile.open(path, "w") as out:
        files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": index.encode()}
        files |= {"blobs/" + digest(blob).replace(":", "/"): blob for blob in (config, manifest, packed)}
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))


class Host:
    """A containerd and a daemon of their own, with all their files below one directory."""

    def __init__(self, folder, cachemate, environment):
        self.folder, self.cachemate, self.environment = folder, cachemate, environment
        self.socket = folder / "containerd.sock"
        self.containers, self.containerd, self.daemon = [], None, None
        (folder / "config.toml").write_text(
            f'version = 2\nroot = "{folder}/root"\nstate = "{folder}/state"\n'
            f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{self.socket}"\n'
            f'[plugins."io.containerd.internal.v1.opt"]\npath = "{folder}/opt"\n')

    def start_containerd(self):
        log = open(self.folder / "containerd.log", "ab")
        self.containerd = subprocess.Popen(["containerd", "-c", self.folder / "config.toml"], env=self.environment,
                                           stdout=log, stderr=log)
        wait("containerd answers", lambda: self.ctr("version", check=False).returncode == 0, 60)

    def stop_containerd(self):
        self.containerd.terminate()
        self.containerd.wait(30)

    def ctr(self, *arguments, check=True):
        ran = subprocess.run(["ctr", "-a", self.socket, *arguments], env=self.environment, capture_output=True, text=True)
        if check and ran.returncode != 0:
            sys.exit(f"FAILED: ctr {' '.join(map(str, arguments))}: {ran.stderr.strip()}")
        return ran

    def start(self, name):
        """Every second container is in a group of its own choice, the others where containerd puts them."""
        group = ["--cgroup", f"{GROUP}/{name}"] if len(self.containers) % 2 else []
        program = ["/bin/busybox", "sh", "-c", "while :; do /bin/busybox sleep 0.5; done"]
        self.ctr("run", "-d", *group, "--net-host", IMAGE, name, *program)
        self.containers.append(name)

    def stop(self, name):
        self.ctr("task", "kill", "-s", "KILL", name, check=False)
        wait(f"{name} ends", lambda: self.ctr("task", "rm", name, check=False).returncode == 0
             or name not in self.ctr("task", "ls", "-q").stdout.split(), 30)
        self.ctr("container", "rm", name, check=False)
        self.containers.remove(name)

    def manage(self, config):
        (self.folder / "cachemate.toml").write_text(config)
        log = open(self.folder / "cachemate.log", "ab")
        self.daemon = subprocess.Popen(
            [self.cachemate, "manage", "-c", self.folder / "cachemate.toml", "--socket", self.folder / "s.sock",
             "--state-dir", self.folder / "state-dir"], env=self.environment, stdout=log, stderr=log)
        wait("the daemon answers", lambda: self.status() is not None, 60)

    def cost_percent(self, seconds):
        before = self.status()
        time.sleep(seconds)
        after = self.status()
        percent = 100 * (after["cpu_ns"] - before["cpu_ns"]) / (after["running_ns"] - before["running_ns"])
        return percent, len(after["tasks"])

    def end_daemon(self):
        self.daemon.terminate()
        self.daemon.wait(60)

    def status(self):
        ran = subprocess.run([self.cachemate, "status", "--json", "--socket", self.folder / "s.sock"],
                             env=self.environment, capture_output=True, text=True)
        return json.loads(ran.stdout) if ran.returncode == 0 else None

    def names(self):
        services = self.status()["services"]
        return sorted(service["name"] for service in services if service["kind"] == "container")

    def wrong_programs(self):
        """Names that a program of a container never has: those of the runtime."""
        return [task["name"] for task in self.status()["tasks"] if task["name"].startswith(("runc", "containerd"))]

    def end(self):
        for name in list(self.containers):
            self.stop(name)
        for process in (self.daemon, self.containerd):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(60)
        # runc removes the containers' groups, but leaves their parent group in each hierarchy.
        hierarchies = Path("/sys/fs/cgroup")
        for group in [hierarchies / GROUP.lstrip("/"), *hierarchies.glob(f"*/{GROUP.lstrip('/')}")]:
            if group.is_dir():
                group.rmdir()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cachemate", type=Path, help="the command that is tested")
    parser.add_argument("--tools", type=Path, help="directory of unpacked packages")
    parser.add_argument("--download", action="store_true", help="download and unpack them there, if they are missing")
    parser.add_argument("--groups", type=int, default=500, help="control groups of the second measurement of costs")
    parser.add_argument("--containers", type=int, default=40)
    parser.add_argument("--cost-seconds", type=float, default=20)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        not_run("containers need root")
    if arguments.download:
        download(arguments.tools)
    places = [str(arguments.tools / place) for place in ("usr/bin", "usr/sbin", "bin")] if arguments.tools else []
    environment = os.environ | {"PATH": ":".join(places + [os.environ["PATH"]])}
    tools = {tool: shutil.which(tool, path=environment["PATH"]) for tool in ("containerd", "ctr", "runc", "busybox")}
    missing = [tool for tool, path in tools.items() if path is None]
    if missing:
        not_run(f"{', '.join(missing)} not found (packages containerd, runc, busybox-static; --tools)")
    folder = Path(tempfile.mkdtemp(prefix="cachemate-containers-"))
    environment["CACHEMATE_LOCK_DIR"] = str(folder)
    host = Host(folder, arguments.cachemate.resolve(), environment)
    try:
        host.start_containerd()
        image(tools["busybox"], folder / "image.tar")
        host.ctr("image", "import", folder / "image.tar")
        if (first := host.ctr("run", "--rm", "--net-host", IMAGE, "first", "/bin/busybox", "true", check=False)).returncode:
            not_run(f"no container can start here: {first.stderr.strip()}")
        check(host, arguments)
        for name in list(host.containers):
            host.stop(name)
        many_groups(host, arguments)
    finally:
        host.end()
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(table())


def check(host, arguments):
    host.manage('window_ms = 200\npolicy = { name = "default" }\n[[rules]]\nkind = "container"\n')
    wanted = [f"c{number}" for number in range(arguments.containers)]
    for name in wanted:
        host.start(name)

    def is_complete():
        return host.names() == sorted(host.containers)

    seconds = wait(f"all {len(wanted)} containers are named", is_complete, 30)
    row(f"{len(wanted)} containers are named after the last start", f"{seconds:.1f} s", True)
    time.sleep(2)
    wrong = host.wrong_programs()
    row("programs with a name of the runtime", str(len(wrong)), not wrong)
    cost(host, f"{len(wanted)} containers", len(wanted), arguments.cost_seconds)
    for name in wanted[::4]:
        host.stop(name)
        host.start(name)
    seconds = wait("restarted containers are named", is_complete, 30)
    row("restarted containers are named", f"{seconds:.1f} s", True)
    for name in wanted[1::4]:
        host.stop(name)
    seconds = wait("ended containers are gone", is_complete, 30)
    row("ended containers are gone", f"{seconds:.1f} s", True)
    host.stop_containerd()
    host.start_containerd()
    time.sleep(2)
    row("a restart of containerd changes no name", str(is_complete()).lower(), is_complete())
    host.end_daemon()
    owners_change(host)


def cost(host, what, number, seconds):
    percent, threads = host.cost_percent(seconds)
    limit = MAX_COST_PERCENT.get(number)
    met = None if limit is None else percent < limit
    row(f"cost of {what}, windows of 200 ms", f"{percent:.2f} % of a CPU, {threads} threads", met)


def owners_change(host):
    """A cpuset that the runtime is told to set from outside wins, and is shown."""
    question = "`runc update --cpuset-cpus` wins and is shown as overridden by its owner"
    name = next((name for name in host.containers if cpuset(f"{GROUP}/{name}").exists()), None)
    if name is None or os.cpu_count() < 2:
        row(question, "no cpuset hierarchy with the container's group, or one CPU")
        return
    file = cpuset(f"{GROUP}/{name}")
    original = file.read_text().strip()
    host.manage(f'mode = "act"\nwindow_ms = 200\npolicy = {{ name = "default" }}\n[[rules]]\nkind = "container"\n'
                f'[[cpusets]]\ncgroup = "{GROUP}/{name}"\ncpus = "0"\n')
    wait("the group is confined", lambda: file.read_text().strip() == "0", 30)
    update = ["runc", "--root", "/run/containerd/runc/default", "update", "--cpuset-cpus"]
    subprocess.run([*update, "1", name], env=host.environment, check=True, capture_output=True)
    wait("the change is shown", lambda: any("overridden by" in line for line in host.status()["overridden"]), 30)
    changes = set()
    for _ in range(20):
        time.sleep(0.2)
        changes.add(file.read_text().strip())
    host.end_daemon()
    changes.add(file.read_text().strip())
    row(question, f"CPUs {', '.join(sorted(changes))} for 4 s and after the end", changes == {"1"})
    subprocess.run([*update, original, name], env=host.environment, check=True, capture_output=True)


def many_groups(host, arguments):
    """Groups as a runtime makes them, with a sleeping program each."""
    base = Path("/sys/fs/cgroup/pids" if Path("/sys/fs/cgroup/pids").is_dir() else "/sys/fs/cgroup") / "docker"
    what = f"{arguments.groups} control groups"
    if base.exists():
        row(f"cost of {what}", f"{base} is in use")
        return
    programs = []
    try:
        for number in range(arguments.groups):
            group = base / f"{number:064x}"
            group.mkdir(parents=True)
            programs.append(subprocess.Popen(["sleep", "1000"]))
            (group / "cgroup.procs").write_text(str(programs[-1].pid))
        host.manage('window_ms = 200\npolicy = { name = "default" }\n[[rules]]\nkind = "container"\n')
        wait("all groups are named", lambda: len(host.names()) == arguments.groups, 60)
        time.sleep(5)
        cost(host, what, arguments.groups, arguments.cost_seconds)
        host.end_daemon()
    finally:
        for program in programs:
            program.kill()
            program.wait()
        for group in [*base.glob("*/"), base]:
            if group.is_dir():
                group.rmdir()


def cpuset(group):
    v1 = Path("/sys/fs/cgroup/cpuset")
    return (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / group.lstrip("/") / "cpuset.cpus"


if __name__ == "__main__":
    main()
