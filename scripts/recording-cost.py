#!/usr/bin/env python3
"""CPU time of `cachemate record`, whole and in bursts, as a multiple of the program's own, and the error of the curve.

usage: recording-cost.py CACHEMATE [--accesses N] [--share PERCENT] [--repeat N] -- PROGRAM [ARGUMENT...]

Each kind of run is made three times in turn by default, and the median counts. The program's output is discarded.
"""
import argparse, json, os, resource, statistics, subprocess, sys, tempfile


def cpu_seconds(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def curve(cachemate, recording):
    result = json.loads(subprocess.run([cachemate, "mrc", recording, "--sizes", "64K,128K,256K,512K,1M,2M,4M,8M,16M",
                                        "--json"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
    return result, {point["bytes"]: point for point in result["curve"]}


def main():
    split = sys.argv.index("--") if "--" in sys.argv else sys.exit(__doc__)
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("cachemate")
    parser.add_argument("--accesses", default="10000000")
    parser.add_argument("--share", default="10")
    parser.add_argument("--repeat", type=int, default=3)
    options, program = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1:]
    with tempfile.TemporaryDirectory() as directory:
        whole, bursts = os.path.join(directory, "whole.cmt"), os.path.join(directory, "bursts.cmt")
        record = [options.cachemate, "record", "-q", "--force"]
        parts = ["--burst-accesses", options.accesses, "--burst-share", options.share]
        runs = {"native": program, "bare": ["valgrind", "-q", "--tool=none", *program],
                "whole": [*record, "-o", whole, "--", *program],
                "bursts": [*record, *parts, "-o", bursts, "--", *program]}
        seconds = {name: [] for name in runs}
        for _ in range(options.repeat):
            for name, command in runs.items():
                seconds[name].append(cpu_seconds(command))
        median = {name: statistics.median(values) for name, values in seconds.items()}
        for name in runs:
            print(f"{name}: {median[name]:.2f} CPU s, {median[name] / median['native']:.1f} times")
        (_, exact), (result, sampled) = curve(options.cachemate, whole), curve(options.cachemate, bursts)
        print(f"{result['bursts']}, {os.path.getsize(whole)} and {os.path.getsize(bursts)} bytes")
        held = 0
        for size, point in sampled.items():
            miss_ratio, error = exact[size]["miss_ratio"], point["miss_ratio_error"] or 0
            held += abs(point["miss_ratio"] - miss_ratio) <= error
            print(f"{size >> 10} KiB: {miss_ratio:.4f} exact, {point['miss_ratio']:.4f} ± {error:.4f}")
        print(f"{held} of {len(sampled)} intervals hold the exact value")


main()
