#!/bin/sh
# Records one MariaDB server with two databases under load: mariadb.cmt, and in mariadb.threads which database each
# connection's thread served.
#   recordings/servers/mariadb.sh [DIRECTORY]     default: beside this script
# Needs mariadb-server-core, mariadb-client-core, sysbench, valgrind, and cachemate (or CACHEMATE=path). Takes some minutes.
#
# Who served what is the server's own word: information_schema.PROCESSLIST names the kernel's thread id and the database
# of each connection, and the recorder keeps the kernel's thread id of every thread that it records. Connections of the two
# databases are opened in turn, so that the order of their threads says nothing about the database.
set -eu
out=$(cd "${1:-$(dirname "$0")}" && pwd)
cachemate=${CACHEMATE:-cachemate}
skip=${MARIADB_SKIP:-800000000} max=${MARIADB_MAX:-60000000} rows=${MARIADB_ROWS:-2000} l1=${MARIADB_L1:-4M:16}
each=4
work=$(mktemp -d)
server='' load=''
finish() {
    # shellcheck disable=SC2086
    for job in $load $server; do kill "$job" 2>/dev/null || true; done
    wait 2>/dev/null || true
    [ -n "${KEEP:-}" ] || rm -rf "$work"
}
trap finish EXIT
trap 'exit 1' INT TERM
PATH=$PATH:/usr/sbin
for tool in mariadbd mariadb-install-db mariadb sysbench valgrind; do
    command -v $tool >/dev/null || { echo "mariadb.sh: $tool is missing" >&2; exit 1; }
done
# A server of 10.11.19 reserves 8 TiB without a largest pool size, and asynchronous I/O does not work under Valgrind.
options="--no-defaults --datadir=$work/data --socket=$work/socket --skip-networking --user=$(id -un) --skip-log-bin
    --innodb-buffer-pool-size=16M --innodb-buffer-pool-size-max=64M --innodb-use-native-aio=0
    --innodb-flush-log-at-trx-commit=0 --innodb-log-file-size=16M --performance-schema=OFF --thread-cache-size=0"
sql() { mariadb --no-defaults --socket="$work/socket" --user="$(id -un)" --batch --skip-column-names -e "$1"; }
wait_for_server() {
    tries=0
    until sql 'SELECT 1' >/dev/null 2>&1; do
        tries=$((tries + 1))
        [ $tries -lt 1200 ] || { echo "mariadb.sh: the server does not answer" >&2; cat "$work"/*.err >&2; exit 1; }
        sleep 0.5
    done
}
bench() { # DATABASE COMMAND
    sysbench oltp_read_write --mysql-socket="$work/socket" --mysql-user="user_$1" --mysql-db="db_$1" --tables=1 \
        --table-size="$rows" --threads=1 --time=0 "$2"
}

mariadb-install-db --no-defaults --datadir="$work/data" --auth-root-authentication-method=normal --skip-test-db \
    --user="$(id -un)" >"$work/install.log" 2>&1
# shellcheck disable=SC2086
mariadbd $options >"$work/native.err" 2>&1 &
server=$!
wait_for_server
for db in a b; do
    sql "CREATE DATABASE db_$db; CREATE USER user_$db@localhost; GRANT ALL ON db_$db.* TO user_$db@localhost"
    bench $db prepare >"$work/prepare_$db.log"
done
sql SHUTDOWN
wait $server

# shellcheck disable=SC2086
"$cachemate" record --quiet --force --skip-accesses "$skip" --max-accesses "$max" --kill-at-max --l1 "$l1" --compression-level 19 \
    -o "$out/mariadb.cmt" -- "$(command -v mariadbd)" $options >"$work/record.out" 2>"$work/record.err" &
server=$!
wait_for_server
for _ in $(seq $each); do
    for db in a b; do
        # A client gives up where the server, slow as it is here, lets it wait for half a minute.
        (while kill -0 $server 2>/dev/null; do bench $db run; done) >>"$work/load_$db.log" 2>&1 &
        load="$load $!"
        sleep 3
    done
done
# Before the window begins: a thread that served its connection then serves it until one of the two ends.
until [ "$(cat "$work/connections" 2>/dev/null | wc -l)" -eq $((2 * each)) ]; do
    kill -0 $server 2>/dev/null || { echo "mariadb.sh: the window was over before all connections were up" >&2; exit 1; }
    sleep 3
    sql "SELECT TID, DB FROM information_schema.PROCESSLIST WHERE DB LIKE 'db\\_%' ORDER BY TID" \
        >"$work/connections" || true
done
wait $server || { cat "$work/record.err" >&2; exit 1; }
server=''
{
    echo "# Kernel's id of each connection's thread in mariadb.cmt, and its database, by the server's own process list."
    cat "$work/connections"
} >"$out/mariadb.threads"
cat "$work/record.out" "$out/mariadb.threads"
