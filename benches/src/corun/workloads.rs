//! The programs of the co-run bench: own kernels at three sizes, and programs of the distribution that are installed.

use std::process::Command;

use anyhow::Context;
use cachemate_core::SplitMix64;

use super::{CorunHost, write_input};

/// A program with a fixed amount of work.
#[derive(Clone, Debug)]
pub struct CorunProgram {
    pub name: String,
    pub command: Vec<String>,
    /// For a server, the shell command that loads it and shuts it down. It runs on the same CPU, and is not measured.
    pub load: Option<&'static str>,
    /// The same program with much more work, for a companion that must not end.
    pub endless_command: Vec<String>,
    /// Units of work of a run, if the endless command counts them in a file that is named by one more argument.
    pub units: Option<u64>,
    /// The resource that it needs most: cache, overlap or bandwidth.
    pub cause: &'static str,
}

/// All programs that can be run here.
pub struct CorunProgramSet {
    /// What a program runs beside to be alone with the caches.
    pub spinner: CorunProgram,
    own: Vec<CorunProgram>,
    installed: Vec<CorunProgram>,
}

const KERNEL_SOURCE: &str = include_str!("kernels.c");
/// Kernels: name, units of a first trial, and the resource that they need most if they exceed the cache.
const KERNELS: [(&str, u64, &str); 7] = [
    ("chase", 1_000_000, "overlap"),
    ("stream", 1_000_000, "bandwidth"),
    ("histogram", 5_000_000, "overlap"),
    ("hash-join", 2_000_000, "overlap"),
    ("bfs", 5_000_000, "overlap"),
    ("matrix", 100, "bandwidth"),
    ("sparse", 5_000_000, "bandwidth"),
];
/// Sizes by name, as shares of the shared cache.
const SIZES: [(&str, f64); 3] = [("below", 0.3), ("near", 0.9), ("above", 4.0)];
/// Aimed time of a run.
const RUN_SECONDS: f64 = 0.5;
/// Shortest trial from which the work of a run is known, and its most units.
const MIN_TRIAL_SECONDS: f64 = 0.15;
const MAX_TRIAL_UNITS: u64 = 1 << 40;
/// Work of a companion, as a multiple of a run.
const ENDLESS_FACTOR: u64 = 10_000;

impl CorunProgramSet {
    /// Compiles the kernels, finds how much work fills a run, and writes the inputs of the other programs.
    pub fn prepare(host: &CorunHost, cache_bytes: u64) -> anyhow::Result<Self> {
        let kernels = compile_kernels(host)?;
        let sized = |kind: &str, name: String, bytes: u64, first_units: u64, cause| {
            // A trial shorter than a burst of other guests would say nothing.
            let mut trial_units = first_units;
            let with_units = |units| kernel(&kernels, kind, name.clone(), bytes, units, cause);
            let time_of =
                |units| anyhow::Ok(host.time_alone(&with_units(units).command)?.total_s());
            let mut time = time_of(trial_units)?;
            while time < MIN_TRIAL_SECONDS && trial_units < MAX_TRIAL_UNITS {
                trial_units *= 4;
                time = time_of(trial_units)?;
            }
            let start_time = time_of(trial_units / 4)?;
            let unit_seconds = ((time - start_time) / (0.75 * trial_units as f64)).max(1e-11);
            let units = (RUN_SECONDS / unit_seconds) as u64 + 1;
            anyhow::Ok(with_units(units))
        };
        let spinner = sized("spin", "spin".to_string(), 0, 20_000_000, "cache")?;
        let mut own = Vec::new();
        for (kind, units, cause) in KERNELS {
            for (size, share) in SIZES {
                let bytes = (share * cache_bytes as f64) as u64;
                let cause = if size == "above" { cause } else { "cache" };
                own.push(sized(kind, format!("{kind}-{size}"), bytes, units, cause)?);
            }
        }
        let mut installed = Vec::new();
        for program in installed_programs(host)? {
            let name = &program.name;
            // One that fails here, for example for want of a module, is left out.
            match host.time_program(&program) {
                Ok(time) if time.total_s() > 0.05 => installed.push(program),
                Ok(_) => eprintln!("{name} is left out: it runs for less than 0.05 s"),
                Err(error) => eprintln!("{name} is left out: {error:#}"),
            }
        }
        Ok(CorunProgramSet {
            spinner,
            own,
            installed,
        })
    }

    /// Draws programs: up to half of them installed ones, and each kernel once before any is drawn at a second size.
    pub fn choose(&self, count: usize, generator: &mut SplitMix64) -> Vec<CorunProgram> {
        let mut shuffled = |workloads: &[CorunProgram]| {
            let mut workloads = workloads.to_vec();
            for last in (1..workloads.len()).rev() {
                workloads.swap(last, generator.draw_below(last as u64 + 1) as usize);
            }
            workloads
        };
        let mut chosen: Vec<CorunProgram> = shuffled(&self.installed);
        chosen.truncate(count / 2);
        let mut own = shuffled(&self.own);
        let kind_of = |workload: &CorunProgram| workload.command[1].clone();
        let mut rounds = 0;
        while chosen.len() < count && !own.is_empty() && rounds < SIZES.len() {
            let mut kinds = std::collections::BTreeSet::new();
            own.retain(|workload| {
                let is_taken = chosen.len() < count && kinds.insert(kind_of(workload));
                if is_taken {
                    chosen.push(workload.clone());
                }
                !is_taken
            });
            rounds += 1;
        }
        chosen
    }
}

/// The path of the compiled kernels.
///
/// # Errors
/// There is no C compiler.
pub fn compile_kernels(host: &CorunHost) -> anyhow::Result<String> {
    let source = write_input(&host.dir, "kernels.c", KERNEL_SOURCE.as_bytes())?;
    let program = host.dir.join("kernels").display().to_string();
    let compiled = Command::new("cc")
        .args(["-O2", "-o", &program, &source])
        .output()
        .context("cc: cannot be started; the kernels of this bench need a C compiler")?;
    if !compiled.status.success() {
        anyhow::bail!("cc: {}", String::from_utf8_lossy(&compiled.stderr));
    }
    Ok(program)
}

/// A kernel with this work.
pub fn kernel(
    kernels: &str,
    kind: &str,
    name: String,
    bytes: u64,
    units: u64,
    cause: &'static str,
) -> CorunProgram {
    let with_units = |units: u64| {
        [kernels, kind, &bytes.to_string(), &units.to_string()]
            .map(ToString::to_string)
            .to_vec()
    };
    CorunProgram {
        name,
        command: with_units(units),
        load: None,
        endless_command: with_units(units.saturating_mul(ENDLESS_FACTOR)),
        units: Some(units),
        cause,
    }
}

/// The output without its line end; `None` if the command is not installed.
fn output_of(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_string()).filter(|text| output.status.success() && !text.is_empty())
}

/// Installed programs with commands of about half a second each.
fn installed_programs(host: &CorunHost) -> anyhow::Result<Vec<CorunProgram>> {
    let text = write_input(&host.dir, "text", &words(4 << 20))?;
    let short_text = write_input(&host.dir, "short-text", &words(1 << 20))?;
    let source = write_input(&host.dir, "many.c", functions(90).as_bytes())?;
    let orders = write_input(&host.dir, "orders.sql", ORDERS.as_bytes())?;
    let columns = write_input(&host.dir, "columns.py", COLUMNS.as_bytes())?;
    let counts = write_input(&host.dir, "words.py", WORD_COUNTS.as_bytes())?;
    let mut programs = Vec::new();
    let mut add = |name: &str, program: Option<String>, args: &[&str]| {
        if let Some(program) = program {
            let mut command = vec![program];
            command.extend(args.iter().map(ToString::to_string));
            programs.push(CorunProgram {
                name: name.to_string(),
                endless_command: command.clone(),
                command,
                load: None,
                units: None,
                cause: "cache",
            });
        }
    };
    let which = |name: &str| output_of("sh", &["-c", &format!("command -v {name}")]);
    // What is called python3 may be a script that finds the interpreter.
    let python = output_of("python3", &["-c", "import sys; print(sys.executable)"]);
    let compiler = output_of("gcc", &["-print-prog-name=cc1"]).filter(|path| path.starts_with('/'));
    add("xz", which("xz"), &["-T1", "-6", "-c", &short_text]);
    add("bzip2", which("bzip2"), &["-9", "-c", &text]);
    add("gzip", which("gzip"), &["-9", "-c", &text]);
    add("zstd", which("zstd"), &["-q", "-T1", "-12", "-c", &text]);
    add(
        "cc1",
        compiler,
        &["-quiet", "-O1", "-o", "/dev/null", &source],
    );
    add(
        "sqlite3",
        which("sqlite3"),
        &["-init", &orders, ":memory:", ".quit"],
    );
    add("python-columns", python.clone(), &[&columns]);
    add("python-words", python, &[&counts, &text]);
    add(
        "openssl",
        which("openssl"),
        &[
            "dgst", "-sha512", "-r", &text, &text, &text, &text, &text, &text, &text, &text,
        ],
    );
    add(
        "perl",
        which("perl"),
        &[
            "-ne",
            "$n{$_}++ for split; END { print scalar keys %n }",
            &text,
        ],
    );
    add(
        "gawk",
        which("gawk"),
        &[
            "{ for (i = 1; i <= NF; i++) n[$i]++ } END { print length(n) }",
            &text,
        ],
    );
    add("sort", which("sort"), &["-S", "64M", "--parallel=1", &text]);
    add(
        "ffmpeg",
        which("ffmpeg"),
        &[
            "-loglevel",
            "quiet",
            "-threads",
            "1",
            "-f",
            "lavfi",
            "-i",
            "testsrc=size=640x360:rate=25:duration=3",
            "-c:v",
            "mpeg4",
            "-f",
            "null",
            "-",
        ],
    );
    add(
        "x264",
        which("x264"),
        &[
            "--quiet",
            "--threads",
            "1",
            "--demuxer",
            "raw",
            "--input-res",
            "320x240",
            "--fps",
            "25",
            "-o",
            "/dev/null",
            &text,
        ],
    );
    let redis = which("redis-server");
    if let Some(server) = redis.filter(|_| which("redis-benchmark").is_some()) {
        // The recorder runs it in another directory than its load.
        let socket = host.dir.join("redis").display().to_string();
        let mut command = vec![server];
        command.extend(["--port", "0", "--unixsocket", &socket].map(ToString::to_string));
        command.extend(["--appendonly", "no", "--save", ""].map(ToString::to_string));
        programs.push(CorunProgram {
            name: "redis".to_string(),
            command,
            load: Some(REDIS_LOAD),
            endless_command: ["sh", "-c", ENDLESS_REDIS]
                .map(ToString::to_string)
                .to_vec(),
            units: None,
            cause: "cache",
        });
    }
    Ok(programs)
}

/// The load of a server, over a socket file.
const REDIS_LOAD: &str = "until redis-cli -s ./redis ping >/dev/null 2>&1; do sleep 0.02; done; \
    redis-benchmark -s ./redis -q -n 60000 -r 100000 -d 100 -t set,get; redis-cli -s ./redis shutdown nosave";

/// A server with a load that does not end.
const ENDLESS_REDIS: &str = "redis-server --port 0 --unixsocket ./redis-$$ --appendonly no --save '' & \
    until redis-cli -s ./redis-$$ ping; do sleep 0.02; done; \
    redis-benchmark -s ./redis-$$ -q -n 600000000 -r 100000 -d 100 -t set,get";

const ORDERS: &str = "CREATE TABLE orders(id INTEGER PRIMARY KEY, customer INTEGER, amount INTEGER);\n\
    WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 120000)\n\
    INSERT INTO orders SELECT i, i * 7919 % 30011, i * 31 % 1000 FROM n;\n\
    CREATE INDEX by_customer ON orders(customer);\n\
    SELECT count(*) FROM orders AS a JOIN orders AS b ON a.customer = b.customer WHERE a.amount < 300;\n";

const COLUMNS: &str = "n = 900\nrows = [[i * n + j for j in range(n)] for i in range(n)]\n\
    total = 0\nfor _ in range(4):\n    for j in range(n):\n        for i in range(n):\n            total += rows[i][j]\nprint(total)\n";

const WORD_COUNTS: &str = "import sys\ncounts = {}\nfor line in open(sys.argv[1]):\n    for word in line.split():\n        \
    counts[word] = counts.get(word, 0) + 1\nprint(len(counts))\n";

/// Few of the words are frequent, as in real text.
fn words(bytes: usize) -> Vec<u8> {
    let mut generator = SplitMix64::new(3);
    let mut text = Vec::with_capacity(bytes + 32);
    while text.len() < bytes {
        let bound = generator.draw_below(60_000) + 1;
        let mut word = generator.draw_below(bound) * 2_654_435_761 % 4_294_967_291;
        for _ in 0..3 + word % 7 {
            text.push(b'a' + (word % 26) as u8);
            word = word / 26 + word % 26 * 1000;
        }
        text.push(if generator.draw_below(11) == 0 {
            b'\n'
        } else {
            b' '
        });
    }
    text
}

/// Makes a compiler work: a C file of this many functions.
fn functions(count: usize) -> String {
    let mut text = String::new();
    for f in 0..count {
        text +=
            &format!("int f{f}(int *a, int n) {{ int s = {f}; for (int i = 1; i < n; i++) {{\n");
        text += &format!(
            "if (a[i] > s) s += a[i - 1] * {}; else a[i] ^= s >> {};\n",
            f % 13 + 1,
            f % 7 + 1
        );
        text += "switch (a[i] & 7) {\n";
        for c in 0..6 {
            text += &format!("case {c}: s = s * {} + a[i]; break;\n", c * f % 31 + 3);
        }
        text += "} } return s; }\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(kind: &str, size: &str) -> CorunProgram {
        CorunProgram {
            name: format!("{kind}-{size}"),
            command: vec!["kernels".to_string(), kind.to_string()],
            load: None,
            endless_command: Vec::new(),
            units: None,
            cause: "cache",
        }
    }

    /// Does a seed draw every kernel once before any twice, up to half installed ones, and the same programs each time?
    #[test]
    fn every_kernel_is_drawn_before_any_is_drawn_twice() {
        let kinds = ["chase", "stream", "bfs"];
        let own = kinds
            .iter()
            .flat_map(|kind| ["below", "near"].map(|size| workload(kind, size)));
        let set = CorunProgramSet {
            spinner: workload("spin", ""),
            own: own.collect(),
            installed: (0..9)
                .map(|index| workload(&format!("p{index}"), "x"))
                .collect(),
        };
        let names = |seed| -> Vec<String> {
            let chosen = set.choose(6, &mut SplitMix64::new(seed));
            chosen
                .into_iter()
                .map(|workload| workload.command[1].clone())
                .collect()
        };
        let mut drawn = names(1)[3..].to_vec();
        drawn.sort();
        assert_eq!(drawn, ["bfs", "chase", "stream"]);
        assert!(names(1)[..3].iter().all(|name| name.starts_with('p')));
        assert_eq!(names(1), names(1));
        assert_eq!(set.choose(100, &mut SplitMix64::new(1)).len(), 9 + 6);
    }
}
