//! The table of fuzz targets, one for each parser of untrusted input.

use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};

use cachemate_linux::act::colors::agents::AgentReport;
use cachemate_linux::act::colors::map::ColorMap;
use cachemate_linux::act::cpusets;
use cachemate_linux::act::resctrl::{self, Schemata};
use cachemate_linux::act::rules::{ManageAction, ManageRule};
use cachemate_linux::kernel::Kernel;
use cachemate_linux::kernel::process_events::parse_message;
use cachemate_linux::nri;
use cachemate_linux::safety::journal;
use cachemate_linux::safety::object_state;
use cachemate_linux::sense::births::BirthLedger;
use cachemate_linux::sense::events;
use cachemate_linux::sense::pressure;
use cachemate_linux::sense::sampling::{self, records};
use cachemate_linux::sense::service_directory::ServiceDirectory;
use cachemate_linux::sense::tasks;
use cachemate_linux::sense::topology;
use cachemate_trace::{CmtReader, Format, ProfileFile, RunLogReader, TraceReader, open_input};

use crate::host::InputHost;

/// Size to which inputs are truncated. Longer inputs add nothing, because no parser keeps more of its input in memory
/// than it has read.
pub const MAX_INPUT_BYTES: usize = 64 << 10;
const MIB: usize = 1 << 20;

/// One parser under test.
pub struct FuzzTarget {
    /// Name of the target in commands, and of its directory in the corpus.
    pub name: &'static str,
    /// Parses an input and drops the result.
    pub run: fn(&[u8]),
    /// Maximum memory in use at once for an input of [`MAX_INPUT_BYTES`]; memory of the decompressor itself is not
    /// counted.
    pub max_memory_bytes: usize,
    /// File or directory of the project whose files are additional inputs, beside the corpus.
    pub extra_dir: &'static str,
}

const fn new_target(
    name: &'static str,
    max_memory_mib: usize,
    run: fn(&[u8]),
    corpus_dir: &'static str,
) -> FuzzTarget {
    FuzzTarget {
        name,
        run,
        max_memory_bytes: max_memory_mib * MIB,
        extra_dir: corpus_dir,
    }
}

/// All targets.
pub const TARGETS: &[FuzzTarget] = &[
    new_target("trace", 32, fuzz_trace, ""),
    new_target("profile", 32, fuzz_profile, ""),
    new_target("run-log", 32, fuzz_run_log, ""),
    new_target(
        "configuration",
        32,
        fuzz_configuration,
        "packaging/cachemate.toml",
    ),
    new_target("machine", 64, fuzz_machine, "machines"),
    new_target("scenario", 64, fuzz_scenario, "scenarios"),
    new_target("matrix", 32, fuzz_matrix, ""),
    new_target("journal", 32, fuzz_journal, ""),
    new_target("host", 32, fuzz_host, "crates/linux/src/act/resctrl/trees"),
    new_target(
        "topology",
        32,
        fuzz_topology,
        "crates/linux/src/act/resctrl/trees",
    ),
    new_target("texts", 32, fuzz_texts, ""),
    new_target("samples", 32, fuzz_samples, ""),
    new_target("nri", 32, fuzz_container_runtime, ""),
    new_target("births", 32, fuzz_process_events, ""),
];

/// `None` if no target has this name.
pub fn find_target(name: &str) -> Option<&'static FuzzTarget> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Reads the initial inputs of a target: its directory of the corpus, and files elsewhere in the project.
///
/// # Errors
/// One of the files cannot be read.
pub fn read_corpus(target: &FuzzTarget) -> io::Result<Vec<Vec<u8>>> {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = crate_dir.join("corpus").join(target.name);
    let mut files = if cachemate_files::path_exists(&dir) {
        list_files(&dir)?
    } else {
        Vec::new()
    };
    if !target.extra_dir.is_empty() {
        files.extend(list_files(&crate_dir.join("../..").join(target.extra_dir))?);
    }
    let read_truncated = |file: PathBuf| {
        let mut bytes = Vec::new();
        cachemate_files::open_plain(&file)?
            .take(MAX_INPUT_BYTES as u64)
            .read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    files.into_iter().map(read_truncated).collect()
}

/// Lists the files of a directory by name; for a file, returns the file itself.
fn list_files(path: &Path) -> io::Result<Vec<PathBuf>> {
    if path.is_file() {
        return Ok(vec![path.to_path_buf()]);
    }
    let entries: io::Result<Vec<_>> = std::fs::read_dir(path)?.collect();
    let mut files: Vec<PathBuf> = entries?
        .into_iter()
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    Ok(files)
}

fn boxed_input(bytes: &[u8]) -> Box<dyn Read + Send> {
    Box::new(Cursor::new(bytes.to_vec()))
}

/// Maximum number of batches that are read. A compressed input may have millions, of which only one is in memory.
const MAX_BATCHES: usize = 64;

/// Reads a trace. The first byte selects the format; beyond the last format, name and content determine it.
fn fuzz_trace(bytes: &[u8]) {
    let Some((&choice, bytes)) = bytes.split_first() else {
        return;
    };
    let format = Format::ALL.get(usize::from(choice)).copied();
    let mut batch = Vec::new();
    if let Ok(mut reader) = open_input(boxed_input(bytes), "fuzzed", format) {
        for _ in 0..MAX_BATCHES {
            let Ok(true) = reader.read_batch(&mut batch) else {
                break;
            };
            assert!(!batch.is_empty(), "no batch before the end is empty");
        }
    }
    if let Ok(mut reader) = CmtReader::new(bytes, "fuzzed") {
        reader.salvage();
        for _ in 0..MAX_BATCHES {
            if !reader
                .read_batch(&mut batch)
                .expect("a salvaging reader does not fail on bytes in memory")
            {
                break;
            }
        }
    }
}

fn fuzz_profile(bytes: &[u8]) {
    ProfileFile::parse(bytes, "fuzzed").ok();
}

fn fuzz_run_log(bytes: &[u8]) {
    let Ok(mut log) = RunLogReader::new(boxed_input(bytes), "fuzzed") else {
        return;
    };
    while let Ok(Some(_)) = log.next_record() {}
}

fn fuzz_configuration(bytes: &[u8]) {
    let user = |name: &str| (name == "alice").then_some(1000);
    cachemate_spec::parse_manage_config("fuzzed", &String::from_utf8_lossy(bytes), &user).ok();
}

fn fuzz_machine(bytes: &[u8]) {
    if let Ok(machine) = cachemate_spec::parse_machine("fuzzed", &String::from_utf8_lossy(bytes)) {
        machine.topology();
    }
}

/// Reads a scenario. It may name a machine but not a path, because machine files are inputs of another target.
fn fuzz_scenario(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    cachemate_spec::parse_scenario("fuzzed", &text).ok();
}

fn fuzz_matrix(bytes: &[u8]) {
    cachemate_spec::parse_measured_matrix("fuzzed", &String::from_utf8_lossy(bytes)).ok();
}

/// Reads a journal's lines both as they are and with valid checksums, so that changes to a line reach the code behind
/// the checksum. The entries are then looked up on a host that has none of their objects.
fn fuzz_journal(bytes: &[u8]) {
    let path = Path::new("restore.journal");
    journal::parse(path, bytes).ok();
    let text = String::from_utf8_lossy(bytes);
    let summed = text.lines().map(|line| {
        let message = line
            .split_once(' ')
            .map_or(line, |(_, message_part)| message_part);
        format!(
            "{:016x} {message}\n",
            xxhash_rust::xxh3::xxh3_64(message.as_bytes())
        )
    });
    let Ok(recovered) = journal::parse(path, summed.collect::<String>().as_bytes()) else {
        return;
    };
    let empty_host = InputHost::new(b"");
    for (object, entry) in &recovered.entries {
        object_state::read_state(&empty_host, object).ok();
        object_state::write_state(&empty_host, object, &entry.original).ok();
        object_state::write_state(&empty_host, object, &entry.original).ok();
    }
}

/// Observes a synthetic `/proc` and sysfs twice, as the daemon does in its windows.
fn fuzz_host(bytes: &[u8]) {
    let fuzzed_host = InputHost::new(bytes);
    let rules = [
        ManageRule {
            command: Some("a*b?*".into()),
            action: ManageAction::Observe,
            ..ManageRule::default()
        },
        ManageRule {
            cgroup: Some("/a".into()),
            user: Some(5),
            pid: Some(5),
            ..ManageRule::default()
        },
        ManageRule {
            action: ManageAction::Manage(None),
            ..ManageRule::default()
        },
    ];
    let mut task_table = tasks::TaskTable::new(true);
    for now_ns in 0..2 {
        task_table.refresh(&fuzzed_host, &rules, now_ns).ok();
    }
    for task in task_table.tasks() {
        fuzzed_host.affinity(task.thread.tid).ok();
        fuzzed_host.scheduling(task.thread.tid).ok();
    }
    fuzzed_host.ticks_since_boot().ok();
    pressure::read(&fuzzed_host);
    sampling::find_facility(&fuzzed_host).ok();
    if let Some(cpusets) = cpusets::find_hierarchy(&fuzzed_host) {
        cpusets.control_file("/a/b").ok();
    }
    let empty_topology = cachemate_core::Topology::default();
    let host = topology::HostTopology {
        topology: empty_topology,
        kernel_cache_ids: Vec::new(),
        warnings: Vec::new(),
    };
    if let Ok(resctrl) = resctrl::find(&fuzzed_host, &host) {
        resctrl.partitions();
    }
}

/// Reads a synthetic sysfs from files below a directory, because the parser of the topology takes paths.
fn fuzz_topology(bytes: &[u8]) {
    let Ok(dir) = tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() {
        "/dev/shm"
    } else {
        "."
    }) else {
        return;
    };
    let fuzzed_host = InputHost::new(bytes);
    fuzzed_host.write_below(dir.path());
    if let Ok(host) = topology::read_topology(dir.path())
        && let Ok(resctrl) = resctrl::find(&fuzzed_host, &host)
    {
        resctrl.partitions();
        resctrl.bandwidth_limits();
        resctrl.describe_ways().ok();
        resctrl::list_monitor_groups(&fuzzed_host, &resctrl.mount).ok();
    }
}

/// Reads texts that have parsers of their own.
fn fuzz_texts(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    events::Processor::parse(&text);
    Schemata::parse(&text).ok();
    ColorMap::parse(&text).ok();
    text.parse::<cachemate_core::CpuSet>().ok();
    cachemate_core::service_of_cgroups(&text);
    // A partially written status is read again for some time, so only complete statuses and refusals are tested here.
    if text.starts_with("refused ") || text.starts_with("turn ") && text.trim_end().ends_with(" 1")
    {
        let host = InputHost::new(format!("==> /a/status <==\n{text}").as_bytes());
        AgentReport::read(&host, Path::new("/a")).ok();
    }
}

/// Reads a ring buffer of sampled accesses in the kernel's format.
fn fuzz_samples(bytes: &[u8]) {
    let mut ring_contents = records::RingContents::default();
    let (tail, head) = (bytes.len() as u64 / 3, bytes.len() as u64);
    records::parse_samples(&records::unroll_ring(bytes, tail, head), &mut ring_contents);
    records::parse_samples(bytes, &mut ring_contents);
    for sample in &ring_contents.samples {
        records::decode_source(sample.data_source);
    }
}

/// Reads the container runtime's messages to the plugin, split in two as a socket may split them.
fn fuzz_container_runtime(bytes: &[u8]) {
    let mut plugin = nri::NriPlugin::new(ServiceDirectory::default());
    let mut reader = nri::wire::MessageReader::default();
    let (first, second) = bytes.split_at(bytes.len() / 3);
    for part in [first, second] {
        let Ok(messages) = reader.push(part) else {
            return;
        };
        for message in messages {
            plugin.handle(&message).ok();
        }
    }
    nri::wire::parse_fields(bytes).ok();
}

/// Records the kernel's messages about processes: each begins with a byte for its length.
fn fuzz_process_events(bytes: &[u8]) {
    let mut ledger = BirthLedger::default();
    ledger.add_listed([], true);
    let mut remaining_bytes = bytes;
    while let Some((&length, following_bytes)) = remaining_bytes.split_first() {
        let (message, other_messages) =
            following_bytes.split_at(following_bytes.len().min(length.into()));
        parse_message(message)
            .into_iter()
            .for_each(|event| ledger.record(event));
        remaining_bytes = other_messages;
    }
    ledger.take_ended_leaders();
    ledger.take_ended_unread();
    ledger
        .unread_pids()
        .into_iter()
        .for_each(|pid| ledger.remove_unread(pid));
    ledger.finish_refresh();
}
