"""Runs three pairs of recorded programs, those with the largest, a middle and the smallest forecast, and prints forecast
beside measured. Usage: measure.py FOLDER FORECAST.json NAME..., where FOLDER/NAME.cmd holds a command, its words ended by NUL.

A program runs to its end on one CPU, beside another on a second CPU of the same cache, and beside a loop that touches no
memory; rounds alternate. Its slowdown is the ratio of its user and system times, so that waits for a CPU do not count.
"""

import glob
import json
import os
import signal
import statistics
import sys
import time

ROUNDS = 15
SECONDS = 90
SPIN = [sys.executable, "-c", "while True: sum(range(1000))"]


def read(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def numbers(text):
    cpus = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        cpus.update(range(int(low), int(high or low) + 1))
    return cpus


def two_cpus():
    """Returns two allowed CPUs of different cores that share a last-level cache, or None."""
    allowed = sorted(os.sched_getaffinity(0))
    for first in allowed:
        base = f"/sys/devices/system/cpu/cpu{first}"
        caches = [(int(read(f"{cache}/level")), cache) for cache in glob.glob(f"{base}/cache/index*")]
        shared = numbers(read(f"{max(caches)[1]}/shared_cpu_list")) if caches else set()
        siblings = numbers(read(f"{base}/topology/thread_siblings_list"))
        for second in allowed:
            if second in shared and second not in siblings:
                return first, second
    return None


def start(command, cpu, folder):
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            os.sched_setaffinity(0, {cpu})
            os.chdir(folder)
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            os.execvp(command[0], command)
        finally:
            os._exit(127)
    return pid


def stop(pid):
    for _ in range(100):
        try:
            os.killpg(pid, signal.SIGKILL)
            break
        except ProcessLookupError:
            time.sleep(0.01)
    os.waitpid(pid, 0)


def time_beside(command, companion, cpus, folder):
    """Returns the user and system seconds of a command that runs to its end beside a companion that is repeated."""
    loop = ["sh", "-c", 'while :; do "$@" || sleep 0.1; done', "sh", *companion]
    beside = start(loop, cpus[1], folder)
    try:
        time.sleep(0.3)
        began = time.monotonic()
        _, status, usage = os.wait4(start(command, cpus[0], folder), 0)
        elapsed = time.monotonic() - began
    finally:
        stop(beside)
    if status:
        raise RuntimeError(f"'{command[0]}' ended with status {status}")
    seconds = usage.ru_utime + usage.ru_stime
    return seconds, elapsed


def main():
    folder, forecast_path, names = sys.argv[1], sys.argv[2], sys.argv[3:]
    commands = {}
    for name in names:
        path = os.path.join(folder, f"{name}.cmd")
        if os.path.exists(path):
            with open(path, "rb") as file:
                commands[name] = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    matrix = json.load(open(forecast_path, encoding="utf-8"))["matrix"]
    pairs = []
    for row, program in enumerate(names):
        for column, beside in enumerate(names):
            if program != beside and program in commands and beside in commands:
                pairs.append((matrix["values"][row][column], matrix["low"][row][column],
                              matrix["high"][row][column], program, beside))
    pairs.sort(reverse=True)
    cpus = two_cpus()
    if cpus is None:
        print("not measured: no two CPUs of different cores share a cache here")
        return
    if len(pairs) < 3:
        print("not measured: fewer than three pairs were recorded here")
        return
    busy = os.getloadavg()[0]
    seconds, elapsed = time_beside([sys.executable, "-c", "sum(range(10**7))"], SPIN, cpus, folder)
    if seconds < 0.8 * elapsed:
        print(f"not measured: this host is too busy (load {busy:.1f}; a program got {100 * seconds / elapsed:.0f} % of a CPU)")
        return
    chosen = [("largest", pairs[0]), ("middle", pairs[len(pairs) // 2]), ("smallest", pairs[-1])]
    print(f"{'forecast':9} {'pair':28} {'forecast %':>22} {'measured %':>22}  (CPUs {cpus[0]} and {cpus[1]}, load {busy:.1f})")
    for label, (value, low, high, program, beside) in chosen:
        ratios, began = [], time.monotonic()
        for number in range(ROUNDS):
            companions = [SPIN, commands[beside]]
            times = [0.0, 0.0]
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                times[index] = time_beside(commands[program], companions[index], cpus, folder)[0]
            ratios.append(100 * (times[1] / times[0] - 1))
            if time.monotonic() - began > SECONDS / 3 and len(ratios) >= 3:
                break
        forecast = f"{value:.1f} ({low:.0f} to {high:.0f})"
        measured = f"{statistics.median(ratios):.1f} ({min(ratios):.0f} to {max(ratios):.0f})"
        print(f"{label:9} {program + ' beside ' + beside:28} {forecast:>22} {measured:>22}", flush=True)


if __name__ == "__main__":
    main()
