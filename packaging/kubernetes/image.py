#!/usr/bin/env python3
"""Builds the OCI image of cachemate from its program alone: no daemon, no base image, no shell.

usage: image.py PROGRAM IMAGE.tar [NAME], which is docker.io/local/cachemate:VERSION

The layer holds the program and the shared libraries that it names. Files have no owner, no time and a fixed order, so the
same program gives the same bytes. IMAGE.tar is an OCI layout: `ctr image import`, `skopeo copy oci-archive:` and
`podman load` read it.
"""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

MAX_IMAGE_BYTES = 25 << 20
ARCHITECTURES = {62: "amd64", 183: "arm64"}


def fail(text):
    sys.exit(f"image.py: {text}")


def version():
    workspace = (Path(__file__).resolve().parents[2] / "Cargo.toml").read_text()
    return re.search(r'^\[workspace\.package\]\n(?:[^[].*\n)*?version = "(.*)"$', workspace, re.MULTILINE)[1]


def architecture(program):
    with open(program, "rb") as file:
        head = file.read(20)
    machine = int.from_bytes(head[18:20], "little")
    if head[:4] != b"\x7fELF" or machine not in ARCHITECTURES:
        fail(f"{program}: found machine {machine}, expected an ELF program for amd64 or arm64")
    return ARCHITECTURES[machine]


def libraries(program):
    """Paths of the shared libraries by the paths under which the loader looks for them; none for a static program."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    paths = {}
    for line in listed.stdout.splitlines():
        words = line.split()
        if "not" in words and "found" in words:
            fail(f"{program}: found no {words[0]}, expected a program that runs on this host")
        for word in words[:3]:
            if word.startswith("/"):
                paths[word] = os.path.realpath(word)
    return paths


def add_file(archive, name, data, mode):
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))


def layer(program):
    buffer = io.BytesIO()
    files = {"usr/bin/cachemate": program}
    files.update({path.lstrip("/"): real for path, real in libraries(program).items()})
    folders = {"tmp", "run/cachemate", "var/lib/cachemate", "etc/cachemate"} | {os.path.dirname(name) for name in files}
    for folder in list(folders):
        while folder := os.path.dirname(folder):
            folders.add(folder)
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for folder in sorted(folders):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(entry)
        for name, path in sorted(files.items()):
            with open(path, "rb") as file:
                add_file(archive, name, file.read(), 0o755)
    return buffer.getvalue()


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    program, output = sys.argv[1:3]
    name = sys.argv[3] if len(sys.argv) == 4 else f"docker.io/local/cachemate:{version()}"
    raw = layer(program)
    packed = gzip.compress(raw, 9, mtime=0)
    platform = {"architecture": architecture(program), "os": "linux"}
    encode = lambda value: json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    config = encode({
        **platform,
        "config": {
            "Entrypoint": ["/usr/bin/cachemate"],
            "Labels": {"org.opencontainers.image.title": "cachemate", "io.cri-containerd.image": "managed"},
        },
        "rootfs": {"type": "layers", "diff_ids": [digest(raw)]},
    })
    media = "application/vnd.oci.image."
    part = lambda kind, data: {"mediaType": media + kind, "digest": digest(data), "size": len(data)}
    manifest = encode({
        "schemaVersion": 2,
        "mediaType": media + "manifest.v1+json",
        "config": part("config.v1+json", config),
        "layers": [part("layer.v1.tar+gzip", packed)],
    })
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rsplit(":", 1)[-1]}
    index = encode({
        "schemaVersion": 2,
        "mediaType": media + "index.v1+json",
        "manifests": [{**part("manifest.v1+json", manifest), "platform": platform, "annotations": names}],
    })
    with tarfile.open(output, "w", format=tarfile.USTAR_FORMAT) as archive:
        add_file(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}', 0o644)
        add_file(archive, "index.json", index, 0o644)
        for data in (config, manifest, packed):
            add_file(archive, "blobs/sha256/" + digest(data)[7:], data, 0o644)
    size = os.path.getsize(output)
    if size > MAX_IMAGE_BYTES:
        fail(f"{output}: found {size} bytes, expected at most {MAX_IMAGE_BYTES}")
    print(f"{output}: {name}, {size} bytes, {digest(manifest)}")


if __name__ == "__main__":
    main()
