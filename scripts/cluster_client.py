"""A client of kube-apiserver with the standard library alone: calls, many calls at a time, and a watch of bound pods."""

import http.client
import json
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

PODS = "/api/v1/namespaces/default/pods"
WORKERS = 8


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ApiClient:
    """Calls over one connection for each thread."""

    def __init__(self, host, port, certificate, token):
        self.host, self.port, self.token = host, port, token
        self.context = ssl.create_default_context(cafile=str(certificate))
        self.local = threading.local()

    def connect(self, timeout=60):
        return http.client.HTTPSConnection(self.host, self.port, context=self.context, timeout=timeout)

    def headers(self, kind="application/json"):
        return {"Authorization": f"Bearer {self.token}", "Content-Type": kind, "Accept": "application/json"}

    def call(self, method, path, body=None, kind="application/json"):
        """The answer's text. An answer that is no success is an error with its text."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        is_reused = getattr(self.local, "connection", None) is not None
        if not is_reused:
            self.local.connection = self.connect()
        try:
            try:
                self.local.connection.request(method, path, data, self.headers(kind))
            except OSError:
                # The server has closed a connection that was idle, so it has not seen the request.
                if not is_reused:
                    raise
                self.local.connection = self.connect()
                self.local.connection.request(method, path, data, self.headers(kind))
            answer = self.local.connection.getresponse()
            text = answer.read().decode()
        except OSError:
            self.local.connection = None
            raise
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status}: {text[:300]}")
        return text

    def delete_pods(self):
        """Deletes all pods, and waits until they are gone."""
        self.call("DELETE", PODS, {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0})
        deadline = time.monotonic() + 300
        while json.loads(self.call("GET", f"{PODS}?limit=1"))["items"]:
            if time.monotonic() > deadline:
                raise RuntimeError("pods are still there after 300 s")
            time.sleep(0.2)


def in_parallel(api, calls):
    """Makes calls on several connections, and raises the first error."""
    with ThreadPoolExecutor(WORKERS) as pool:
        for done in [pool.submit(api.call, *call) for call in calls]:
            done.result()


class PodWatch:
    """Watches pods that are bound, and reports each once with its profile and node."""

    def __init__(self, api, report):
        self.api, self.report = api, report
        self.times, self.names = [], set()
        self.connection, self.stopped = None, False
        self.thread = threading.Thread(target=self.follow, daemon=True)
        self.thread.start()

    def follow(self):
        """Lists and watches until the watch is stopped. The server ends watches whose readers are slow."""
        while not self.stopped:
            try:
                bound = f"{PODS}?fieldSelector=spec.nodeName!%3D"
                listed = json.loads(self.api.call("GET", bound))
                for pod in listed["items"]:
                    self.take(pod)
                self.connection = self.api.connect()
                version = listed["metadata"]["resourceVersion"]
                self.connection.request("GET", f"{bound}&watch=true&resourceVersion={version}", headers=self.api.headers())
                for line in self.connection.getresponse():
                    event = json.loads(line)
                    if event["type"] in ("ADDED", "MODIFIED"):
                        self.take(event["object"])
            except Exception as error:
                # A read that another thread ends may fail in any way.
                if not self.stopped:
                    print(f"the watch of pods ended: {error}; listing again", flush=True)

    def take(self, pod):
        name = pod["metadata"]["name"]
        if name not in self.names:
            self.names.add(name)
            self.report(pod["metadata"]["annotations"]["cachemate.io/profile"], pod["spec"]["nodeName"])
            self.times.append(time.monotonic())

    def stop(self):
        self.stopped = True
        if self.connection is not None and self.connection.sock is not None:
            # Ends the read of the thread.
            self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(timeout=30)
