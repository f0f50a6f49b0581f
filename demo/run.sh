#!/bin/sh
# The main job on real programs: record them here, say which slow each other down on this machine, run three of the pairs
# beside their forecasts, and plan where they run. Writes an HTML report and prints its path last. If this machine has one
# last-level cache, also the plan for one with several.
# Needs target/release/cachemate (or CACHEMATE). Without Valgrind it says so and works on the shipped recordings.
# Usage: demo/run.sh [FOLDER]     (everything goes to target/demo, or to FOLDER)
set -eu
cd "$(dirname "$0")/.."
cachemate=${CACHEMATE:-target/release/cachemate}
case $cachemate in /*) ;; *) cachemate=$PWD/$cachemate ;; esac
machine=${MACHINE:-host}         # this machine, which is measured first
larger=epyc-7763                 # a machine of today with several caches: 64 cores, eight L3s of 32 MB
case $machine in /* | [!/]*/*) machine=$(realpath -m "$machine") ;; esac
out=${1:-target/demo}
want=8
max=${MAX_ACCESSES:-2000000000}  # data accesses recorded of each program: all, in fact, because no part of a run is its mean
rm -rf "$out"
mkdir -p "$out"
out=$(cd "$out" && pwd)
here=$PWD/demo/programs
started=$(date +%s)
say() { printf '\n== %s\n' "$*"; }
have() { command -v "$1" >/dev/null 2>&1; }

# Inputs: this project's own text, and a C file large enough to keep a compiler busy.
find crates docs demo machines ./*.md -type f \( -name '*.rs' -o -name '*.md' -o -name '*.toml' \) -print 2>/dev/null |
    LC_ALL=C sort | xargs cat >"$out/text"
# A run of half a second is recorded in ten.
head -c 2000000 "$out/text" >"$out/part"
head -c 400000 "$out/text" >"$out/small-part"
awk 'BEGIN { for (f = 0; f < 90; f++) {
    printf "int f%d(int *a, int n) {\n int s = %d;\n for (int i = 1; i < n; i++) {\n", f, f
    printf "  if (a[i] > s) s += a[i - 1] * %d; else a[i] ^= s >> %d;\n  switch (a[i] & 7) {\n", f % 13 + 1, f % 7 + 1
    for (c = 0; c < 6; c++) printf "   case %d: s = s * %d + a[i]; break;\n", c, c * f % 31 + 3
    printf "  }\n }\n return s;\n}\n" } }' >"$out/many.c"
if have cc; then
    for program in chase stencil; do cc -O2 -o "$out/$program" "$here/$program.c"; done
fi

recorded='' # names without blanks; the files are NAME.cmt in the folder, whose path may have some
children=ignore
count=0
missing=''
# record NAME PROGRAM COMMAND...: records COMMAND as NAME if PROGRAM is there and fewer than eight are recorded.
record() {
    name=$1 program=$2
    shift 2
    [ "$count" -lt "$want" ] || return 0
    if ! have "$program"; then
        missing="$missing $program"
        return 0
    fi
    if ! "$cachemate" --quiet record --max-accesses "$max" --kill-at-max --children "$children" --json -o "$out/$name.cmt" -- "$@" \
        >"$out/$name.log" 2>"$out/$name.err"; then
        echo "  $name could not be recorded: $(tail -n 1 "$out/$name.err")" >&2
        return 0
    fi
    awk -v name="$name" -F '[:,]' '/"records"|"program_accesses"|"instructions"/ { v[$1] = $2 + 0 } END {
        printf "  %-8s %d records of %d data accesses, %d instructions\n", name, v["  \"records\""],
            v["  \"program_accesses\""], v["  \"instructions\""] }' "$out/$name.err"
    printf '%s\0' "$@" >"$out/$name.cmd"
    recorded="$recorded $name"
    count=$((count + 1))
}

say "recording real programs from start to end, behind a 32K L1"
if "$cachemate" --quiet record --max-accesses 1000 -o "$out/probe.cmt" -- true >/dev/null 2>"$out/probe.err"; then
    record bzip2 bzip2 bzip2 -9 -c "$out/part"
    record xz xz xz -6 -c "$out/small-part"
    record gzip gzip gzip -6 -c "$out/part"
    # What is called python3 may be a script that finds the interpreter: record the interpreter itself.
    python=$(python3 -c 'import sys; print(sys.executable)' 2>/dev/null || echo python3)
    record python3 python3 "$python" "$here/words.py" "$out/small-part"
    children=follow # gcc only starts the compiler
    record cc1 gcc gcc -O2 -S -o "$out/many.s" "$out/many.c"
    children=ignore
    record sqlite3 sqlite3 sqlite3 -init "$here/orders.sql" :memory: .quit
    record chase "$out/chase" "$out/chase" 1536 20000000
    record stencil "$out/stencil" "$out/stencil" 400 200
    record perl perl perl "$here/words.pl" "$out/part"
    record sort sort sort "$out/part"
else
    sed 's/^/  /' "$out/probe.err" >&2
fi
rm -f "$out"/probe.cmt* "$out"/*.log "$out"/*.err "$out/many.s"
[ -z "$missing" ] || echo "  not installed, left out:$missing" >&2

if [ "$count" -lt "$want" ]; then
    echo "  $count of $want programs could be recorded here; the rest comes from the shipped recordings" >&2
    for file in recordings/*.cmt; do
        [ -e "$file" ] && [ "$count" -lt "$want" ] || continue
        name=$(basename "$file" .cmt)
        case " $recorded " in *" $name "*) continue ;; esac
        echo "  $name (shipped)"
        cp "$file" "$out/$name.cmt"
        recorded="$recorded $name"
        count=$((count + 1))
    done
fi
if [ "$count" -lt 2 ]; then
    echo "demo: nothing to work on: no Valgrind, and no recordings in recordings/" >&2
    exit 1
fi

cd "$out"
# A profile forecasts what its recording does, and is read in a moment.
files=''
for name in $recorded; do
    "$cachemate" --quiet profile "$name.cmt" -o "$name.profile.json" >/dev/null
    files="$files $name.profile.json"
done

say "which programs slow each other down on $machine: forecast"
# shellcheck disable=SC2086 # the lists are meant to be split
"$cachemate" predict $files --machine "$machine" --json >forecast.json
# shellcheck disable=SC2086
"$cachemate" predict $files --machine "$machine"

say "three of these pairs on this machine: forecast and measured"
if [ "$machine" != host ]; then
    echo "not measured: the forecast is for $machine"
elif ! have python3; then
    echo "not measured: python3 is not installed"
else
    # shellcheck disable=SC2086
    python3 "$here/../measure.py" "$out" forecast.json $recorded || echo "not measured: see above"
fi

say "the plan for $machine"
# shellcheck disable=SC2086
"$cachemate" plan $files --machine "$machine"
# shellcheck disable=SC2086
"$cachemate" --quiet report $files --machine "$machine" -o report.html >/dev/null

caches=$("$cachemate" --quiet topology 2>/dev/null | awk '/shared last level/ { n++ } END { print n + 0 }')
if [ "$machine" = host ] && [ "$caches" -lt 2 ]; then
    say "this machine has one last-level cache; the plan for another one, $larger, with eight"
    # shellcheck disable=SC2086
    "$cachemate" plan $files --machine "$larger"
fi
echo
echo "done in $(($(date +%s) - started)) s; look at the report:"
echo "$out/report.html"
