# Real programs of Debian beside each other, as forecast from recordings against the modeled machine; sourced by
# lab/modeled.sh. Expects $binary, $out and $started, $budget (seconds).
# Half of a large cache is enough for a small program, so the L3 here has 2 MiB: a virtual machine's share of one.
real_machine='lab-vm?caches.l3.size_bytes=2097152'

# Inputs that are the same on every host: rows by a fixed rule.
real_files() {
    mkdir -p "$1"
    awk 'BEGIN { for (i = 1; size < 400000; i++) {
        row = (i * 7919) % 1000003 " " (i * 104729) % 999983 " a row of text " i
        size += length(row) + 1
        print row } }' >"$1/text"
    cat >"$1/load.sql" <<'END'
create table t(k integer, v text);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 100000)
insert into t select (i * 7919) % 1000003, printf('%d-%d', i * 31, (i * 104729) % 999983) from n;
create index tk on t(k);
create index tv on t(v);
select count(*), sum(length(a.v)) from t a join t b on a.k = b.k + 1;
END
}

# told PROGRAM JSON: percent that the forecast gives it; measured PROGRAM JSON: percent that it was slower together
told() { awk -F '[:,]' -v name="\"$1\"" '/"group"/ { on = 1 } on && $2 ~ name { found = 1 } found && /slowdown_percent/ { printf "%.1f", $2; exit }' "$2"; }
measured() {
    awk -F '": ' -v name="$1" '
        $1 ~ /"phase/ { phase = $2 } $1 ~ /"program/ { program = $2 }
        $1 ~ /"slowdown/ && phase ~ /together/ && index(program, name) { if ($2 !~ /null/) printf "%.1f", 100 * ($2 + 0); exit }' "$2"
}

# real_report ID WHAT VERDICT REPORTED MODELED TARGET
real_report() { printf 'real.%s\t%s\t%s\t%s\t%s\t%s\n' "$@" >>"$out/results.tsv"; }

real() {
    local files=$out/real program forecast found verdict limit
    for program in xz sqlite3 valgrind; do
        command -v "$program" >/dev/null || { real_report end "real programs" note - "NOT RUN: $program is missing on this host" -; return; }
    done
    limit=$((started + budget - $(date +%s)))
    [ "$limit" -lt "$limit_seconds" ] || limit=$limit_seconds
    real_files "$files"
    echo "scenario 'real' on $real_machine (modeled machine) ..."
    set -- "/usr/bin/xz -k -c -6 text" "/usr/bin/sqlite3 -init load.sql :memory: .quit"
    for program in "$@"; do
        (cd "$files" && "$binary" --quiet profile --force -o "$(basename "${program%% *}").json" -- $program >/dev/null 2>recorded.log) ||
            { real_report end "real programs" note - "NOT RUN: they cannot be recorded (see $files/recorded.log)" -; return; }
    done
    (cd "$files" && "$binary" --quiet predict --machine "$real_machine" --json xz.json sqlite3.json >forecast.json)
    if ! CACHEMATE_LAB=$PWD/lab LAB_LIMIT_SECONDS=$limit "$binary" --quiet lab run --machine "$real_machine" --seconds 3 \
        --programs-dir "$files" --json -- "$@" >"$files/ran.json" 2>"$files/ran.log"; then
        real_report end "real programs" note - "NOT RUN to their end: $(tail -n 1 "$files/ran.log" | tr '\t' ' ' | cut -c1-200)" -
        return
    fi
    for program in xz sqlite3; do
        forecast=$(told "$program" "$files/forecast.json")
        found=$(measured "/$program" "$files/ran.json")
        verdict=$(awk -v a="$forecast" -v b="$found" 'BEGIN {
            if (a == "" || b == "") print "FAIL"; else print (a - b <= 10 && b - a <= 10) ? "met" : "missed" }')
        real_report "$program" "$program beside the other, percent of its time alone: forecast from recordings, measured" "$verdict" \
            "${forecast:-none}" "${found:-none}" "within 10 points"
    done
}
