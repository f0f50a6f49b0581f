"""Programs built from the Go module proxy, once, in the user's cache folder; and the table of a test's answers."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cachemate" / "kubernetes"
HELM = ("helm.sh/helm/v3", "v3.19.0", "cmd/helm")
KUBERNETES = ("k8s.io/kubernetes", "v1.36.3")
# Builds share a machine with its users: low priority, and two compilers at most.
BUILD = ["nice", "-n", "10", "go", "build", "-p", "2", "-mod=mod", "-ldflags=-s -w"]
ROWS = []


def row(question, answer, verdict):
    ROWS.append((question, answer, verdict))
    print(f"{question}: {answer}: {verdict}", flush=True)


def finish():
    """Prints the rows as a table, and exits with 1 if one was missed."""
    print("\n| question | answer | verdict |\n|---|---|---|")
    for question, answer, verdict in ROWS:
        print(f"| {question} | {answer} | {verdict} |")
    sys.exit(1 if any(verdict == "MISSED" for _, _, verdict in ROWS) else 0)


def not_run(reason):
    print(f"NOT RUN: {reason}")
    sys.exit(0)


def run(*command, folder=None, seconds=1200):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)


def last_line(text):
    return (text.strip().splitlines() or ["no message"])[-1]


def go_step(*command, folder, seconds=7200):
    """Runs a step of a build; ends the test as NOT RUN if it fails."""
    if shutil.which("go") is None:
        not_run("no go to build tools with")
    try:
        done = run(*command, folder=folder, seconds=seconds)
    except subprocess.TimeoutExpired:
        not_run(f"{command[0]} did not end within {seconds} s")
    if done.returncode != 0:
        not_run(f"{' '.join(command[-3:])}: {last_line(done.stderr)}")
    return done.stdout


def module_dir(folder, module, version):
    """The directory of a module's sources, which are downloaded if need be."""
    return Path(json.loads(go_step("go", "mod", "download", "-json", f"{module}@{version}", folder=folder))["Dir"])


def tool(folder, module, version, package):
    """The path of a tool: from PATH, from an earlier build, or built now in a module of its own."""
    name = package.rsplit("/", 1)[-1]
    built = folder / name
    if path := shutil.which(name):
        return path
    if not built.exists():
        place = folder / f"build-{name}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "go.mod").write_text("module tools\n\ngo 1.26\n")
        go_step("go", "get", f"{module}/{package}@{version}", folder=place)
        go_step(*BUILD, "-o", str(built), f"{module}/{package}", folder=place)
    return str(built)


def control_plane(folder):
    """Paths of etcd, kube-apiserver and kube-scheduler, each from PATH, an earlier build, or built now.

    Kubernetes' module names its own libraries by directories, which only its own tree has. So a module with the same
    requirements names their published versions instead. etcd is the version that Kubernetes requires.
    """
    names = ("etcd", "kube-apiserver", "kube-scheduler")
    paths = {name: shutil.which(name) or str(folder / name) for name in names}
    missing = [name for name, path in paths.items() if not Path(path).exists()]
    if not missing:
        return paths
    place = folder / "build-control-plane"
    (place / "etcd").mkdir(parents=True, exist_ok=True)
    (place / "etcd" / "main.go").write_text(
        'package main\n\nimport (\n\t"os"\n\n\t"go.etcd.io/etcd/server/v3/etcdmain"\n)\n\n'
        "func main() { etcdmain.Main(os.Args) }\n")
    module, version = KUBERNETES
    source = module_dir(place, module, version)
    shutil.copyfile(source / "go.sum", place / "go.sum")
    library = version.replace("v1.", "v0.", 1)
    text = (source / "go.mod").read_text()
    requires = "".join(re.findall(r"^require \((.*?)^\)", text, re.M | re.S))
    own = re.findall(r"^\s*(k8s\.io/[\w-]+) v0\.0\.0$", requires, re.M)
    requires = re.sub(r"(k8s\.io/[\w-]+) v0\.0\.0$", rf"\1 {library}", requires, flags=re.M)
    replaces = "".join(f"\t{name} => {name} {library}\n" for name in own)
    go = re.search(r"^go .*$", text, re.M)[0]
    (place / "go.mod").write_text(
        f"module tools\n\n{go}\n\nrequire {module} {version}\n\nrequire ({requires})\n\nreplace (\n{replaces})\n")
    for name in missing:
        package = "./etcd" if name == "etcd" else f"{module}/cmd/{name}"
        print(f"building {name}: minutes, once", flush=True)
        go_step(*BUILD, "-o", paths[name], package, folder=place)
    return paths
