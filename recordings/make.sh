#!/bin/sh
# Re-makes the bundled recordings: records every program of README.md with `cachemate record`.
#   recordings/make.sh [NAME...]       all without a name; recordings go beside this script
# Inputs are made here, from nothing but arithmetic, so that their licence is the project's own.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cachemate=${CACHEMATE:-cachemate}
# Stands for the private caches in front of a shared one: what passes it is what a last level sees.
filter=${RECORDINGS_FILTER:-128K:8}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
wanted=" $* "
PATH=$PATH:/usr/games

need() { command -v "$1" >/dev/null 2>&1 || { echo "make.sh: $1 is missing: install the package '$2'" >&2; exit 1; }; }

input=/dev/null
# record NAME SKIP MAX COMMAND...      with $input as standard input
record() {
    name=$1 skip=$2 max=$3
    shift 3
    case "$wanted" in "  " | *" $name "*) ;; *) return 0 ;; esac
    "$cachemate" record --quiet --force --compression-level 19 --l1 "$filter" --skip-accesses "$skip" --max-accesses "$max" --kill-at-max \
        -o "$here/$name.cmt" -- "$@" >out.txt 2>err.txt <"$input" || { cat err.txt >&2; exit 1; }
    echo "$name: $(wc -c <"$here/$name.cmt") bytes"
}

# Words of a language of its own: 20 000 of them, their frequency falling as real words' does.
text() { # LINES SEED
    awk -v lines="$1" -v s="$2" 'function r() { s = (s * 1103515245 + 12345) % 2147483648; return s / 2147483648 }
        BEGIN { split("ka lo mi ten su ra vel no qui pa shar ed il ost un be", syl, " ")
            for (i = 0; i < lines; i++) { line = ""
                for (w = 0; w < 12; w++) { k = int(20000 ^ r()); word = ""
                    for (k += 3; k > 0; k = int(k / 16)) word = word syl[k % 16 + 1]
                    line = line word " " }
                print line } }'
}
numbers() { # LINES SEED
    awk -v lines="$1" -v s="$2" 'BEGIN { for (i = 0; i < lines; i++) { s = (s * 1103515245 + 12345) % 2147483648
        printf "%d\t%d\trow %d\n", s, int(s / 1000) % 977, i } }'
}
text 60000 1 >text.txt
numbers 200000 2 >numbers.txt

cat >chase.c <<'C'
/* A pointer chaser: one random cycle through 4 MiB of nodes of a line each. */
#include <stdint.h>
#include <stdlib.h>
#define NODES 65536
struct node { struct node *next; char rest[56]; };
static struct node nodes[NODES] __attribute__((aligned(64)));
int main(void) {
    static uint32_t order[NODES];
    uint64_t s = 1;
    for (uint32_t i = 0; i < NODES; i++) order[i] = i;
    for (uint32_t i = NODES - 1; i > 0; i--) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        uint32_t j = (s >> 33) % i, x = order[i];
        order[i] = order[j]; order[j] = x;
    }
    for (uint32_t i = 0; i < NODES; i++) nodes[order[i]].next = &nodes[order[(i + 1) % NODES]];
    struct node *at = nodes;
    for (int i = 0; i < 400000; i++) at = at->next;
    return at == 0;
}
C
cat >stencil.c <<'C'
/* A numeric kernel: sweeps of a five-point stencil over two grids of 4 MiB each, as swim and mgrid do. */
#include <stdio.h>
#define N 724
static double a[N][N], b[N][N];
int main(void) {
    for (int i = 0; i < N; i++) for (int j = 0; j < N; j++) a[i][j] = (i * 31 + j * 17) % 101;
    for (int t = 0; t < 6; t++) {
        for (int i = 1; i < N - 1; i++) for (int j = 1; j < N - 1; j++)
            b[i][j] = 0.25 * (a[i - 1][j] + a[i + 1][j] + a[i][j - 1] + a[i][j + 1]);
        for (int i = 1; i < N - 1; i++) for (int j = 1; j < N - 1; j++) a[i][j] = b[i][j];
    }
    printf("%g\n", a[N / 2][N / 3]);
    return 0;
}
C
cat >stream.c <<'C'
/* A stream: reads 24 MiB in order, again and again, as lbm and libquantum do. */
#include <stdio.h>
#include <stdlib.h>
#define N (24 << 20) / 8
int main(void) {
    long *x = malloc(8L * N), sum = 0;
    for (long i = 0; i < N; i++) x[i] = i;
    for (int t = 0; t < 4; t++) for (long i = 0; i < N; i++) sum += x[i];
    printf("%ld\n", sum);
    return 0;
}
C
cat >words.py <<'P'
"""Counts words and sorts them: an interpreter's dictionaries and objects."""
counts = {}
for number, line in enumerate(open("text.txt")):
    for word in line.split():
        counts.setdefault(word, []).append(number)
    if number == 20000:
        break
print(sorted((len(where), word) for word, where in counts.items())[-3:])
P
cat >words.pl <<'P'
my %seen; open(my $in, "<", "text.txt"); my $n = 0;
while (<$in>) { $seen{$_} .= "$n," for split; last if ++$n > 25000 }
my @best = sort { length $seen{$b} <=> length $seen{$a} } keys %seen; print "$best[0]\n";
P
cat >query.sql <<'S'
CREATE TABLE t AS WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < 50000)
  SELECT (i * 1103515245 + 12345) % 2147483648 AS k, i % 977 AS g, printf('row number %d', i) AS name FROM c;
CREATE INDEX byk ON t (k);
SELECT g, count(*), sum(k) FROM t GROUP BY g ORDER BY 3 DESC LIMIT 3;
SELECT count(*), max(b.name) FROM t a JOIN t b ON b.k = ((a.g * 51 + a.rowid * 7919) % 50000 * 1103515245 + 12345) % 2147483648;
S
cat >scene.pov <<'P'
#version 3.7;
global_settings { assumed_gamma 1.0 }
camera { location <0, 6, -14> look_at 0 }
light_source { <20, 30, -20> rgb 1 }
#declare R = seed(7);
#declare I = 0;
#while (I < 400)
  sphere { <rand(R) * 16 - 8, rand(R) * 4, rand(R) * 12 - 4>, 0.4 pigment { rgb <rand(R), rand(R), rand(R)> } finish { reflection 0.3 } }
  #declare I = I + 1;
#end
plane { y, 0 pigment { checker rgb 0.2, rgb 0.8 } }
P
cat >group.g <<'G'
g := Group((1,2,3,4,5,6,7,8,9,10,11),(3,7,11,8)(4,10,5,6),(1,12)(2,11)(3,6)(4,8)(5,9)(7,10));;
Print(Size(g), " ", Length(ConjugacyClasses(g)), "\n");
l := List([1..60000], i -> (i * i * 31 + 7) mod 10007);; Sort(l);; Print(Length(Set(l)), "\n");
QUIT;
G
awk 'BEGIN { for (i = 0; i < 700; i++) {
    printf "struct s%d { int a; double b[%d]; struct s%d *next; };\n", i, i % 7 + 1, i
    printf "double f%d(struct s%d *p, int n) { double x = %d; while (p && n--) { for (int i = 0; i < %d; i++) x += p->b[i] * p->a; p = p->next; } return x; }\n", i, i, i, i % 7 + 1
    printf "int g%d(int a, int b) { switch ((a ^ b) %% 5) { case 0: return a * %d + b; case 1: return b %% (a | 1); case 2: return a << 3; default: return g%d(a - 1, b / 2); } }\n", i, i, (i ? i - 1 : 0) } }' >unit.c
awk 'BEGIN { split("the a this every some", d, " "); split("cat dog teacher river machine city letter friend", n, " ")
    split("sees likes follows writes finds remembers", v, " "); s = 5
    for (i = 0; i < 60; i++) { line = ""
        for (k = 0; k < 4; k++) { s = (s * 1103515245 + 12345) % 2147483648; a = d[int(s / 7) % 5 + 1]; b = n[int(s / 97) % 8 + 1]; c = v[int(s / 997) % 6 + 1]
            line = line a " " b (k < 3 ? " who " c " " : " sleeps") }
        print line "." } }' >sentences.txt
awk 'BEGIN { n = 120; s = 3; print "Minimize\n cost:"; for (i = 0; i < n; i++) for (j = 0; j < n; j += 3) { s = (s * 1103515245 + 12345) % 2147483648; printf " + %d x%d_%d\n", int(s / 64) % 90 + 1, i, j }
    print "Subject To"; for (i = 0; i < n; i++) { for (j = 0; j < n; j += 3) printf " + x%d_%d\n", i, j; print " = 1" }
    for (j = 0; j < n; j += 3) { for (i = 0; i < n; i++) printf " + x%d_%d\n", i, j; print " <= 3" } print "End" }' >assign.lp
cc -O2 -o chase chase.c && cc -O2 -o stencil stencil.c && cc -O2 -o stream stream.c

need gzip gzip; need bzip2 bzip2; need xz xz-utils; need perl perl; need sqlite3 sqlite3; need gawk gawk; need openssl openssl
need povray povray; need gap gap-core; need link-parser link-grammar; need gnugo gnugo; need glpsol glpk-utils; need python3 python3
export LC_ALL=C
python=/usr/bin/python3
[ -x "$python" ] || python=$(command -v python3)
M=000000
record gzip 10$M 60$M gzip -9 -c text.txt
record bzip2 20$M 25$M bzip2 -9 -c text.txt
record xz 40$M 5$M xz -6 -c text.txt
record cc1 100$M 20$M "$(cc -print-prog-name=cc1)" -quiet -O2 unit.c -o unit.s
record python3 60$M 26$M "$python" -S words.py
record perl 60$M 26$M perl words.pl
record sqlite3 150$M 60$M sqlite3 -bail :memory: ".read query.sql"
record sort 5$M 30$M sort --parallel=1 -S 64M -k3 numbers.txt
record gawk 40$M 60$M gawk '{ for (i = 1; i <= NF; i++) c[$i]++ } END { for (w in c) if (c[w] > m) m = c[w]; print m }' text.txt
record openssl 5$M 40$M openssl enc -aes-256-cbc -pbkdf2 -iter 1 -k x -in text.txt -out cipher
record povray 80$M 80$M povray +Iscene.pov +W160 +H120 -D +Oscene.png +WT1
# The command is a script that would be replaced by the program: record the program itself.
gap=$(sed -n 's/^GAP_PRG=//p' "$(command -v gap)")
record gap 150$M 10500000 "$gap" -l "/usr/share/gap;/usr/lib/gap" -q -r -A group.g
input=sentences.txt
record link-parser 150$M 12$M link-parser en -batch
input=/dev/null
record gnugo 30$M 60$M gnugo --benchmark 1 --level 8 --seed 1
record glpsol 20$M 7$M glpsol --lp assign.lp -o assign.out
record chase 520000 197000 ./chase
record stencil 5$M 30$M ./stencil
record stream 3500000 9$M ./stream
