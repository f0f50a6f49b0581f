# Services beside each other: a key-value store with clients, a compression job, a database, and a Python service, each in
# the control group of its unit; sourced by lab/modeled.sh. Expects $binary, $cache and $out.
# `auto` manages them. The service that it blames is compared with the one that evicted most of the store's lines.

# Redis of this host's Debian release, because the guest has the host's C library; the host itself is not changed.
services_fetch() {
    local suite package
    suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    redis=$cache/redis-${suite:-none}
    [ ! -s "$redis/ready" ] || return 0
    [ -n "$suite" ] || not_run "this is not a Debian system (no VERSION_CODENAME)"
    exec 9>"$cache/lock"
    flock 9
    apt_root "$suite"
    in_root apt-get install -y --download-only --no-install-recommends redis-server >>"$out/apt.log" 2>&1 ||
        not_run "redis-server cannot be had (see $out/apt.log)"
    rm -rf "$redis" "$redis.new"
    mkdir -p "$redis.new"
    for package in "$root"/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$redis.new" || not_run "$package cannot be unpacked"
    done
    dpkg-deb -f "$root"/cache/archives/redis-server_*.deb Version >"$redis.new/ready"
    mv "$redis.new" "$redis"
    rm -rf "$root"
    exec 9>&-
}

# The guest's files: programs with their libraries, Python's own library, and inputs that are equal on every host.
services_files() {
    local guest=$out/initramfs files=$out/initramfs/programs program library
    mkdir -p "$files"
    printf '/usr/bin/xz\n/usr/bin/sqlite3\n/usr/bin/python3.11\n' >"$out/services.programs"
    sed -i "s|/usr/bin/python3.11|$(realpath /usr/bin/python3)|" "$out/services.programs"
    with_programs "$out/services.programs"
    ln -sf "$(realpath /usr/bin/python3)" "$guest/bin/python3"
    for program in redis-server redis-benchmark; do
        cp -L "$redis/usr/bin/$program" "$guest/bin/"
        LD_LIBRARY_PATH=$redis/usr/lib/x86_64-linux-gnu:$redis/lib/x86_64-linux-gnu ldd "$redis/usr/bin/$program" | grep -o '/[^ ]*' |
            while read -r library; do
                mkdir -p "$guest$(dirname "${library#"$redis"}")"
                cp -L "$library" "$guest${library#"$redis"}"
            done
    done
    (cd / && find "usr/lib/$(basename "$(realpath /usr/bin/python3)")" -maxdepth 2 -name '*.py' -not -path '*/test/*' \
        -not -path '*/idlelib/*' -not -path '*/tkinter/*' -print0 | xargs -0 cp --parents -t "$guest")
    real_files "$files"
    for copy in 1 2 3 4 5 6 7 8 9 10; do cat "$files/text"; done >"$files/texts"
    cat >"$files/service.py" <<'END'
counts = {}
state = 1
while True:
    for _ in range(20000):
        state = state * 16807 % 2147483647
        key = state % 50000
        counts[key] = counts.get(key, 0) + 1
END
}

# services NAME MACHINE: a scenario.
services() {
    local program
    for program in xz sqlite3 python3; do
        command -v "$program" >/dev/null ||
            { printf 'services.end\tservices\tnote\t-\tNOT RUN: %s is missing on this host\t-\n' "$program" >>"$out/results.tsv"; return; }
    done
    services_fetch
    services_files
    pack
    scenario "$1" "$2"
    services_blame "$1" >>"$out/results.tsv"
}

# services_losses: the loss of redis by the stream: by cachemate, and as the machine's user instructions per cycle with the
# stream (before cachemate starts) and without it (after its end); and in the last two seconds under `auto`, with the cost
# of cachemate's counters. The first 0.3 s of a span are left out.
services_losses() {
    local reported
    reported=$(tr -d '\r' <"$out/services-batch.log" | sed -n 's/^# blamed: batch (+\([0-9.]*\) %, measured.*/\1/p' | tail -n 1)
    awk -F '\t' -v reported="$reported" '
        function add(kind, from, to, i) { for (i = from; i <= to; i++) { work[kind] += instructions[i]; time[kind] += cycles[i] } }
        NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        $1 != last { samples++; last = $1 }
        {
            name = $at["name"]; key = $at["tid"] " " $at["pid"]
            ran = $at["cycles"] - old_cycles[key]; did = $at["user_instructions"] - old[key]
            old_cycles[key] = $at["cycles"]; old[key] = $at["user_instructions"]
            if (name ~ /^redis-server/) { instructions[samples] += did; cycles[samples] += ran }
            if (name ~ /^lab-program/ && ran > 1e7) { stream_end = samples; if (!stream_start) stream_start = samples }
            if (name ~ /^cachemate/ && ran > 0) { daemon_end = samples; if (!daemon_start) daemon_start = samples }
        }
        END {
            add("beside", stream_start + 3, daemon_start - 1); add("alone", stream_end + 3, samples - 2)
            add("managed", daemon_end - 21, daemon_end - 2)
            for (kind in work) if (time[kind] > 0) speed[kind] = work[kind] / time[kind]
            if (!speed["beside"] || !speed["alone"]) { print "services-batch.share\tthe loss of redis by the stream\tFAIL\t-\t-\t-"; exit }
            truth = 100 * (speed["alone"] / speed["beside"] - 1); managed = 100 * (speed["alone"] / speed["managed"] - 1)
            printf "services-batch.share\tthe loss of redis by the stream, percent\t%s\t%s\t%.1f\twithin 5 points\n",
                reported != "" && (reported - truth) ^ 2 <= 25 ? "met" : "missed", reported == "" ? "none" : reported, truth
            printf "services-batch.limit\tthe loss of redis under auto, percent\t%s\t-\t%.1f\tat most 5\n", managed <= 5 ? "met" : "missed", managed
        }' "$out/services-batch.truth.tsv"
}

# services_blame NAME: the service that cachemate blames for the store's loss, beside the one whose tasks evicted most of the
# store's lines.
services_blame() {
    local blamed evictors
    blamed=$(tr -d '\r' <"$out/$1.log" | sed -n 's/^# blamed: //p' | tail -n 1)
    evictors=$(services_evictors "$out/$1.truth.tsv.hurt")
    printf '%s.blame\tthe service that slows redis: by cachemate, and by lines evicted in the model\t%s\t%s\t%s\tequal, within 20 s\n' \
        "$1" "$([ -n "${evictors%% *}" ] || echo FAIL; [ "${blamed%% *}" = "${evictors%% *}" ] && echo met || echo missed)" \
        "${blamed:-none}" "${evictors:-no evictions are known}"
}
# services_evictors FILE: services by the number of the store's misses that they caused, the largest first.
services_evictors() {
    awk -F '\t' '
        function service(name) {
            if (name ~ /^redis-server|^bio_|^io_thd|^jemalloc/) return "redis"
            if (name ~ /^redis-benchma/) return "clients"
            if (name ~ /^xz/) return "compress"
            if (name ~ /^lab-program/) return "batch"
            if (name ~ /^sqlite3/) return "sqlite"
            if (name ~ /^python3/) return "python"
        }
        NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        { by = service($at["by_name"]); of = service($at["name"]); if (of == "redis" && by != "" && by != of) misses[by] += $at["misses"] }
        END { for (by in misses) print misses[by] "\t" by }' "$1" | sort -rn | awk -F '\t' '{ printf "%s%s (%d misses)", gap, $2, $1; gap = " " }'
}
