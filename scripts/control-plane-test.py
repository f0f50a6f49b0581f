#!/usr/bin/env python3
"""Does the real scheduler place pods as the extender's forecasts say, in time, and does it go on without the extender?

etcd, kube-apiserver, kube-scheduler and kwok run on the loopback interface. kwok simulates nodes and runs their pods;
this script publishes a NodeCacheState for each node, as a daemon on it would, from a model of its caches. So the test
shows decisions, not effects on real caches. The programs are built from the Go module proxy into the user's cache folder,
unless they are in PATH or already there. Prints a table, and NOT RUN with the reason where something is missing.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from cluster_client import ApiClient, PodWatch, free_port, in_parallel
from go_tools import CACHE, HELM, control_plane, finish, last_line, module_dir, not_run, row, tool
from simulated_nodes import KINDS, NODE, SimulatedNodes, profile_object

KWOK = ("sigs.k8s.io/kwok", "v0.8.0", "cmd/kwok")
STAGES = ("node/fast/node-initialize", "node/heartbeat/node-heartbeat", "pod/fast/pod-ready", "pod/fast/pod-delete")
PACKAGING = Path(__file__).resolve().parent.parent / "packaging" / "kubernetes"
# Pods that are created while the extender hangs: each waits for the timeout, so a few are enough.
HUNG_PODS = 20
# Silence that is no pause of the scheduler's, on a machine that does other work.
MAX_PAUSE_SECONDS = 5.0
# Time in which the daemon has to measure most of what runs here: probes of some threads take tens of seconds.
DAEMON_SECONDS = 90


class Cluster:
    """The programs of a control plane, and the objects of the test in it."""

    def __init__(self, folder, programs, cachemate, priority):
        self.folder, self.programs, self.cachemate, self.priority = folder, programs, cachemate, priority
        self.processes = {}
        self.extender_port = free_port()
        self.extender_url = f"http://127.0.0.1:{self.extender_port}"

    def start(self, name, *command):
        log = open(self.folder / f"{name}.log", "ab")
        self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        if self.priority and name == "extender":
            os.setpriority(os.PRIO_PROCESS, self.processes[name].pid, self.priority)

    def end(self, name):
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def end_all(self):
        for name in list(self.processes):
            self.end(name)

    def last_words(self, name):
        return last_line((self.folder / f"{name}.log").read_text(errors="replace"))

    def start_control_plane(self):
        folder, client_port, peer_port, port = self.folder, free_port(), free_port(), free_port()
        peer = f"http://127.0.0.1:{peer_port}"
        etcd = f"http://127.0.0.1:{client_port}"
        self.start("etcd", self.programs["etcd"], "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync",
                   "--listen-client-urls", etcd, "--advertise-client-urls", etcd, "--listen-peer-urls", peer,
                   "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", "--log-level", "error")
        subprocess.run(["openssl", "genrsa", "-out", str(folder / "key"), "2048"], check=True, capture_output=True)
        # The daemon and the extender have the rights of their service accounts in the chart, and no others.
        accounts = "".join(f'{name}-secret,system:serviceaccount:cachemate:cachemate-{name},{name},"system:authenticated"\n'
                           for name in ("node", "extender"))
        (folder / "tokens.csv").write_text("secret,test,test,system:masters\n" + accounts)
        for name in ("node", "extender"):
            (folder / f"{name}-token").write_text(f"{name}-secret")
        self.start("kube-apiserver", self.programs["kube-apiserver"], "--etcd-servers", etcd,
                   "--bind-address", "127.0.0.1", "--secure-port", str(port), "--cert-dir", str(folder / "certificates"),
                   "--token-auth-file", str(folder / "tokens.csv"), "--authorization-mode", "RBAC",
                   "--service-cluster-ip-range", "10.0.0.0/24", "--endpoint-reconciler-type", "none",
                   "--service-account-issuer", "https://localhost", "--service-account-key-file", str(folder / "key"),
                   "--service-account-signing-key-file", str(folder / "key"), "--enable-priority-and-fairness=false",
                   "--disable-admission-plugins", "ServiceAccount,TaintNodesByCondition",
                   "--max-requests-inflight", "2000", "--max-mutating-requests-inflight", "1000", "--profiling=false")
        self.certificate = folder / "certificates" / "apiserver.crt"
        self.url = f"https://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while True:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    not_run(f"{name} ended: {self.last_words(name)}")
            try:
                self.api = ApiClient("127.0.0.1", port, self.certificate, "secret")
                self.api.call("GET", "/readyz")
                self.api.call("GET", "/api/v1/namespaces/default")
                break
            except (OSError, RuntimeError) as error:
                if time.monotonic() > deadline:
                    not_run(f"kube-apiserver is not ready after 120 s: {error}")
                time.sleep(0.2)
        (folder / "kubeconfig").write_text(
            f"apiVersion: v1\nkind: Config\ncurrent-context: test\ncontexts: [{{name: test, context: {{cluster: test, user: "
            f"test}}}}]\nclusters: [{{name: test, cluster: {{server: '{self.url}', certificate-authority: "
            f"{self.certificate}}}}}]\nusers: [{{name: test, user: {{token: secret}}}}]\n")

    def install_resources(self):
        """Installs the packaged resources and roles, and waits until the resources are served."""
        rendered = subprocess.run([self.programs["helm"], "template", "cachemate", str(PACKAGING / "chart"), "--namespace",
                                   "cachemate", "--set", "extender.enabled=true"], check=True, capture_output=True, text=True)
        for document in rendered.stdout.split("\n---\n"):
            kind = next((line.split()[1] for line in document.splitlines() if line.startswith("kind:")), None)
            if kind in ("ClusterRole", "ClusterRoleBinding"):
                self.api.call("POST", f"/apis/rbac.authorization.k8s.io/v1/{kind.lower()}s", document.encode(),
                              kind="application/yaml")
        for path in sorted((PACKAGING / "crds").glob("*.yaml")):
            self.api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", path.read_bytes(),
                          kind="application/yaml")
        deadline = time.monotonic() + 60
        while True:
            try:
                for resource in ("workloadprofiles", "nodecachestates"):
                    self.api.call("GET", f"{SimulatedNodes.API}/{resource}?limit=1")
                return
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def start_kwok(self, stages):
        (self.folder / "stages.yaml").write_text("\n---\n".join(path.read_text() for path in stages))
        self.start("kwok", self.programs["kwok"], "--kubeconfig", str(self.folder / "kubeconfig"), "--manage-all-nodes=true",
                   "--config", str(self.folder / "stages.yaml"), "--node-lease-duration-seconds", "0",
                   "--server-address", f"127.0.0.1:{free_port()}")

    def start_scheduler(self, extender_url):
        """Starts the scheduler with the packaged configuration, or without an extender."""
        text = (PACKAGING / "scheduler-config.yaml").read_text()
        if extender_url is None:
            text = text.split("extenders:")[0]
        else:
            text = text.replace("http://cachemate-extender.cachemate.svc:8888", extender_url)
            assert extender_url in text, "the packaged configuration has another address"
        text += (f"clientConnection: {{kubeconfig: {self.folder / 'kubeconfig'}, qps: 2000, burst: 2000}}\n"
                 "leaderElection: {leaderElect: false}\n")
        (self.folder / "scheduler.yaml").write_text(text)
        self.start("kube-scheduler", self.programs["kube-scheduler"], "--config", str(self.folder / "scheduler.yaml"),
                   "--secure-port", "0")

    def start_extender(self, nodes):
        """Starts the extender as documented, and waits until it knows all nodes."""
        self.start("extender", self.cachemate, "extender", "--api-server", self.url, "--ca-file", str(self.certificate),
                   "--token-file", str(self.folder / "extender-token"), "--listen", f"127.0.0.1:{self.extender_port}")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if self.metrics().get("fresh_nodes") == nodes:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        row("the extender knows all nodes within 60 s", self.last_words("extender"), "MISSED")

    def score_of(self, node):
        """The score of a node for a pod of the first kind."""
        body = json.dumps({"Pod": pod_object("question", next(iter(KINDS))), "NodeNames": [node]}).encode()
        request = urllib.request.Request(f"{self.extender_url}/prioritize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)[0]["score"]

    def metrics(self):
        """Values of the extender's metrics, by name and labels without the common prefix."""
        with urllib.request.urlopen(f"{self.extender_url}/metrics", timeout=5) as answer:
            lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name.removeprefix("cachemate_extender_"): float(value) for name, value in lines}


def pod_object(name, kind):
    values = KINDS[kind]
    annotations = {"cachemate.io/profile": kind}
    if values["limit_percent"] is not None:
        annotations["cachemate.io/max-slowdown"] = f"{values['limit_percent']}%"
    requests = {"cpu": str(values["cpus"]), "memory": "1Gi"}
    return {"metadata": {"name": name, "annotations": annotations},
            "spec": {"containers": [{"name": "main", "image": f"local/{kind}:1", "resources": {"requests": requests}}]}}


class Placement:
    """One round of the test: pods are created and bound, and then removed."""

    def __init__(self, cluster, nodes, publish):
        self.cluster, self.nodes = cluster, nodes
        cluster.api.delete_pods()
        nodes.clear()
        self.watch = PodWatch(cluster.api, nodes.bind)
        if publish:
            nodes.start_publishing()

    def create(self, prefix, kinds):
        names = [f"{prefix}-{number}" for number in range(len(kinds))]
        pods = [pod_object(name, kind) for name, kind in zip(names, kinds)]
        in_parallel(self.cluster.api, [("POST", "/api/v1/namespaces/default/pods", pod) for pod in pods])

    def wait(self, count, seconds):
        """Waits until this many pods are bound. Returns how many are."""
        deadline = time.monotonic() + seconds
        while len(self.watch.times) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        return len(self.watch.times)

    def finish(self):
        self.nodes.stop_publishing()
        self.watch.stop()


def check_daemon(cluster, nodes):
    """A daemon on this machine publishes its caches as a further node, which the extender then ranks."""
    folder, name = cluster.folder, "node-daemon"
    (folder / "daemon.toml").write_text('[[rules]]\ncommand = "*"\naction = "observe"\n')
    cluster.start("daemon", cluster.cachemate, "manage", "--config", str(folder / "daemon.toml"), "--state-dir",
                  str(folder / "daemon"), "--socket", str(folder / "daemon.sock"), "--api-server", cluster.url, "--ca-file",
                  str(cluster.certificate), "--token-file", str(folder / "node-token"), "--node", name)
    nodes.publish_all()
    cluster.start_extender(nodes.count + 1)
    start, path = time.monotonic(), f"{nodes.API}/nodecachestates/{name}"
    state, times, score = None, [], None
    while time.monotonic() - start < DAEMON_SECONDS:
        time.sleep(1)
        try:
            status = json.loads(cluster.api.call("GET", path))["status"]
        except (RuntimeError, KeyError):
            continue
        state = status["state"]
        if not times or times[-1] != status["observedUnixSeconds"]:
            times.append(status["observedUnixSeconds"])
        if all("fillBytesPerSecond" in cache for cache in state["caches"]):
            score = cluster.score_of(name)
            break
    if state is None:
        row(f"the daemon's node state is at the API server within {DAEMON_SECONDS} s", cluster.last_words("daemon"), "MISSED")
    else:
        known = sum("fillBytesPerSecond" in cache for cache in state["caches"])
        shortest = min((later - earlier for earlier, later in zip(times, times[1:])), default=DAEMON_SECONDS)
        row("the daemon's node state is at the API server: caches, with known fills, shortest time between two writes",
            f"{len(state['caches'])}, {known}, {shortest:.1f} s", "met" if shortest >= 9.5 else "MISSED")
        row("the extender ranks the daemon's node (neutral: 5)", f"score {score}" if score is not None else
            "NOT RUN: this host measured the fills of too few threads", "met" if score is not None else "NOT RUN")
    cluster.end("daemon")
    cluster.end("extender")


def pods_of(count, seed):
    """Kinds of pods, in random order and in fixed shares."""
    kinds = [kind for kind, values in KINDS.items() for _ in range(round(count * values["share"]))]
    kinds = (kinds + ["web"] * count)[:count]
    random.Random(seed).shuffle(kinds)
    return kinds


def place(cluster, nodes, kinds, extender, seconds):
    """Places pods with or without the extender. Returns the outcome as a dictionary."""
    placement = Placement(cluster, nodes, publish=extender)
    start = time.monotonic()
    placement.create("pod", kinds)
    bound = placement.wait(len(kinds), seconds)
    elapsed = max(placement.watch.times, default=start) - start
    outcome = nodes.summary() | {"bound": bound, "per_second": bound / max(elapsed, 1e-9)}
    placement.finish()
    return outcome


def quantile_bound(metrics, verb, share):
    """The upper bound in ms of the histogram's bucket in which a quantile lies."""
    prefix = 'request_seconds_bucket{le="'
    buckets = sorted((float(name[len(prefix):].split('"')[0]), value) for name, value in metrics.items()
                     if name.startswith(prefix) and f'verb="{verb}"' in name)
    total = buckets[-1][1] if buckets else 0
    return next((bound * 1000 for bound, value in buckets if total and value >= share * total), None)


def check_placement(cluster, nodes, pods, seed, seconds):
    kinds = pods_of(pods, seed)
    cluster.start_scheduler(None)
    plain = place(cluster, nodes, kinds, False, seconds)
    cluster.end("kube-scheduler")
    nodes.publish_all()
    cluster.start_extender(nodes.count)
    cluster.start_scheduler(cluster.extender_url)
    ranked = place(cluster, nodes, kinds, True, seconds)
    metrics = cluster.metrics()
    for name, outcome in (("without the extender", plain), ("with it", ranked)):
        row(f"pods bound {name}", f"{outcome['bound']} of {pods}, {outcome['per_second']:.0f} a second",
            "met" if outcome["bound"] == pods else "MISSED")
    # A pod for which one node remains needs no scores.
    for verb in ("filter", "prioritize"):
        count = metrics.get(f'request_seconds_count{{verb="{verb}"}}', 0)
        median, slow = quantile_bound(metrics, verb, 0.5), quantile_bound(metrics, verb, 0.99)
        row(f"the extender's {verb}: 99 % within 1 ms",
            f"{count:.0f} requests; median at most {median} ms, 99 % at most {slow} ms",
            "met" if count >= 0.9 * pods and slow is not None and slow <= 1.0 else "MISSED")
    refused = metrics["refused_requests_total"]
    row("requests that the extender refused", f"{refused:.0f}", "met" if refused == 0 else "MISSED")
    for key, question in (("pairs", "pairs of index and scan on one cache"),
                          ("exceeding", "index pods beyond their limit, by the nodes' model")):
        row(f"{question}: without the extender, with it", f"{plain[key]}, {ranked[key]}",
            "met" if ranked[key] < plain[key] else "MISSED")


def check_death(cluster, nodes, pods, seed, seconds):
    """The extender is killed once a third of the pods is bound."""
    kinds = pods_of(pods, seed + 1)
    placement = Placement(cluster, nodes, publish=True)
    creation = threading.Thread(target=placement.create, args=("killed", kinds))
    creation.start()
    placement.wait(pods // 3, seconds)
    cluster.end("extender")
    killed = time.monotonic()
    before = len(placement.watch.times)
    creation.join()
    bound = placement.wait(pods, seconds)
    times = [killed] + sorted(moment for moment in placement.watch.times if moment > killed)
    pause = max((later - earlier for earlier, later in zip(times, times[1:])), default=float("inf"))
    row("the extender is killed: all pods are bound, the longest pause",
        f"{bound} of {pods} ({bound - before} after it), {pause:.2f} s",
        "met" if bound == pods and bound > before and pause < MAX_PAUSE_SECONDS else "MISSED")
    placement.finish()


def check_hang(cluster, nodes, seed):
    """The extender is stopped while pods are created, and goes on afterward."""
    nodes.publish_all()
    cluster.start_extender(nodes.count)
    placement = Placement(cluster, nodes, publish=True)
    extender = cluster.processes["extender"]
    extender.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    placement.create("hung", pods_of(HUNG_PODS, seed + 2))
    bound = placement.wait(HUNG_PODS, 60)
    each = (max(placement.watch.times, default=start + 60) - start) / HUNG_PODS
    extender.send_signal(signal.SIGCONT)
    # Documented: two requests for each pod, each of which ends after httpTimeout.
    row("the extender hangs: pods are bound, seconds for each (documented: 0.4)", f"{bound} of {HUNG_PODS}, {each:.2f} s",
        "met" if bound == HUNG_PODS and each < 0.5 else "MISSED")
    start = time.monotonic()
    placement.create("woken", pods_of(200, seed + 3))
    bound = placement.wait(HUNG_PODS + 200, 60) - HUNG_PODS
    row("it goes on: 200 more pods are bound", f"{bound} in {time.monotonic() - start:.1f} s",
        "met" if bound == 200 else "MISSED")
    placement.finish()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="path of cachemate, a release build")
    parser.add_argument("--tools", type=Path, default=CACHE, help="directory for the built programs")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--priority", type=int, default=0,
                        help="nice value of the extender: below 0, other work on this machine delays it less")
    parser.add_argument("--seconds", type=float, default=600, help="longest time of each round")
    options = parser.parse_args()
    # A test that is told to end ends its programs, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if shutil.which("openssl") is None:
        not_run("no openssl to make a key with")
    programs = control_plane(options.tools)
    programs["kwok"] = tool(options.tools, *KWOK)
    programs["helm"] = tool(options.tools, *HELM)
    source = module_dir(options.tools, *KWOK[:2]) / "kustomize" / "stage"
    with tempfile.TemporaryDirectory(prefix="cachemate-kubernetes-") as folder:
        cluster = Cluster(Path(folder), programs, str(Path(options.program).resolve()), options.priority)
        nodes = None
        try:
            cluster.start_control_plane()
            cluster.install_resources()
            nodes = SimulatedNodes(cluster.api, options.nodes)
            nodes.create()
            cluster.start_kwok([source / f"{stage}.yaml" for stage in STAGES])
            in_parallel(cluster.api, [("POST", f"{nodes.API}/workloadprofiles", profile_object(kind)) for kind in KINDS])
            print(f"{options.nodes} nodes of {NODE['caches']} caches, {options.pods} pods, seed {options.seed}, "
                  f"{os.cpu_count()} CPUs, extender's priority {options.priority}, load {os.getloadavg()[0]:.1f}", flush=True)
            check_daemon(cluster, nodes)
            check_placement(cluster, nodes, options.pods, options.seed, options.seconds)
            check_death(cluster, nodes, min(options.pods, 1000), options.seed, options.seconds)
            check_hang(cluster, nodes, options.seed)
            print(f"load at the end {os.getloadavg()[0]:.1f}")
        finally:
            if nodes is not None:
                nodes.stop_publishing()
            cluster.end_all()
    finish()


if __name__ == "__main__":
    main()
