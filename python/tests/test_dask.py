"""Questions to the shards of a command on Dask. The command without shards is the oracle."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import cachemate
from cachemate.dask import run_shards

distributed = pytest.importorskip("distributed", reason="not shown here: no Dask")
COMMAND = os.environ.get("CACHEMATE")
REPRO = ["repro", "CA-2", "CP-6", "--sample", "--seeds", "2"]

needs_the_command = pytest.mark.skipif(COMMAND is None, reason="not shown here: CACHEMATE does not name the command")


def results(*more: str) -> Any:
    assert COMMAND is not None
    done = subprocess.run([COMMAND, *REPRO, "--json", *more], check=True, capture_output=True)
    return json.loads(done.stdout)["results"]


@needs_the_command
def test_shards_of_killed_workers_give_the_bits_of_one_process(tmp_path: Path) -> None:
    """Does Dask repeat the shards of a killed worker, and are the joined results those of one process?"""
    assert COMMAND is not None
    store = tmp_path / "runs"
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        with distributed.Client(cluster) as client:
            victim = next(iter(client.run(os.getpid).values()))

            def kill_a_worker() -> None:
                deadline = time.monotonic() + 60
                while not any(store.glob("*/*.run")) and time.monotonic() < deadline:
                    time.sleep(0.05)
                os.kill(victim, signal.SIGKILL)

            killer = threading.Thread(target=kill_a_worker)
            killer.start()
            printed = run_shards(client, REPRO, 4, store, command=COMMAND)
            killer.join()
    assert len(printed) == 4 and "shard 4/4" in printed[3]
    assert results("--store", str(store)) == results("--no-store")


@needs_the_command
def test_a_failing_shard_is_an_error_with_its_message(tmp_path: Path) -> None:
    """Is a command that fails an error that names the shard, and is no shard an error?"""
    assert COMMAND is not None
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        with distributed.Client(cluster) as client:
            with pytest.raises(cachemate.CachemateError, match="shard 1/1: exit code 2: .*CA-99"):
                run_shards(client, ["repro", "CA-99"], 1, tmp_path, command=COMMAND, retries=0)
            with pytest.raises(ValueError, match="found 0, expected 1 or more"):
                run_shards(client, REPRO, 0, tmp_path, command=COMMAND)
