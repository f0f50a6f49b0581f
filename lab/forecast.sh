# Slowdowns forecast from recordings against those on the modeled machine, for pairs of programs drawn by a seed; sourced by
# lab/modeled.sh. Expects $binary, $out and $real_machine. LAB_PAIRS: how many, LAB_SEED: which. LAB_MEASURED: a stored
# result whose slowdowns are used, so that no guest runs; but pairs whose slowed program is in LAB_REMEASURED are measured.
# The measured program runs once on CPU 0; its co-runner starts again and again on CPU 1. The slowdown is that of cycles
# per user instruction, so that it has no waiting for a CPU. Each program also runs alone, each time on other page frames,
# and the median run counts.

# Name and command line each. The work of each is fixed, and the locale is the guest's, so that the guest runs what was
# recorded.
forecast_programs() {
    cat <<'END'
xz	/usr/bin/xz -k -c -1 text
gzip	/usr/bin/gzip -9 -c text
bzip2	/usr/bin/bzip2 -k -c text
sort	/usr/bin/sort text
sqlite3	/usr/bin/sqlite3 -init load.sql :memory: .quit
perl	/usr/bin/perl hash.pl
chase-1M	lab-kernels chase 1024 600
chase-4M	lab-kernels chase 4096 60
stream-8M	lab-kernels stream 8192 50
table-2M	lab-kernels table 2048 24
search-1M	lab-kernels search 1536 20
matrix	lab-kernels matrix 900 6
END
}
forecast_files() {
    real_files "$1"
    sed -i 's/i < 100000/i < 12000/' "$1/load.sql"
    cat >"$1/hash.pl" <<'END'
my (%h, $s); for my $i (1 .. 40000) { $h{($i * 7919) % 1000003} = $i * 31 }
for my $p (1 .. 3) { for my $i (1 .. 40000) { $s += $h{($i * 7919) % 1000003} } }
print "$s\n";
END
}

# draw SEED PAIRS PROGRAMS: numbers of a program and its co-runner, each ordered pair at most once
draw() {
    awk -v seed="$1" -v pairs="$2" -v n="$3" 'BEGIN {
        state = seed % 2147483647 + 1
        for (done = 0; done < pairs && done < n * n;) {
            state = state * 16807 % 2147483647 # Park and Miller
            pair = int(state / 2147483647 * n * n)
            if (pair in drawn) continue
            drawn[pair]
            done++
            print int(pair / n), pair % n
        }
    }'
}

forecast() {
    local files=$out/forecast name line names=()
    mkdir -p "$files"
    for name in xz gzip bzip2 sqlite3 perl valgrind python3; do
        command -v "$name" >/dev/null || { printf 'forecast.end\tforecasts\tnote\t-\tNOT RUN: %s is missing on this host\t-\n' "$name" >>"$out/results.tsv"; return; }
    done
    forecast_files "$files"
    forecast_programs >"$files/programs.tsv"
    while IFS=$'\t' read -r name line; do
        names+=("$name.cmtrace")
        (cd "$files" && PATH=$out/machine:$PATH LC_ALL=C "$binary" --quiet record --force -o "$name.cmtrace" -- $line </dev/null >/dev/null 2>recorded.log) ||
            { printf 'forecast.end\tforecasts\tnote\t-\tNOT RUN: %s cannot be recorded (see %s)\t-\n' "$name" "$files/recorded.log" >>"$out/results.tsv"; return; }
    done <"$files/programs.tsv"
    (cd "$files" && "$binary" --quiet predict --machine "$real_machine" --json "${names[@]}" >forecast.json)
    [ -n "${LAB_MEASURED:-}" ] && [ -z "${LAB_REMEASURED:-}" ] || forecast_guest "$files"
    forecast_pairs "$files/forecast.json" >"$files/pairs.tsv"
    forecast_lines <"$files/pairs.tsv" >>"$out/results.tsv"
}

# forecast_guest FILES: runs the pairs in a guest.
forecast_guest() {
    cut -f2 "$1/programs.tsv" >"$out/initramfs/lab/programs"
    # Beside others, the kernels repeat their passes within one process, because a new process would begin with new pages.
    sed 's/^\(lab-kernels [a-z]* [0-9]*\) [0-9]*$/\1 1000000000/' "$out/initramfs/lab/programs" >"$out/initramfs/lab/co-runners"
    draw "${LAB_SEED:-1}" "${LAB_PAIRS:-60}" "${#names[@]}" | forecast_measured "$1/programs.tsv" >"$out/initramfs/lab/pairs"
    mkdir -p "$out/initramfs/programs"
    cp "$1"/{text,load.sql,hash.pl} "$out/initramfs/programs/"
    with_programs "$out/initramfs/lab/programs"
    pack
    scenario forecast "$real_machine"
    programs_run "$out/forecast.log" >"$out/ran.tsv"
    phase_table "$out/forecast.truth.tsv" "$out/ran.tsv" >"$out/phases.tsv"
}

# forecast_measured PROGRAMS: of drawn pairs, those that a guest measures
forecast_measured() {
    awk -F '\t' -v only="${LAB_REMEASURED:-}" '
        FNR == NR { name[FNR - 1] = $1; next }
        { split($0, pair, " ") }
        only == "" || index(" " only " ", " " name[pair[1]] " ")' "$1" -
}

# forecast_pairs FORECAST: the columns of forecast_table; of stored pairs the first eight, which forecast_lines reads
forecast_pairs() {
    [ -z "${LAB_MEASURED:-}" ] || forecast_stored "$1" "$LAB_MEASURED" | grep -vE "^(${LAB_REMEASURED:+${LAB_REMEASURED// /|}})	" || true
    [ -n "${LAB_MEASURED:-}" ] && [ -z "${LAB_REMEASURED:-}" ] || forecast_table "$1"
}

# forecast_stored FORECAST RESULT: forecasts beside the slowdowns that a stored result measured
forecast_stored() {
    python3 - "$@" <<'END'
import json, re, sys
matrix = json.load(open(sys.argv[1]))["matrix"]
number = {name: index for index, name in enumerate(matrix["names"])}
for line in json.load(open(sys.argv[2]))["lines"]:
    if line["id"] == "forecast.pair":
        title = r"(\S+) beside (\S+), percent of slowdown \(by misses (\S+), by bandwidth (\S+)\)"
        program, co_runner, *causes = re.match(title, line["title"]).groups()
        values = [matrix[key][number[program]][number[co_runner]] for key in ("values", "low", "high")]
        print(program, co_runner, *(f"{value:.2f}" for value in values), line["modeled"], *causes, sep="\t")
END
}

# forecast_table FORECAST: for each pair its names, the forecast and its interval, the measured slowdown, and its parts
# by misses and by waiting for bandwidth, all in percent; misses per 1000 instructions in the recording's forecast and in the
# guest, alone and together; the difference of user instructions, and waiting for a CPU, in percent
forecast_table() {
    python3 - "$1" "$out/phases.tsv" "$out/forecast.machine" <<'END'
import json, sys
from collections import defaultdict
forecast = json.load(open(sys.argv[1]))
matrix, programs = forecast["matrix"], forecast["programs"]
config = dict(line.split(None, 1) for line in open(sys.argv[3]) if not line.startswith("#") and " " in line)
miss_cycles = int(config["memory_cycles"]) - int(config["l3_cycles"])
alone = defaultdict(list)
for line in open(sys.argv[2]):
    fields = line.rstrip("\n").split("\t")
    phase, number, seconds = fields[0], int(fields[1]), float(fields[3])
    if phase == "first" or fields[4] != "yes" or "-" in fields[7:]:
        continue
    instructions, user, cycles, misses, others, _, _, bandwidth = map(float, fields[7:])
    run = dict(user=user, time=seconds * 2e9 / user, cycles=cycles / user, misses=misses / user, bandwidth=bandwidth / user)
    if phase == "alone":
        alone[number].append(run)
    elif int(phase.split("-")[0]) == number and number in alone:
        by_cycles = sorted(alone[number], key=lambda run: run["cycles"])
        co_runner, solo = int(phase.split("-")[1]), by_cycles[len(by_cycles) // 2]
        percent = lambda cycles: 100 * cycles / solo["cycles"]
        values = [matrix[key][number][co_runner] for key in ("values", "low", "high")]
        measured = percent(run["cycles"] - solo["cycles"])
        by_misses = percent(miss_cycles * (run["misses"] - solo["misses"]))
        by_bandwidth = percent(run["bandwidth"] - solo["bandwidth"])
        waiting = percent((run["time"] - run["cycles"]) - (solo["time"] - solo["cycles"]))
        work = 100 * (run["user"] / solo["user"] - 1)
        mpki = [programs[number]["solo_mpki"], 1000 * solo["misses"], 1000 * run["misses"]]
        figures = values + [measured, by_misses, by_bandwidth] + mpki + [work, waiting]
        print(matrix["names"][number], matrix["names"][co_runner], *(f"{figure:.2f}" for figure in figures), sep="\t")
END
}

# forecast_lines: a line for each pair, then the errors' mean, 90th percentile, and the share of measurements within the
# forecasts' intervals
forecast_lines() {
    sort -u | awk -F '\t' -v OFS='\t' '
        function size(x) { return x < 0 ? -x : x }
        {
            printf "forecast.pair\t%s beside %s, percent of slowdown (by misses %s, by bandwidth %s)\tnote\t%s\t%s\t-\n",
                $1, $2, $7, $8, $3, $6
            error[NR] = size($3 - $6); sum += error[NR]; inside += $4 <= $6 && $6 <= $5
        }
        END {
            if (!NR) { print "forecast.mean", "error of forecasts, mean of points", "FAIL", "-", "-", "at most 5"; exit }
            for (i = 2; i <= NR; i++) for (k = i; k > 1 && error[k] < error[k - 1]; k--) { t = error[k]; error[k] = error[k - 1]; error[k - 1] = t }
            high = error[int(0.9 * NR + 0.999)]
            print "forecast.mean", "error of forecasts, mean of points", sum / NR <= 5 ? "met" : "missed", NR " pairs", sprintf("%.2f", sum / NR), "at most 5"
            print "forecast.high", "error of forecasts, 90th percentile of points", high <= 12 ? "met" : "missed", NR " pairs", sprintf("%.2f", high), "at most 12"
            print "forecast.interval", "measured slowdowns within the 90 % intervals, percent", "note", "90", sprintf("%.0f", 100 * inside / NR), "-"
        }'
}
