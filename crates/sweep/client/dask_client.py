"""Hands tasks of a sweep to Dask workers and says how they end, one JSON line each.

Started by `cachemate sweep run --engine dask`; docs/sweeps.md describes the lines. Nothing here is believed to be the
truth about a task: that is in the sweep's own files.
"""

import argparse
import json
import subprocess
import sys
import threading
import time


def say(event, **more):
    """One line for the command that started this."""
    print(json.dumps({"event": event, **more}), flush=True)


def run_tasks(command, ids):
    """On a worker: runs the ids with the command; its exit code and the end of what it said."""
    done = subprocess.run(command + ids, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stderr[-300:]


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--scheduler", help="address; a local cluster without it")
    parser.add_argument("--workers", type=int, default=1, help="of the local cluster")
    parser.add_argument("--batch-size", type=int, default=1, help="tasks handed to a worker at once")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds to reach the scheduler")
    parser.add_argument("--ids", required=True, help="file with an id a line")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what runs the ids, after --")
    given = parser.parse_args()
    given.command = given.command[1:] if given.command[:1] == ["--"] else given.command
    return given


def beat(client, stopped):
    """Says that this process lives, and how many workers there are, until stopped."""
    while not stopped.wait(2.0):
        try:
            say("alive", workers=len(client.scheduler_info(n_workers=-1)["workers"]), status=client.status)
        except Exception as error:  # the scheduler may be gone; the main thread finds out by itself
            say("alive", workers=None, status=str(error)[:200])


def hand_over(client, given, ids):
    """Submits all groups and says how each ends."""
    from dask.distributed import as_completed

    groups = [ids[at : at + given.batch_size] for at in range(0, len(ids), given.batch_size)]
    # Not pure: the same ids may be handed over again, and are to be run again.
    futures = {client.submit(run_tasks, given.command, group, pure=False): group for group in groups}
    say("submitted", tasks=len(ids))
    for future in as_completed(futures):
        group = futures.pop(future)
        if future.status == "finished":
            code, said = future.result()
            say("ended", ids=group, code=code, said=said)
        else:
            why = str(future.exception())[:300] if future.status == "error" else future.status
            say("lost", ids=group, why=why)
        future.release()


def main():
    given = arguments()
    try:
        from dask.distributed import Client, LocalCluster
    except ImportError as error:
        say("broken", why=f"{error}: 'pip install distributed' for {sys.executable}", for_ever=True)
        return 1
    with open(given.ids) as file:
        ids = file.read().split()
    cluster = None
    try:
        if given.scheduler is None:
            # Threads would do, as tasks are processes; workers of their own can be killed one by one.
            cluster = LocalCluster(n_workers=given.workers, threads_per_worker=1, dashboard_address=None)
        with Client(cluster or given.scheduler, timeout=given.deadline) as client:
            stopped = threading.Event()
            threading.Thread(target=beat, args=(client, stopped), daemon=True).start()
            hand_over(client, given, ids)
            stopped.set()
            time.sleep(0.01)
        say("end")
        return 0
    except Exception as error:
        say("broken", why=f"{type(error).__name__}: {error}"[:300], for_ever=False)
        return 1
    finally:
        if cluster is not None:
            cluster.close(timeout=10)


if __name__ == "__main__":
    sys.exit(main())
