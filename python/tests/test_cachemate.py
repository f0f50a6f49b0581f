"""Questions to the installed wheel. The command's own results are the oracle if `CACHEMATE` names it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cachemate

ROOT = Path(__file__).resolve().parents[2]
COMMAND = os.environ.get("CACHEMATE")
MACHINE = "xeon-x5365-4"
SCENARIO = ROOT / "scenarios" / "four-on-two-caches.toml"
NAMES = ["gzip", "stream", "povray", "sqlite3"]

needs_the_command = pytest.mark.skipif(COMMAND is None, reason="not shown here: CACHEMATE does not name the command")


def sweep(lines: int, rounds: int) -> NDArray[np.uint64]:
    return np.tile(np.arange(lines, dtype=np.uint64) * np.uint64(64), rounds)


def recording(name: str) -> Path:
    return ROOT / "recordings" / f"{name}.cmt"


def open_recording(name: str) -> cachemate.Trace:
    return cachemate.Trace.open(recording(name))


def command(*arguments: object, cwd: Path | None = None) -> Any:
    """The result of the command."""
    assert COMMAND is not None
    words = [COMMAND, *(str(argument) for argument in arguments), "--json"]
    return json.loads(subprocess.run(words, check=True, capture_output=True, cwd=cwd).stdout)


@pytest.fixture(scope="module")
def programs() -> list[cachemate.Profile]:
    return [cachemate.profile(open_recording(name), MACHINE) for name in NAMES]


# ---- curves


def test_a_sweep_misses_below_its_size_and_hits_above() -> None:
    """Is the curve of a sweep over n lines as in theory: only misses below n, only first touches from n on?"""
    curve = cachemate.mrc(cachemate.Trace.from_numpy(sweep(1000, 10)), sizes=[999 * 64, 1000 * 64, 64_000_000])
    assert curve.sizes.dtype == np.uint64 and curve.misses_per_access.dtype == np.float64
    assert curve.misses_per_access.tolist() == [1.0, 0.1, 0.1]
    assert (curve.accesses, curve.distinct_lines, curve.errors) == (10_000, 1000, None)
    assert curve.mpki is None, "no instructions were counted"


def test_instructions_give_misses_per_instruction() -> None:
    """With two instructions per access: are there half as many misses per instruction as per access?"""
    addresses = sweep(1000, 10)
    trace = cachemate.Trace.from_numpy(addresses, instructions=np.full(len(addresses), 2, dtype=np.uint64))
    curve = cachemate.mrc(trace)
    assert curve.instructions == 20_000 and curve.mpki is not None
    assert curve.mpki == pytest.approx(500 * curve.misses_per_access)
    profile = cachemate.profile(trace, MACHINE, name="sweep")
    assert profile.instructions == 20_000 and profile.curve is not None
    assert profile.curve.misses_per_access.tolist() == curve.misses_per_access.tolist()


def test_any_layout_of_integers_is_read() -> None:
    """Do strides, signed integers and sizes from NumPy give the same curve as plain arrays?"""
    plain = cachemate.mrc(cachemate.Trace.from_numpy(sweep(500, 4)))
    pairs = np.stack([sweep(500, 4), sweep(500, 4)], axis=1)
    signed = sweep(500, 4).astype(np.int64)
    for addresses in (pairs[:, 1], signed, signed[::-1]):
        curve = cachemate.mrc(cachemate.Trace.from_numpy(addresses), sizes=plain.sizes)
        assert curve.misses_per_access.tolist() == plain.misses_per_access.tolist()


def test_a_sample_has_error_bars_that_hold() -> None:
    """Is the exact curve within a sample's error bars, nearly everywhere?"""
    rng = np.random.default_rng(1)
    addresses = (rng.zipf(1.2, 400_000) % 50_000).astype(np.uint64) * np.uint64(64)
    trace = cachemate.Trace.from_numpy(addresses)
    exact, sampled = cachemate.mrc(trace), cachemate.mrc(trace, sample=0.1)
    assert sampled.errors is not None and sampled.distinct_lines is None
    inside = np.abs(exact.misses_per_access - sampled.misses_per_access) <= 2 * sampled.errors + 1e-12
    assert inside.mean() > 0.8


def test_threads_change_nothing() -> None:
    """Does the curve have the same bits with two threads?"""
    one, two = (cachemate.mrc(open_recording("gzip"), threads=threads) for threads in (1, 2))
    assert np.array_equal(one.misses_per_access, two.misses_per_access)


def test_a_file_and_its_array_are_one_trace() -> None:
    """Are the addresses of a recording an array with the same curve, and those of an array the array itself?"""
    trace = open_recording("gzip")
    addresses = trace.addresses()
    assert addresses.dtype == np.uint64 and len(addresses) == trace.accesses
    again = cachemate.Trace.from_numpy(addresses)
    assert again.addresses() is addresses, "nothing is copied"
    # The array has no filter, so its curve begins at smaller sizes unless it is asked for the same ones.
    curve = cachemate.mrc(trace)
    assert np.array_equal(cachemate.mrc(again, sizes=curve.sizes).misses_per_access, curve.misses_per_access)


# ---- the command's answers


@needs_the_command
def test_curves_are_the_commands() -> None:
    """Is a curve the same as the command's, bit by bit, exact and sampled?"""
    for options, words in (({}, []), ({"sample": 0.05, "seed": 3}, ["--sample-rate", 0.05, "--seed", 3])):
        answer = command("mrc", recording("gzip"), *words)
        curve = cachemate.mrc(open_recording("gzip"), **options)  # type: ignore[arg-type]
        assert [point["bytes"] for point in answer["curve"]] == curve.sizes.tolist()
        assert [point["miss_ratio"] for point in answer["curve"]] == curve.misses_per_access.tolist()
        assert curve.mpki is not None
        assert [point["mpki"] for point in answer["curve"]] == curve.mpki.tolist()
        errors = [point["miss_ratio_error"] for point in answer["curve"]] if "sample" in options else None
        assert errors == (None if curve.errors is None else curve.errors.tolist())


@needs_the_command
def test_profiles_predictions_and_plans_are_the_commands(programs: list[cachemate.Profile]) -> None:
    """Are profile file, matrix and plan the same as the command's for the same recordings?"""
    files = [recording(name) for name in NAMES]
    for program, file in zip(programs, files):
        assert program.to_dict() == command("profile", file, "--machine", MACHINE)
    for model in ("interval", "statcc"):
        answer = command("predict", *files, "--machine", MACHINE, "--model", model)["matrix"]
        matrix = cachemate.predict(programs, MACHINE, model=model)
        assert (answer["names"], answer["model"], answer["unit"]) == (matrix.names, matrix.model, matrix.unit)
        assert matrix.values.tolist() == answer["values"]
        assert answer.get("low") == (None if matrix.low is None else matrix.low.tolist())
        assert answer.get("high") == (None if matrix.high is None else matrix.high.tolist())
    answer = command("plan", *files, "--machine", MACHINE)
    plan = cachemate.plan(programs, MACHINE)
    assert answer["programs"] == plan.programs
    assert all(answer[name] == value for name, value in plan.to_dict().items())


# ---- profiles and plans


def test_a_plan_gives_reasons_and_beats_the_worst(programs: list[cachemate.Profile]) -> None:
    """Does every program have its own CPU and a reason, and is the plan no worse than the worst one?"""
    plan = cachemate.plan(programs, MACHINE)
    assert [program["name"] for program in plan.programs] == NAMES
    assert len({program["cpu"] for program in plan.programs}) == 4
    assert all(program["reason"] for program in plan.programs)
    planned, worst = (plan.expected[which]["mean_slowdown_percent"] for which in ("plan", "worst"))
    assert planned is not None and worst is not None and planned <= worst
    assert plan.optimal and plan.solver
    matrix = cachemate.predict(programs, MACHINE)
    assert matrix.values.shape == (4, 4) and matrix.names == NAMES and matrix.unit == "percent"
    assert cachemate.predict(programs, MACHINE, model="sdc").model == "sdc"


def test_a_profile_goes_through_a_file(tmp_path: Path, programs: list[cachemate.Profile]) -> None:
    """Is a profile the same after writing and reading, and does it never overwrite another one by accident?"""
    programs[0].write(tmp_path / "gzip.json")
    again = cachemate.Profile.read(tmp_path / "gzip.json")
    assert again.to_dict() == programs[0].to_dict()
    assert cachemate.predict([again, again], "opteron-2350").values.shape == (2, 2), "on another machine, too"
    with pytest.raises(cachemate.CachemateError, match="gzip.json"):
        programs[0].write(tmp_path / "gzip.json")


def test_errors_name_the_place(tmp_path: Path) -> None:
    """Does every error give the place, the value found and the value expected?"""
    (tmp_path / "odd.u64").write_bytes(b"123")
    with pytest.raises(cachemate.CachemateError, match="odd.u64"):
        cachemate.mrc(cachemate.Trace.open(tmp_path / "odd.u64"))
    with pytest.raises(cachemate.CachemateError, match="missing.cmt"):
        cachemate.Trace.open(tmp_path / "missing.cmt")
    trace = cachemate.Trace.from_numpy(sweep(4, 1))
    with pytest.raises(ValueError, match="line_bytes: found 48, expected"):
        cachemate.mrc(trace, line_bytes=48)
    with pytest.raises(ValueError, match="sample: found '2', expected"):
        cachemate.mrc(trace, sample=2)
    with pytest.raises(ValueError, match="instructions: found 3 values, expected 4"):
        cachemate.Trace.from_numpy(sweep(4, 1), instructions=np.ones(3, dtype=np.uint64))
    with pytest.raises(ValueError, match="addresses: found 2 dimensions, expected one"):
        cachemate.Trace.from_numpy(sweep(4, 1).reshape(2, 2))
    with pytest.raises(TypeError, match="addresses: found values of float64, expected uint64 or int64"):
        cachemate.Trace.from_numpy(np.arange(4, dtype=np.float64))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="addresses: found list, expected a NumPy array"):
        cachemate.Trace.from_numpy([1, 2])  # type: ignore[arg-type]
    with pytest.raises(cachemate.CachemateError, match="xeon-x5365"):
        cachemate.profile(trace, "xeon-x536")
    with pytest.raises(cachemate.CachemateError, match="array: found no accesses, expected at least one"):
        cachemate.mrc(cachemate.Trace.from_numpy(np.empty(0, dtype=np.uint64)))
    with pytest.raises(cachemate.CachemateError, match="statc"):
        cachemate.predict([], MACHINE, model="statc")


def test_curves_and_matrices_are_drawn(programs: list[cachemate.Profile]) -> None:
    """Does a plot show the values of the object, and use the given axes?"""
    matplotlib = pytest.importorskip("matplotlib", reason="not shown here: no Matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2)
    curve = cachemate.mrc(open_recording("gzip"), sample=0.1)
    assert curve.plot(left) is left and curve.mpki is not None
    assert left.lines[0].get_ydata().tolist() == curve.mpki.tolist()
    matrix = cachemate.predict(programs, MACHINE, model="statcc")
    assert matrix.plot(ax=right) is right
    assert [text.get_text() for text in right.texts] == [f"{value:.1f}" for value in matrix.values.flatten()]
    assert cachemate.mrc(open_recording("gzip")).plot() not in (left, right)
    pyplot.close("all")


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="not shown here: no Valgrind")
def test_a_program_is_recorded(tmp_path: Path) -> None:
    """Is a recorded program a trace, limited as requested, and does its failure cause a warning?"""
    trace = cachemate.record(["true"], tmp_path / "true.cmt", max_accesses=5000)
    assert trace.name == "true" and trace.accesses is not None and 0 < trace.accesses <= 5000
    with pytest.raises(cachemate.CachemateError, match="true.cmt"):
        cachemate.record(["true"], tmp_path / "true.cmt")
    with pytest.warns(RuntimeWarning, match="exit 1"):
        cachemate.record(["false"], tmp_path / "false.cmt")
    with pytest.raises(ValueError, match="l1: "):
        cachemate.record(["true"], tmp_path / "x.cmt", l1="32X")


# ---- the interpreter


def test_an_array_is_not_copied_as_a_whole() -> None:
    """Does a curve of 32 M accesses need less memory than half of the array?"""
    script = textwrap.dedent("""
        import numpy as np, resource, cachemate
        addresses = np.tile(np.arange(1024, dtype=np.uint64) * np.uint64(64), 1 << 15)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cachemate.mrc(cachemate.Trace.from_numpy(addresses))
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / addresses.nbytes)
    """)
    more = float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    assert more < 0.5


def test_others_run_meanwhile() -> None:
    """Does another thread of the interpreter run while a curve is computed?"""
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    cachemate.mrc(cachemate.Trace.from_numpy(sweep(200_000, 40)), threads=1)
    during = turns
    done.set()
    counter.join()
    assert during > 5


CURVE = """
    rng = np.random.default_rng(1)
    trace = cachemate.Trace.from_numpy(rng.integers(0, 1 << 40, 50_000_000, dtype=np.uint64))
    def work():
        cachemate.mrc(trace)
"""
RUN = f"""
    def work():
        cachemate.simulate({str(ROOT / "scenarios")!r} + "/four-on-two-caches.toml", policy=policy)
"""


@pytest.mark.parametrize(
    "work",
    [CURVE, "    policy = None\n" + RUN, "    policy = lambda view: time.sleep(1000)\n" + RUN],
    ids=["a curve", "a run", "an own policy"],
)
def test_ctrl_c_ends_a_long_call(work: str) -> None:
    """Does Ctrl-C end a long call in the same way as Python code?"""
    # A test in the background inherits an ignored signal, and so would its child.
    script = textwrap.dedent("""
        import signal, time, numpy as np, cachemate
        signal.signal(signal.SIGINT, signal.default_int_handler)
    """) + textwrap.dedent(work) + textwrap.dedent("""
        try:
            print("ready", flush=True)
            while True:
                work()
        except KeyboardInterrupt:
            print("interrupted")
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        time.sleep(0.5)
        running.send_signal(signal.SIGINT)
        assert running.stdout.readline() == "interrupted\n"
        assert running.wait() == 0


# ---- runs


def test_a_scenario_is_the_same_every_time(tmp_path: Path) -> None:
    """Are two runs with the same seed equal, and is a recorded run read back window by window?"""
    first = cachemate.simulate(SCENARIO, log=tmp_path / "run.jsonl")
    assert first == cachemate.simulate(SCENARIO) != cachemate.simulate(SCENARIO, seed=2)
    log = cachemate.RunLog(tmp_path / "run.jsonl")
    windows = list(log)
    assert len(windows) == first["windows"] >= 2
    assert windows[0]["observation"]["window"] == 0 and log.header["pipeline"]["policy"]["name"] == "auto"
    services = log.services()
    assert len(services) == len(windows) and services[-1]["services"][0]["kind"] == "command"
    page = log.page()
    assert page.startswith("<!doctype html>") and "run.jsonl" in page
    with pytest.raises(cachemate.CachemateError, match="run.jsonl"):
        cachemate.simulate(SCENARIO, log=tmp_path / "run.jsonl")


@needs_the_command
def test_a_run_is_the_commands(tmp_path: Path) -> None:
    """Are results and run log of a scenario the same as the command's?"""
    answer = command("sim", SCENARIO, "-o", tmp_path / "command.jsonl")
    own = cachemate.simulate(SCENARIO, log=tmp_path / "own.jsonl")
    assert own.pop("windows") == answer["windows"] and own == answer["results"]
    assert (tmp_path / "own.jsonl").read_bytes() == (tmp_path / "command.jsonl").read_bytes()


def test_an_own_policy_decides(tmp_path: Path) -> None:
    """Is a plan from Python code with NumPy numbers applied, and is it in the log with its reasons?"""

    def apart(view: cachemate.View) -> cachemate.Answer:
        assert threading.current_thread() is threading.main_thread()
        tasks = [task["task"] for task in view["observation"]["tasks"] if not task["exited"]]
        weights = {str(task): np.float64(1.0) for task in tasks}
        affinity = {task: str(at) for at, task in enumerate(tasks)}
        return {"affinity": affinity, "weights": weights, "reasons": ["one CPU each"]}

    cachemate.simulate(SCENARIO, policy=apart, log=tmp_path / "own.jsonl")
    windows = list(cachemate.RunLog(tmp_path / "own.jsonl"))
    last = windows[-1]
    assert len(windows) > 2
    assert last["applied"]["affinity"] == {"0": "0", "1": "1", "2": "2", "3": "3"}
    assert last["decision"]["reasons"][0]["text"] == "one CPU each"
    cachemate.simulate(SCENARIO, policy=lambda view: None)


def test_a_bad_plan_is_refused_with_its_place() -> None:
    """Are an invalid plan, an unknown field and an error of the policy reported as such?"""
    with pytest.raises(cachemate.CachemateError, match="window 0"):
        cachemate.simulate(SCENARIO, policy=lambda view: {"affinity": {"0": "77"}})
    with pytest.raises(cachemate.CachemateError, match="found the field 'afinity', expected affinity, weights"):
        cachemate.simulate(SCENARIO, policy=lambda view: {"afinity": {}})  # type: ignore[arg-type,return-value]
    with pytest.raises(cachemate.CachemateError, match="the policy's plan: "):
        cachemate.simulate(SCENARIO, policy=lambda view: {"affinity": {"0": {1, 2}}})  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        cachemate.simulate(SCENARIO, policy=lambda view: {"affinity": {"0": str(1 // 0)}})
    with pytest.raises(TypeError, match="the policy's answer: found int, expected a dictionary or None"):
        cachemate.simulate(SCENARIO, policy=lambda view: 3)  # type: ignore[arg-type,return-value]


def test_pictures_hold_no_markup_of_names() -> None:
    """Do notebooks show pictures in which a name is plain text?"""
    addresses = sweep(1000, 10)
    trace = cachemate.Trace.from_numpy(
        addresses, instructions=np.full(len(addresses), 2, dtype=np.uint64), name="<script>x</script>"
    )
    programs = [cachemate.profile(trace, MACHINE), cachemate.profile(trace, MACHINE, name="b")]
    for drawn in (cachemate.mrc(trace), cachemate.predict(programs, MACHINE)):
        picture = drawn._repr_svg_()
        assert picture.startswith("<svg") and "<script" not in picture and "&lt;script&gt;" in picture
    table = cachemate.plan(programs, MACHINE)._repr_html_()
    assert "<table" in table and "<script" not in table and "&lt;script&gt;" in table


def test_work_is_counted_in_memory_that_the_daemon_hands_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket
    import struct

    from cachemate.progress import WorkCounter

    monkeypatch.delenv("CACHEMATE_PROGRESS", raising=False)
    path = str(tmp_path / "s.sock")
    assert not WorkCounter.open(path).is_reported
    memory = os.memfd_create("report")
    os.ftruncate(memory, 4096)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def answer() -> None:
        peer, _ = listener.accept()
        assert peer.recv(64) == b"progress\n"
        socket.send_fds(peer, [b"\n"], [memory])
        peer.close()

    thread = threading.Thread(target=answer)
    thread.start()
    work = WorkCounter.open(path)
    thread.join()
    work.add(40)
    work.add(2)
    assert work.is_reported
    assert struct.unpack("=Q", os.pread(memory, 8, 0)) == (42,)
