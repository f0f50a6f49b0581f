use std::num::NonZeroU16;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use cachemate_core::InstructionTiming;

use super::*;
use crate::CmtReader;

fn run(recorder: &Recorder) -> RecordingSummary {
    try_run(recorder).unwrap()
}

/// The message of a recording that fails.
fn failure(recorder: &Recorder) -> String {
    try_run(recorder).unwrap_err().to_string()
}

fn try_run(recorder: &Recorder) -> Result<RecordingSummary, TraceError> {
    let tool = find_recorder_tool()
        .expect("these tests record real programs: install the package 'valgrind'");
    assert!(
        matches!(tool, RecorderTool::Tool { .. }),
        "the recorder must build here: {tool:?}"
    );
    recorder.run_with(&tool, &AtomicBool::new(false), |_| {})
}

fn split_words(text: &str) -> Vec<String> {
    text.split(' ').map(String::from).collect()
}

fn quiet_recorder(command: Vec<String>, output: &Path) -> Recorder {
    Recorder {
        discards_output: (true, true),
        ..Recorder::new(command, output)
    }
}

fn read(path: &Path) -> (Vec<AccessRecord>, TraceTotals) {
    let mut reader = CmtReader::open(path).unwrap();
    let (mut records, mut batch) = (Vec::new(), Vec::new());
    while reader.read_batch(&mut batch).unwrap() {
        records.extend_from_slice(&batch);
    }
    (records, reader.totals().unwrap().clone())
}

/// A C program compiled into `dir`.
fn compile_program(dir: &Path, source: &str) -> String {
    let (from, to) = (dir.join("program.c"), dir.join("program"));
    std::fs::write(&from, source).unwrap();
    let status = Command::new("cc")
        .args(["-O1", "-pthread", "-o"])
        .args([&to, &from])
        .status()
        .unwrap();
    assert!(status.success());
    to.display().to_string()
}

/// Do the recorded L1 misses, accesses and instructions of a single-threaded program agree with cachegrind's?
#[test]
fn l1_misses_of_gzip_agree_with_cachegrind() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("in.txt");
    let lines: String = (0..30_000u64)
        .map(|i| format!("{} {}\n", i, i.wrapping_mul(2654435761) % 1000))
        .collect();
    std::fs::write(&input, lines).unwrap();
    let command = vec![
        "gzip".to_string(),
        "-c".to_string(),
        input.display().to_string(),
    ];
    let out = dir.path().join("gzip.cmt");
    let recorded = run(&quiet_recorder(command.clone(), &out));
    let (records, totals) = read(&out);
    assert_eq!(records.len() as u64, totals.records);
    assert_eq!(recorded.recording_end, RecordingEnd::Exit(0));

    let numbers = dir.path().join("cachegrind");
    let status = Command::new("valgrind")
        .args([
            "-q",
            "--tool=cachegrind",
            "--cache-sim=yes",
            "--D1=32768,8,64",
        ])
        .arg(format!("--cachegrind-out-file={}", numbers.display()))
        .args(&command)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    assert!(status.unwrap().success());
    let text = std::fs::read_to_string(&numbers).unwrap();
    let find_row = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap()
            .trim()
            .to_string()
    };
    let (events, summary) = (find_row("events:"), find_row("summary:"));
    let event_total = |event: &str| {
        let index = events.split(' ').position(|name| name == event).unwrap();
        summary
            .split(' ')
            .nth(index)
            .unwrap()
            .parse::<f64>()
            .unwrap()
    };
    let assert_close = |ours: f64, theirs: f64, subject: &str| {
        assert!(
            (ours / theirs - 1.0).abs() < 0.005,
            "{subject}: {ours} against cachegrind's {theirs}"
        );
    };
    assert_close(
        totals.records as f64,
        event_total("D1mr") + event_total("D1mw"),
        "L1 misses",
    );
    assert_close(
        totals.program_accesses.unwrap() as f64,
        event_total("Dr") + event_total("Dw"),
        "data accesses",
    );
    assert_close(
        totals.instructions.unwrap() as f64,
        event_total("Ir"),
        "instructions",
    );
}

/// Does a window contain exactly the specified accesses of the whole recording, and end as requested?
#[test]
fn a_window_is_a_slice_of_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, window) = (dir.path().join("whole.cmt"), dir.path().join("part.cmt"));
    let unfiltered_run = Recorder {
        filter: None,
        ..quiet_recorder(split_words("true"), &whole)
    };
    run(&unfiltered_run);
    let part = Recorder {
        output: window.clone(),
        skip_accesses: 5_000,
        max_accesses: Some(7_000),
        ..unfiltered_run
    };
    let recorded = run(&part);
    assert_eq!(recorded.recording_end, RecordingEnd::Exit(0));
    let ((whole, totals), (part, part_totals)) = (read(&whole), read(&window));
    assert_eq!(totals.program_accesses, Some(totals.records));

    assert_eq!(
        totals
            .instructions
            .map(|sum| sum >= whole.iter().map(|record| record.gap).sum()),
        Some(true)
    );
    assert_eq!(
        (part_totals.program_accesses, part_totals.records),
        (Some(7_000), 7_000)
    );
    // The length of the longer options shifts the stack; kinds, sizes and gaps stay the same.
    let shape_of = |records: &[AccessRecord]| {
        records
            .iter()
            .map(|r| (r.gap, r.size, r.store))
            .collect::<Vec<_>>()
    };
    assert_eq!(shape_of(&part[1..]), shape_of(&whole[5_001..12_000]));
}

/// Is the child's status separate from the recorder's success, for exits, signals and programs that cannot start?
#[test]
fn the_childs_status_is_separate_from_the_recorders_success() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.cmt");
    let shell_command = |text: &str| vec!["sh".to_string(), "-c".to_string(), text.to_string()];
    let forced_recorder = |command| Recorder {
        force: true,
        ..quiet_recorder(command, &out)
    };
    assert_eq!(
        run(&forced_recorder(shell_command("exit 3"))).recording_end,
        RecordingEnd::Exit(3)
    );
    let killed = run(&forced_recorder(shell_command("kill -TERM $$")));
    assert_eq!(
        (killed.recording_end, killed.totals.ended),
        (RecordingEnd::Signal(15), Some("signal 15".into()))
    );
    let error = quiet_recorder(split_words("true"), &out)
        .run(&AtomicBool::new(false), |_| {})
        .unwrap_err();
    assert!(matches!(error, TraceError::Exists { .. }), "{error}");
    let missing = forced_recorder(split_words("no-such-program-xyz"))
        .run(&AtomicBool::new(false), |_| {})
        .unwrap_err();
    assert_eq!(
        missing.to_string(),
        "no-such-program-xyz: no such program in PATH"
    );
    assert_eq!(
        read(&out).1.ended,
        Some("signal 15".into()),
        "a failed recording leaves the old file alone"
    );
}

/// Does an interrupt stop an endless program and keep the recorded part?
#[test]
fn an_interrupt_keeps_the_recorded_part() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.cmt");
    let recorder = quiet_recorder(
        vec!["sh".into(), "-c".into(), "while :; do :; done".into()],
        &out,
    );
    let recorder = Recorder {
        filter: None,
        ..recorder
    };
    let interrupt = AtomicBool::new(false);
    let recorded = recorder.run(&interrupt, |so_far| {
        if so_far.records > 200_000 {
            interrupt.store(true, Ordering::Relaxed);
        }
    });
    let recorded = recorded.unwrap();
    assert_eq!(recorded.recording_end, RecordingEnd::Interrupted);
    let (records, totals) = read(&out);
    assert!(records.len() > 200_000 && totals.ended.as_deref() == Some("interrupted"));
}

/// Are threads distinguished although their ids are reused, and does a store remove the line from the others' filters?
#[test]
fn threads_are_distinguished_and_stores_invalidate_others_lines() {
    let dir = tempfile::tempdir().unwrap();
    let program = compile_program(
        dir.path(),
        "#include <pthread.h>\n\
         static volatile long shared[8] __attribute__((aligned(64)));\n\
         static pthread_barrier_t turn;\n\
         static void *writer(void *x) { for (int i = 0; i < 100; i++) { pthread_barrier_wait(&turn); shared[0] = i;\n\
           pthread_barrier_wait(&turn); } return 0; }\n\
         static void *nothing(void *x) { return 0; }\n\
         int main() { pthread_t t; long sum = 0; pthread_barrier_init(&turn, 0, 2);\n\
           pthread_create(&t, 0, writer, 0);\n\
           for (int i = 0; i < 100; i++) { pthread_barrier_wait(&turn); pthread_barrier_wait(&turn); sum += shared[0]; }\n\
           pthread_join(t, 0);\n\
           for (int i = 0; i < 3; i++) { pthread_create(&t, 0, nothing, 0); pthread_join(t, 0); }\n\
           return sum != 4950; }\n",
    );
    let out = dir.path().join("x.cmt");
    assert_eq!(
        run(&quiet_recorder(vec![program], &out)).recording_end,
        RecordingEnd::Exit(0)
    );
    let (records, totals) = read(&out);
    assert_eq!(
        totals.threads.len(),
        5,
        "main, the writer, and three that had one id after another"
    );
    // The busiest line shared by both threads is `shared`: the main thread misses it once per round. The writer's
    // stores hit its own filter, but are recorded anyway, because the main thread has the line as well.
    let mut lines = std::collections::BTreeMap::<u64, [u32; 2]>::new();
    for record in records
        .iter()
        .filter(|record| record.thread < 2 && record.store == (record.thread == 1))
    {
        lines.entry(record.address >> 6).or_default()[record.thread as usize] += 1;
    }
    let per_round = lines
        .values()
        .filter(|counts| counts.iter().all(|count| (95..=105).contains(count)))
        .count();
    assert!(
        per_round >= 1,
        "{:?}",
        lines
            .values()
            .filter(|counts| counts[0] > 20)
            .collect::<Vec<_>>()
    );
}

/// Does each load of two interleaved pointer chases name the one before it in its own chase, two records back, at one
/// instruction per chase: if the pointer is all that a node has, if something else of the node is read first, so that the
/// pointer comes from a line on its way, and if the pointers are kept in memory?
#[test]
fn an_address_names_the_load_from_which_it_was_computed() {
    let loops = [
        "a = a->next; b = b->next;",
        "sum += a->value; sum += b->value; a = a->next; b = b->next;",
        "sum += kept[0]->value; sum += kept[1]->value; kept[0] = kept[0]->next; kept[1] = kept[1]->next;",
    ];
    for body in loops {
        let dir = tempfile::tempdir().unwrap();
        let source = format!(
            "typedef struct node {{ struct node *next; long value, rest[6]; }} node;\n\
             static node nodes[32768];\n\
             int main() {{ unsigned count = 32768; volatile long sum = 0;\n\
               for (unsigned i = 0; i < count; i++) nodes[i].next = &nodes[(i + 9973) % count];\n\
               node *a = &nodes[0], *b = &nodes[count / 2], *volatile kept[2] = {{a, b}};\n\
               for (unsigned i = 0; i < count; i++) {{ {body} }}\n\
               return a == b || kept[0] == kept[1]; }}\n"
        );
        let program = compile_program(dir.path(), &source);
        let out = dir.path().join("x.cmt");
        let summary = run(&quiet_recorder(vec![program], &out));
        assert!(summary.header.has_dependences);
        let (records, _) = read(&out);
        let mut loads_by_site = std::collections::BTreeMap::<Option<NonZeroU16>, u32>::new();
        for record in records
            .iter()
            .filter(|record| !record.store && record.dependence == 2)
        {
            *loads_by_site.entry(record.site).or_default() += 1;
        }
        let busy_sites: Vec<u32> = loads_by_site
            .values()
            .copied()
            .filter(|count| *count > 1000)
            .collect();
        assert_eq!(busy_sites.len(), 2, "{body} {loads_by_site:?}");
        assert!(
            busy_sites
                .iter()
                .all(|count| (32_000..33_000).contains(count)),
            "{body} {busy_sites:?}"
        );
    }
}

/// Loops of which the cycles and the mispredicted branches follow from their code: six dependent multiplications, twice three
/// that do not wait for each other, a counter in memory, functions of a line each, called at random out of 64 or 4,096, and a branch
/// on a bit of a generator or on every second step.
const CORE_SOURCE: &str = r#"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
extern char functions[];
__asm__(".text\n.p2align 6\nfunctions:\n.rept 4096\nmovl $1,%eax\nret\n.p2align 6\n.endr\n");
int main(int count, char **words) {
    const char *kind = words[1];
    uint64_t n = 20000000, a = 3, b = 5;
    volatile uint64_t taken = 0;
    if (!strcmp(kind, "chain"))
        for (uint64_t i = 0; i < n; i++)
            __asm__ volatile("imul %0,%0\n imul %0,%0\n imul %0,%0\n imul %0,%0\n imul %0,%0\n imul %0,%0" : "+r"(a));
    else if (!strcmp(kind, "two-chains"))
        for (uint64_t i = 0; i < n; i++)
            __asm__ volatile("imul %0,%0\n imul %1,%1\n imul %0,%0\n imul %1,%1\n imul %0,%0\n imul %1,%1"
                             : "+r"(a), "+r"(b));
    else if (!strcmp(kind, "little-code") || !strcmp(kind, "much-code")) {
        uint64_t mask = strcmp(kind, "much-code") ? 63 : 4095;
        for (uint64_t i = 0; i < n / 5; i++) {
            a = a * 6364136223846793005u + 1442695040888963407u;
            b += ((int (*)(void))(functions + 64 * ((a >> 40) & mask)))();
        }
    }
    else if (!strcmp(kind, "memory"))
        for (uint64_t i = 0; i < n; i++)
            taken++;
    else if (!strcmp(kind, "random-loads") || !strcmp(kind, "steady-loads")) {
        uint64_t lines = 1 << 16, bit = strcmp(kind, "random-loads") ? 2 : 1;
        uint64_t *table = calloc(8 * lines, 8);
        for (uint64_t i = 0; i < 8 * lines; i++) {
            a = a * 6364136223846793005u + 1442695040888963407u;
            table[i] = a >> 63;
        }
        for (uint64_t i = 0; i < n / 5; i++) {
            a = a * 6364136223846793005u + 1442695040888963407u;
            if (table[a >> 45] & bit) __asm__ volatile("nop; nop" ::: "memory");
        }
    } else if (!strcmp(kind, "random"))
        for (uint64_t i = 0; i < n; i++) {
            a = a * 6364136223846793005u + 1442695040888963407u;
            if (a >> 63) __asm__ volatile("nop; nop" ::: "memory");
        }
    else
        for (uint64_t i = 0; i < n; i++) {
            a = a * 6364136223846793005u + 1442695040888963407u;
            if (i & 1) __asm__ volatile("nop; nop" ::: "memory");
        }
    return (int)((a + b) & 0);
}
"#;

/// Is a load whose random value decides a branch one that mispredicted branches wait for half of the time, and one whose
/// value decides nothing never?
#[test]
fn branches_wait_for_the_loads_that_decide_them() {
    let dir = tempfile::tempdir().unwrap();
    let program = compile_program(dir.path(), CORE_SOURCE);
    for (kind, expected) in [("random-loads", 0.5), ("steady-loads", 0.0)] {
        let out = dir.path().join(format!("{kind}.cmt"));
        run(&quiet_recorder(
            vec![program.clone(), kind.to_string()],
            &out,
        ));
        let core = read(&out).1.core;
        let busiest = core.branch_loads.iter().max_by_key(|loads| loads.loads);
        let busiest = busiest.expect("some loads missed the filter in samples");
        assert!(busiest.loads > 1000, "{kind}: {busiest:?}");
        let share = core.waited_share(busiest.site);
        assert!((share - expected).abs() < 0.1, "{kind}: {busiest:?}");
    }
}

/// Do loops take the cycles of their chains, and are branches on random bits mispredicted half of the time, those that
/// alternate hardly ever?
#[test]
fn instructions_take_the_cycles_of_their_chains_and_branches() {
    let dir = tempfile::tempdir().unwrap();
    let program = compile_program(dir.path(), CORE_SOURCE);
    let timing_of = |kind: &str| {
        let out = dir.path().join(format!("{kind}.cmt"));
        run(&quiet_recorder(
            vec![program.clone(), kind.to_string()],
            &out,
        ));
        let mut timing = InstructionTiming::default();
        let totals = read(&out).1;
        totals
            .core
            .stretches
            .iter()
            .for_each(|stretch| timing.add(&stretch.timing));
        assert!(timing.instructions > 30_000, "{kind}: {timing:?}");
        timing
    };

    // The first samples are the start of the program, with branches of its own.
    // Of 8 instructions a round (six, and two that count), a chain of 18 cycles, and two of 9 beside each other.
    let per_round = |timing: &InstructionTiming, instructions: f64, window: usize| {
        timing.cycles[window] as f64 / timing.instructions as f64 * instructions
    };
    let assert_near = |found: f64, expected: f64, subject: &str| {
        assert!(
            (found / expected - 1.0).abs() < 0.1,
            "{subject}: {found}, expected {expected}"
        );
    };
    for (kind, cycles) in [("chain", 18.0), ("two-chains", 9.0)] {
        let timing = timing_of(kind);
        assert_near(per_round(&timing, 8.0, 2), cycles, kind);
        assert!(
            timing.mispredicted * 300 < timing.instructions,
            "{timing:?}"
        );
    }
    // The store hands its value to the next round's load: five cycles, and one for the sum.
    let timing = timing_of("memory");
    let cycles_per_instr = timing.cycles[4] as f64 / timing.instructions as f64;
    assert!((1.0..2.5).contains(&cycles_per_instr), "{timing:?}");

    // A call in 10 to 16 instructions finds one in eight of 4,096 lines in a cache of 512, or each of 64.
    let unfetched_per_kilo = |kind: &str| {
        let timing = timing_of(kind);
        let unfetched = timing.unfetched.expect("this recorder counts them");
        1000.0 * unfetched as f64 / timing.instructions as f64
    };
    let (much, little) = (
        unfetched_per_kilo("much-code"),
        unfetched_per_kilo("little-code"),
    );
    assert!(
        (50.0..95.0).contains(&much) && little < 1.0,
        "{much} {little}"
    );

    let random = timing_of("random");
    let alternating = timing_of("alternating");
    let per_kilo = |timing: &InstructionTiming| {
        1000.0 * timing.mispredicted as f64 / timing.instructions as f64
    };
    // One branch in five to eight instructions is random.
    assert!((55.0..110.0).contains(&per_kilo(&random)), "{random:?}");
    assert!(per_kilo(&alternating) < 5.0, "{alternating:?}");
}

/// Does a loop that jumps to itself, whose translation runs on after it was discarded, survive the approach to the end of
/// the window, with as many accesses as were asked for?
#[test]
fn a_loop_that_jumps_to_itself_survives_the_end_of_the_window() {
    let dir = tempfile::tempdir().unwrap();
    let source = "static double a[1 << 20], b[1 << 20];\n\
        int main(void) { double *volatile from = a, *volatile to = b; double sum = 0;\n\
        for (int pass = 0; pass < 24; pass++) { double *x = from, *y = to;\n\
        for (long i = 0; i < 1 << 20; i++) y[i] += 3 * x[i];\n sum += y[pass]; }\n\
        return sum < 0; }\n";
    let program = compile_program(dir.path(), source);
    let out = dir.path().join("loop.cmt");
    let recorder = Recorder {
        max_accesses: Some(40_000_000),
        ..quiet_recorder(vec![program], &out)
    };
    let summary = run(&recorder);
    assert_eq!(summary.recording_end, RecordingEnd::Exit(0));
    assert_eq!(read(&out).1.program_accesses, Some(40_000_000));
}

/// Do the numbers in the order of creation and the kernel's ids belong to the same threads, whichever makes records
/// first?
#[test]
fn threads_keep_their_creation_order_and_kernel_ids() {
    let dir = tempfile::tempdir().unwrap();
    let (out, ids) = (dir.path().join("x.cmt"), dir.path().join("ids"));
    let program = compile_program(
        dir.path(),
        "#define _GNU_SOURCE\n\
         #include <pthread.h>\n#include <stdio.h>\n#include <unistd.h>\n#include <sys/syscall.h>\n\
         static long id[4]; static pthread_t t[4]; static volatile long data[4][4096]; static pthread_barrier_t all;\n\
         static void *work(void *x) { long me = (long)x; id[me] = syscall(SYS_gettid); pthread_barrier_wait(&all);\n\
           if (me < 3) pthread_join(t[me + 1], 0);\n\
           for (int i = 0; i < 4096; i++) data[me][i] = i; return 0; }\n\
         int main(int n, char **a) { pthread_barrier_init(&all, 0, 4); id[0] = syscall(SYS_gettid);\n\
           for (long i = 1; i < 4; i++) pthread_create(&t[i], 0, work, (void *)i);\n\
           pthread_barrier_wait(&all); pthread_join(t[1], 0);\n\
           FILE *f = fopen(a[1], \"w\"); for (int i = 0; i < 4; i++) fprintf(f, \"%ld\\n\", id[i]); return fclose(f); }\n",
    );
    let recorder = quiet_recorder(vec![program, ids.display().to_string()], &out);
    assert_eq!(run(&recorder).recording_end, RecordingEnd::Exit(0));
    let totals = read(&out).1;
    let expected_ids: Vec<u32> = std::fs::read_to_string(&ids)
        .unwrap()
        .lines()
        .map(|line| line.parse().unwrap())
        .collect();
    let mut threads: Vec<_> = totals
        .threads
        .iter()
        .map(|of| (of.created.unwrap(), of.os_thread.unwrap()))
        .collect();
    threads.sort_unstable();
    assert_eq!(
        threads,
        (0..4).zip(expected_ids).collect::<Vec<(u32, u32)>>()
    );
}

/// Are children left unrecorded and named, or recorded as separate processes, as requested?
#[test]
fn children_are_left_unrecorded_or_recorded_separately() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.cmt");
    let command = vec![
        "sh".to_string(),
        "-c".to_string(),
        "ls / >/dev/null; (true); exit 2".to_string(),
    ];
    let recorder = Recorder {
        force: true,
        ..quiet_recorder(command, &out)
    };
    let recorded = run(&recorder);
    assert_eq!(
        (recorded.recording_end, recorded.totals.processes.len()),
        (RecordingEnd::Exit(2), 1)
    );
    assert_eq!(recorded.note, None);
    let compiler = "i=0; while [ $i -lt 1000000 ]; do i=$((i+1)); done";
    let command = format!("env sh -c '{compiler}'; exit 0");
    let note = run(&Recorder {
        command: vec!["sh".to_string(), "-c".to_string(), command],
        ..recorder.clone()
    })
    .note
    .unwrap();
    let named = "not in the file (sh: 1 process, ";
    assert!(note.contains(named) && note.contains("): follow"), "{note}");
    let replaced = vec!["sh".to_string(), "-c".to_string(), "exec true".to_string()];
    let note = run(&Recorder {
        command: replaced,
        ..recorder.clone()
    })
    .note
    .unwrap();
    assert!(note.contains("replaced itself"), "{note}");
    let recorded = run(&Recorder {
        children: ChildProcesses::Follow,
        ..recorder
    });
    assert_eq!(recorded.recording_end, RecordingEnd::Exit(2));
    let (records, totals) = read(&out);
    let commands: Vec<&str> = totals
        .processes
        .iter()
        .map(|process| process.command[0].as_str())
        .collect();
    assert!(
        commands.len() >= 3 && commands.iter().any(|name| name.ends_with("ls")),
        "{commands:?}"
    );
    for thread in &totals.threads {
        let is_of_thread = |record: &&AccessRecord| record.thread == thread.thread;
        assert!(
            records
                .iter()
                .filter(is_of_thread)
                .all(|record| recorded.header.process_of(record) == thread.process)
        );
    }
}

/// Does lackey, the fallback, give the same accesses without a filter and with one thread?
#[test]
fn lackey_records_the_same_accesses() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, lackeys) = (dir.path().join("ours.cmt"), dir.path().join("lackeys.cmt"));
    run(&Recorder {
        filter: None,
        ..quiet_recorder(split_words("true"), &ours)
    });
    let lackey = RecorderTool::Lackey {
        valgrind: "valgrind".into(),
        reason: "a test".into(),
    };
    let recorder = quiet_recorder(split_words("true"), &lackeys);
    let recorded = recorder
        .run_with(&lackey, &AtomicBool::new(false), |_| {})
        .unwrap();
    assert!(
        recorded
            .note
            .is_some_and(|note| note.contains("without the L1 filter"))
    );
    assert_eq!(
        (recorded.recording_end, recorded.header.filter),
        (RecordingEnd::Exit(0), None)
    );
    let ((ours, totals), (lackeys, lackey_totals)) = (read(&ours), read(&lackeys));
    let is_near = |a: u64, b: u64| (a as f64 / b as f64 - 1.0).abs() < 0.02;
    assert!(
        is_near(ours.len() as u64, lackeys.len() as u64),
        "{} {}",
        ours.len(),
        lackeys.len()
    );
    let instructions = (
        totals.instructions.unwrap(),
        lackey_totals.instructions.unwrap(),
    );
    assert!(is_near(instructions.0, instructions.1), "{instructions:?}");
}

/// Are parts of a run that lackey cannot tell apart refused: children, bursts and time?
#[test]
fn lackey_refuses_children_bursts_and_time() {
    let dir = tempfile::tempdir().unwrap();
    let lackey = RecorderTool::Lackey {
        valgrind: "valgrind".into(),
        reason: "a test".into(),
    };
    let changes: [fn(&mut Recorder); 3] = [
        |recorder| recorder.children = ChildProcesses::Follow,
        |recorder| recorder.skip_time = Duration::from_secs(1),
        |recorder| {
            recorder.bursts = Some(BurstSampling {
                accesses: 1,
                percent: 1,
            })
        },
    ];
    for change in changes {
        let mut recorder = quiet_recorder(split_words("true"), &dir.path().join("a.cmt"));
        change(&mut recorder);
        let result = recorder.run_with(&lackey, &AtomicBool::new(false), |_| {});
        let message = result.unwrap_err().to_string();
        assert!(message.contains("need cachemate's own tool"), "{message}");
    }
}

/// Does a recording by lackey end at its maximum size, and its program too if that is asked for?
#[test]
fn a_lackey_recording_keeps_its_maximum_size() {
    let dir = tempfile::tempdir().unwrap();
    let lines_path = dir.path().join("lines");
    std::fs::write(&lines_path, "I 400,3\n L 1ffe80,8\n".repeat(200_000)).unwrap();
    for kill_at_max in [false, true] {
        let recorder = Recorder {
            max_bytes: 1,
            kill_at_max,
            ..quiet_recorder(split_words("true"), &dir.path().join("a.cmt"))
        };
        let interrupt = AtomicBool::new(false);
        let child = Command::new("true").spawn().unwrap();
        let input = File::open(&lines_path).unwrap();
        let mut fifo = FifoReader::new(input, child, &interrupt, false);
        let out = BufWriter::new(tempfile::tempfile().unwrap());
        let header = TraceHeader::for_import("lackey", true);
        let mut writer = CmtWriter::new(out, "a.cmt", &header, 1).unwrap();
        let capture = recorder.capture_lackey(&mut fifo, &mut writer, &mut |_| {});
        let capture = capture.unwrap();
        assert!(capture.is_full && capture.is_max_reached);
        let records = writer.records();
        assert!(records < 100_000, "{records}");
        assert_eq!(capture.totals.instructions, Some(records));
        assert_eq!(fifo.is_stop_requested, kill_at_max);
    }
}

/// Does a program run to its end around a part limited by time, which contains less than the whole, and around a file
/// that is full?
#[test]
fn a_part_by_time_or_size_lets_the_program_run_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let count = "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done; exit 7";
    let record = |name: &str| {
        quiet_recorder(
            vec!["sh".into(), "-c".into(), count.into()],
            &dir.path().join(name),
        )
    };
    let unfiltered_recorder = |name: &str| Recorder {
        filter: None,
        ..record(name)
    };
    let whole_recording = run(&unfiltered_recorder("all.cmt"));
    let program_accesses = |recorded: &RecordingSummary| recorded.totals.program_accesses.unwrap();
    let late = run(&Recorder {
        skip_time: Duration::from_millis(5),
        ..unfiltered_recorder("late.cmt")
    });

    let short = run(&Recorder {
        max_time: Some(Duration::from_millis(5)),
        ..unfiltered_recorder("short.cmt")
    });
    let full = run(&Recorder {
        max_bytes: 20_000,
        ..unfiltered_recorder("full.cmt")
    });
    for part in [&late, &short, &full] {
        assert_eq!(part.recording_end, RecordingEnd::Exit(7));
        assert!(
            program_accesses(part) > 0
                && program_accesses(part) < program_accesses(&whole_recording),
            "{} of {}",
            program_accesses(part),
            program_accesses(&whole_recording)
        );
    }
    assert!(
        full.note.unwrap().contains("maximum size") && late.note.is_none() && short.note.is_none()
    );
    let (records, totals) = read(&dir.path().join("full.cmt"));
    assert_eq!(records.len() as u64, totals.records);
    let never = failure(&Recorder {
        skip_time: Duration::from_secs(3600),
        ..record("never.cmt")
    });
    assert!(never.contains("never.cmt: nothing was recorded"), "{never}");
    assert!(never.contains("within the part to skip"), "{never}");
    assert!(!dir.path().join("never.cmt").exists() && !dir.path().join("never.cmt.part").exists());
    let killed = run(&Recorder {
        max_bytes: 20_000,
        kill_at_max: true,
        force: true,
        ..unfiltered_recorder("full.cmt")
    });
    assert_eq!(killed.recording_end, RecordingEnd::AtMax);
}

/// Are bursts a part of the run that is marked in the file, does the program run to its end, and does a program that is too
/// short for a burst say so?
#[test]
fn bursts_are_marked_and_the_program_runs_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let count = "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done; exit 7";
    let whole = quiet_recorder(
        vec!["sh".into(), "-c".into(), count.into()],
        &dir.path().join("whole.cmt"),
    );
    let bursts = Some(BurstSampling {
        accesses: 400_000,
        percent: 10,
    });
    let part = Recorder {
        bursts,
        output: dir.path().join("part.cmt"),
        ..whole.clone()
    };
    let (whole, part) = (run(&whole), run(&part));
    assert_eq!(
        (whole.recording_end, part.recording_end),
        (RecordingEnd::Exit(7), RecordingEnd::Exit(7))
    );
    let share = part.totals.program_accesses.unwrap() as f64
        / whole.totals.program_accesses.unwrap() as f64;
    assert!((0.03..0.3).contains(&share), "{share}");
    let (records, totals) = read(&dir.path().join("part.cmt"));
    assert!(
        totals.bursts.len() > 2 && totals.bursts.is_sorted() && totals.bursts[0] == 0,
        "{:?}",
        totals.bursts
    );
    assert!(
        totals
            .bursts
            .iter()
            .all(|start| *start <= records.len() as u64)
    );
    let short = failure(&Recorder {
        bursts,
        ..quiet_recorder(split_words("true"), &dir.path().join("short.cmt"))
    });
    assert!(short.contains("before the first burst"), "{short}");
    assert!(!dir.path().join("short.cmt").exists());
}

/// Is a program whose code is so large that translating it takes longer than running it recorded no slower in bursts than as
/// a whole, and is what it does between them left out?
#[test]
fn bursts_of_a_program_with_large_code_cost_no_more_than_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let functions: String = (0..6000)
        .map(|n| {
            format!(
                "static int f{n}(int x) {{ a[(x + {n}) & 1023] += x; return a[(x ^ {n}) & 1023] * 3 + x % {}; }}\n",
                n + 3
            )
        })
        .collect();
    let names: String = (0..6000).map(|n| format!("f{n},")).collect();
    let source = format!(
        "static int a[1024];\n{functions}static int (*all[])(int) = {{{names}}};\nint main(void) {{ int x = 1;\n\
         for (int round = 0; round < 300; round++) for (int n = 0; n < 6000; n++) x = all[n](x);\nreturn x == 12345; }}\n"
    );
    let program = compile_program(dir.path(), &source);
    let record = |name: &str, bursts: Option<BurstSampling>| {
        let recorder = Recorder {
            bursts,
            ..quiet_recorder(vec![program.clone()], &dir.path().join(name))
        };
        let start = std::time::Instant::now();
        let summary = run(&recorder);
        (
            start.elapsed(),
            summary.totals.program_accesses.unwrap() as f64,
        )
    };
    let (whole_time, whole_accesses) = record("whole.cmt", None);
    let bursts = BurstSampling {
        accesses: 200_000,
        percent: 10,
    };
    let (burst_time, burst_accesses) = record("bursts.cmt", Some(bursts));
    let share = burst_accesses / whole_accesses;
    assert!((0.03..0.3).contains(&share), "{share}");
    // Bursts that translate everything twice take four times as long; another program may have run meanwhile.
    assert!(
        burst_time < whole_time.mul_f64(1.8),
        "{burst_time:?}, as a whole {whole_time:?}"
    );
}
