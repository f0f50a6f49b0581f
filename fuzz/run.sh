#!/usr/bin/env bash
# Builds the readers for libFuzzer with a stable compiler, and runs each for SECONDS (60), JOBS (1) at a time.
# What is found lies in fuzz/found/TARGET; docs/fuzzing.md.
set -euo pipefail
cd "$(dirname "$0")"
triple=x86_64-unknown-linux-gnu
flags=(-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
  -Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions -Coverflow-checks)
RUSTC_BOOTSTRAP=1 RUSTFLAGS="${flags[*]}" cargo build --release --target "$triple"
beside() {
  case $1 in
    machine) echo ../machines ;;
    scenario) echo ../scenarios ;;
    host | topology) echo ../crates/linux/src/act/resctrl/trees ;;
  esac
}
one() {
  mkdir -p "found/$1" "grown/$1"
  # shellcheck disable=SC2046 # no folder, no argument
  CACHEMATE_TARGET=$1 "target/$triple/release/readers" "grown/$1" $(ls -d "../crates/fuzzing/corpus/$1" 2>/dev/null) $(beside "$1") \
    -artifact_prefix="found/$1/" -max_total_time="${SECONDS_EACH:-60}" -rss_limit_mb="${MAX_RSS_MB:-256}" -malloc_limit_mb=256 -timeout=10 \
    -max_len=65536 -print_final_stats=1 -close_fd_mask=1 >"found/$1.log" 2>&1 || echo "$1: found something, fuzz/found/$1.log"
  echo "$1: $(sed -n 's/^stat::number_of_executed_units: *//p' "found/$1.log") executions"
}
export -f one beside
export triple
names=(${TARGETS:-$(sed -n 's/^    new_target("\([^"]*\)".*/\1/p' ../crates/fuzzing/src/targets.rs)})
printf '%s\n' "${names[@]}" | xargs -P "${JOBS:-1}" -I{} bash -c 'one {}'
