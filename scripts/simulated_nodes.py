"""Nodes of a simulated cluster: a model of their caches, and the states that a daemon on each would publish.

Pods on a cache share it in proportion to the lines that they fill, which is the steady state of an LRU cache. A node
starts a pod on its least busy cache, as the kernel would. The kinds of pods are assumptions: a service that reuses 20 MB,
a scan of memory that reuses nothing, and a small service; they stand for no particular programs.
"""

import threading
import time
from collections import defaultdict

from cluster_client import in_parallel

MIB = 1 << 20
NODE = {"hertz": 2.5e9, "memory": 1.0e11, "caches": 2, "cache_bytes": 32 * MIB, "cpus": 16}
KINDS = {
    "index": {"share": 0.3, "cpus": 2, "limit_percent": 10, "base": 0.7, "stall": 90, "references": 12, "writes": 0.2,
              "curve": [(1, 11.5), (4, 9.7), (8, 7.3), (12, 5.0), (16, 2.7), (20, 0.6), (32, 0.5)]},
    "scan": {"share": 0.2, "cpus": 2, "limit_percent": None, "base": 0.7, "stall": 40, "references": 30, "writes": 0.3,
             "curve": [(1, 28.0), (32, 28.0)]},
    "web": {"share": 0.5, "cpus": 1, "limit_percent": None, "base": 0.9, "stall": 90, "references": 4, "writes": 0.2,
            "curve": [(0.5, 2.0), (1, 0.5), (2, 0.1), (32, 0.1)]},
}
# A node publishes at most this often if it has changed, and at least this often if it has not; the schedule of the
# documentation is 30 s and 10 % of a change, and one pod changes a node by more.
CHANGED_SECONDS = 10.0
UNCHANGED_SECONDS = 30.0
SHARES = (1.0, 0.75, 0.5, 0.25)


def misses(kind, size):
    """Misses for each thousand instructions with this many bytes."""
    curve = KINDS[kind]["curve"]
    size /= MIB
    for (low, high_misses), (high, low_misses) in zip(curve, curve[1:]):
        if size <= high:
            part = max(0.0, (size - low) / (high - low))
            return high_misses + part * (low_misses - high_misses)
    return curve[-1][1]


def cycles(kind, size):
    return KINDS[kind]["base"] + KINDS[kind]["stall"] * misses(kind, size) / 1000


def fills(kind, size):
    """Bytes that a pod fills in a second."""
    return misses(kind, size) / 1000 / cycles(kind, size) * NODE["hertz"] * KINDS[kind]["cpus"] * 64


def footprint(kind):
    """Bytes beyond which misses do not fall."""
    curve = KINDS[kind]["curve"]
    if curve[0][1] == curve[-1][1]:
        return NODE["cache_bytes"]
    return next(size for size, value in curve if value == curve[-1][1]) * MIB


def spaces(kinds, size):
    """Bytes of each pod on a cache of this size, by iteration with half steps."""
    result = [size / max(1, len(kinds))] * len(kinds)
    for _ in range(30):
        rates = [fills(kind, space) for kind, space in zip(kinds, result)]
        total = sum(rates) or 1.0
        result = [min(footprint(kind), 0.5 * space + 0.5 * size * rate / total)
                  for kind, space, rate in zip(kinds, result, rates)]
    return result


def slowdowns(kinds, size):
    """Slowdown in percent of each pod, relative to the whole cache."""
    alone = NODE["cache_bytes"]
    return [(cycles(kind, space) / cycles(kind, alone) - 1) * 100 for kind, space in zip(kinds, spaces(kinds, size))]


def cache_state(kinds):
    """A cache of the resource NodeCacheState."""
    sizes = spaces(kinds, NODE["cache_bytes"])
    rate = sum(fills(kind, size) for kind, size in zip(kinds, sizes))
    traffic = sum(fills(kind, size) * (1 + KINDS[kind]["writes"]) for kind, size in zip(kinds, sizes))
    cpus = sum(KINDS[kind]["cpus"] for kind in kinds)
    occupancy = min(sum(sizes), NODE["cache_bytes"])
    effects = []
    for share in SHARES if kinds else ():
        losses = slowdowns(kinds, share * occupancy)
        mean = sum(loss * KINDS[kind]["cpus"] for kind, loss in zip(kinds, losses)) / cpus
        effects.append({"share": share, "slowdownPercent": max(0.0, mean), "brokenLimits": broken_limits(kinds, losses)})
    return {"sizeBytes": NODE["cache_bytes"], "cpus": NODE["cpus"], "busyCpus": cpus, "fillBytesPerSecond": rate,
            "occupancyBytes": occupancy, "bandwidthLeftBytesPerSecond": max(0.0, NODE["memory"] - traffic),
            "effects": effects}


def broken_limits(kinds, losses):
    limits = [(KINDS[kind]["limit_percent"], loss) for kind, loss in zip(kinds, losses)]
    return sum(1 for limit, loss in limits if limit is not None and loss > limit)


def profile_object(kind):
    values = KINDS[kind]
    curve = [{"bytes": size * MIB, "missesPerKiloInstr": value} for size, value in values["curve"]]
    return {"apiVersion": "cachemate.io/v1alpha1", "kind": "WorkloadProfile", "metadata": {"name": kind},
            "spec": {"images": [f"local/{kind}:1"], "profile": {
                "baseCyclesPerInstr": values["base"], "stallCyclesPerMiss": values["stall"],
                "referencesPerKiloInstr": values["references"], "writeShare": values["writes"], "curve": curve}}}


class SimulatedNodes:
    """All nodes with the pods on their caches, and the thread that publishes their states."""

    API = "/apis/cachemate.io/v1alpha1"

    def __init__(self, api, count):
        self.api, self.count = api, count
        self.lock = threading.Lock()
        self.states = {}
        self.thread, self.stopping = None, threading.Event()
        self.clear()

    def name(self, number):
        return f"node-{number:05}"

    def clear(self):
        with self.lock:
            self.caches = defaultdict(lambda: [[] for _ in range(NODE["caches"])])
            self.changed = set()

    def bind(self, kind, node):
        """Puts a pod on the node's least busy cache."""
        with self.lock:
            caches = self.caches[node]
            min(caches, key=lambda kinds: sum(KINDS[one]["cpus"] for one in kinds)).append(kind)
            self.changed.add(node)

    def create(self):
        cpus = NODE["cpus"] * NODE["caches"]
        amounts = {"cpu": str(cpus), "memory": "256Gi", "pods": "110"}
        names = [self.name(number) for number in range(self.count)]
        ready = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
        in_parallel(self.api, [("POST", "/api/v1/nodes", {
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
            "status": {"allocatable": amounts, "capacity": amounts, "conditions": ready}}) for name in names])
        in_parallel(self.api, [("POST", f"{self.API}/nodecachestates", {
            "apiVersion": "cachemate.io/v1alpha1", "kind": "NodeCacheState", "metadata": {"name": name}}) for name in names])
        self.publish_all()

    def publish(self, names):
        calls = []
        for name in names:
            with self.lock:
                caches = [tuple(sorted(kinds)) for kinds in self.caches[name]]
            state = {"hertz": NODE["hertz"], "memoryBytesPerSecond": NODE["memory"], "policy": "off",
                     "caches": [self.state_of(kinds) for kinds in caches]}
            status = {"status": {"observedUnixSeconds": time.time(), "state": state}}
            calls.append(("PATCH", f"{self.API}/nodecachestates/{name}/status", status, "application/merge-patch+json"))
        in_parallel(self.api, calls)

    def state_of(self, kinds):
        if kinds not in self.states:
            self.states[kinds] = cache_state(kinds)
        return self.states[kinds]

    def publish_all(self):
        self.publish([self.name(number) for number in range(self.count)])

    def start_publishing(self):
        self.publish_all()
        self.stopping.clear()
        self.thread = threading.Thread(target=self.keep_publishing, daemon=True)
        self.thread.start()

    def stop_publishing(self):
        if self.thread is not None:
            self.stopping.set()
            self.thread.join(timeout=60)
            self.thread = None

    def keep_publishing(self):
        """Every node has its own moment in the interval, and publishes then if it has changed or was long silent."""
        start, tick, ticks = time.monotonic(), 0, 50
        rounds = round(UNCHANGED_SECONDS / CHANGED_SECONDS)
        while not self.stopping.wait(max(0.0, start + tick * CHANGED_SECONDS / ticks - time.monotonic())):
            due = {self.name(number) for number in range(tick % ticks, self.count, ticks)}
            silent = {self.name(number) for number in range(tick % ticks, self.count, ticks)
                      if (number // ticks) % rounds == (tick // ticks) % rounds}
            with self.lock:
                changed = self.changed & due
                self.changed -= due
            self.publish(sorted(changed | silent))
            tick += 1

    def summary(self):
        """Pairs of index and scan on one cache, and index pods beyond their limit."""
        with self.lock:
            caches = [tuple(sorted(kinds)) for caches in self.caches.values() for kinds in caches if kinds]
        pairs = sum(kinds.count("index") * kinds.count("scan") for kinds in caches)
        exceeding = sum(broken_limits(kinds, slowdowns(kinds, NODE["cache_bytes"])) for kinds in caches)
        return {"pairs": pairs, "exceeding": exceeding}
