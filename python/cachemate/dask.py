"""Shards of a command on the workers of a Dask cluster (docs/shards.md).

Each shard is a future that runs the command ``cachemate`` on a worker. Dask repeats a future whose worker dies; the runs
that the dead worker had stored are not made again.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cachemate import CachemateError

if TYPE_CHECKING:
    from distributed import Client as _Client


def run_shard(command: str, arguments: Sequence[str], shard: str, store: str) -> str:
    """Run one shard in this process's machine, and return what it prints.

    Raises:
        CachemateError: The command failed; with its last message.
    """
    words = [command, *arguments, "--shard", shard, "--store", store]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise CachemateError(f"shard {shard}: exit code {done.returncode}: {lines[-1]}")
    return done.stdout


def run_shards(
    client: _Client,
    arguments: Sequence[str],
    shards: int,
    store: str | os.PathLike[str],
    *,
    command: str = "cachemate",
    retries: int = 3,
) -> list[str]:
    """Run ``cachemate ARGUMENTS`` as shards on the workers, and return what each prints, in their order.

    Args:
        client: A client of the cluster.
        arguments: The command without ``cachemate``, such as ``["repro", "all", "--quick"]``.
        shards: Number of shards; about four for each worker even out their lengths.
        store: Directory of stored runs that all workers share.
        command: The command on the workers.
        retries: How often a shard that failed is repeated.

    Raises:
        CachemateError: A shard failed more often than that.
        ValueError: There is no shard.
    """
    if shards < 1:
        raise ValueError(f"shards: found {shards}, expected 1 or more")
    futures: list[Any] = [
        client.submit(run_shard, command, list(arguments), f"{part}/{shards}", os.fspath(store), retries=retries, pure=False)
        for part in range(1, shards + 1)
    ]
    return list(client.gather(futures))
