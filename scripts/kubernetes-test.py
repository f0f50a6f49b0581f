#!/usr/bin/env python3
"""Does the chart render objects of the Kubernetes API, with its default values and with every option?

helm and kubeconform are built from the Go module proxy into --tools, unless they are in PATH or already there. The schemas
are those of the API server's own description in the module k8s.io/kubernetes. Prints a table, and NOT RUN with the reason
where something is missing. Exits with 1 if an object is refused.
"""

import argparse
import json
import subprocess
from pathlib import Path

from go_tools import CACHE, HELM, KUBERNETES, finish, last_line, module_dir, row, run, tool

KUBECONFORM = ("github.com/yannh/kubeconform", "v0.8.0", "cmd/kubeconform")
# API documents that define the kinds of the chart.
APIS = ("api__v1", "apis__apps__v1", "apis__rbac.authorization.k8s.io__v1", "apis__networking.k8s.io__v1",
        "apis__apiextensions.k8s.io__v1")
PACKAGING = Path(__file__).resolve().parent.parent / "packaging" / "kubernetes"
# A kind of the Prometheus operator, which the API documents do not describe.
MONITOR = "PodMonitor"
# Sets of options of the chart in addition to the default values, and the objects in their output that have no schema.
VALUES = {
    "default values": ([], 0),
    "with the extender": (["extender.enabled=true"], 0),
    "acting, on some nodes": (["node.mode=act", "node.nodeSelector.pool=batch", "node.tolerations[0].operator=Exists"], 0),
    "with resctrl, and an extender with a token and a scheduler on the host's network": (
        ["node.resctrl=true", "extender.enabled=true", "extender.schedulerTokenSecret=scheduler",
         "extender.schedulerCidrs={10.0.0.4/32}"], 0),
    "with a monitor": (["podMonitor.enabled=true", "podMonitor.tokenSecret=cachemate-metrics"], 1),
}


def schemas(folder):
    """One schema for each kind, from the API server's description; unknown fields are refused."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        return folder
    source = module_dir(folder, *KUBERNETES) / "api" / "openapi-spec" / "v3"
    for api in APIS:
        text = (source / f"{api}_openapi.json").read_text().replace("#/components/schemas/", "#/definitions/")
        definitions = {name: strict(schema) for name, schema in json.loads(text)["components"]["schemas"].items()}
        for name, schema in definitions.items():
            for kind in schema.get("x-kubernetes-group-version-kind", []):
                prefix = kind["group"].split(".")[0]
                words = [kind["kind"].lower(), *([prefix] if prefix else []), kind["version"]]
                file = folder / ("-".join(words) + ".json")
                file.write_text(json.dumps({"$ref": f"#/definitions/{name}", "definitions": definitions}))
    return folder


def strict(schema):
    """The same schema, which refuses unknown fields, and in whose form OpenAPI's extensions are known."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    result = {key: strict(value) for key, value in schema.items() if key != "default"}
    if isinstance(result.get("properties"), dict) and "additionalProperties" not in result:
        result["additionalProperties"] = False
    return result


def conform(kubeconform, folder, objects, *options):
    location = f"{folder}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    command = [kubeconform, "-strict", "-schema-location", location, *options, "-"]
    return subprocess.run(command, input=objects, capture_output=True, text=True, timeout=120)


def check(question, kubeconform, folder, objects, unknown=0):
    """Every object is valid, there are some, and only the expected number has no schema."""
    skip = ("-summary", "-output", "json", "-skip", MONITOR)
    done = conform(kubeconform, folder, objects, *skip)
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        row(question, last_line(done.stderr), "MISSED")
        return
    summary = answer["summary"]
    for one in answer.get("resources") or []:
        if one["status"] not in ("statusValid", "statusSkipped"):
            print(f"  {one['kind']} {one['name']}: {one['msg']}")
    refused = summary["invalid"] + summary["errors"]
    met = summary["valid"] > 0 and not refused and summary["skipped"] == unknown
    row(question, f"{summary['valid']} valid, {refused} refused, {summary['skipped']} without a schema",
        "met" if met else "MISSED")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", type=Path, default=CACHE, help="directory for the tools and schemas")
    folder = parser.parse_args().tools.resolve()
    helm, kubeconform = tool(folder, *HELM), tool(folder, *KUBECONFORM)
    kinds = schemas(folder / "schemas")
    chart = str(PACKAGING / "chart")
    linted = run(helm, "lint", "--strict", chart)
    row("helm lint --strict", last_line(linted.stdout), "met" if linted.returncode == 0 else "MISSED")
    for name, (values, unknown) in VALUES.items():
        options = [word for value in values for word in ("--set", value)]
        done = run(helm, "template", "cachemate", chart, "--namespace", "cachemate", *options)
        if done.returncode != 0:
            row(f"the chart, {name}", last_line(done.stderr), "MISSED")
            continue
        check(f"the chart, {name}", kubeconform, kinds, done.stdout, unknown)
    texts = [path.read_text() for path in sorted((PACKAGING / "crds").glob("*.yaml"))]
    check("the resources", kubeconform, kinds, "\n---\n".join(texts))
    forged = run(helm, "template", "cachemate", chart).stdout.replace("hostPID:", "hostPid:", 1)
    done = conform(kubeconform, kinds, forged)
    row("a misspelled field is refused", "yes" if done.returncode else "no", "met" if done.returncode else "MISSED")
    finish()


if __name__ == "__main__":
    main()
