//! CPUs and the caches that they share, as the kernel reports them in sysfs.
//!
//! Problem: machines differ in what they report. Cache ids are neither dense nor unique (they come from APIC ids, and
//! gaps open when CPUs go offline), a socket may have many last-level caches, old kernels have only hexadecimal maps,
//! virtual machines leave out whole directories. Method: sysfs is read CPU by CPU; a cache is identified by its level
//! and the set of online CPUs that share it, never by its id; missing information becomes a warning and the weakest
//! true claim (a CPU whose caches are unknown is assumed to share none). Properties: read-only; every path is below
//! `root`; an existing file that cannot be understood is an error that names it, but a missing file is not; CPUs are in
//! the kernel's order, caches are ordered by level and first CPU.
//!
//! Kernel documentation: Documentation/ABI/stable/sysfs-devices-system-cpu, Documentation/admin-guide/cputopology.rst.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use cachemate_core::{Cache, CacheId, CacheLevel, Cpu, CpuId, CpuSet, Topology};

/// The kernel's report on its CPUs and caches.
#[derive(Clone, PartialEq, Debug)]
pub struct HostTopology {
    /// CPUs in ascending order, and caches by level and first CPU.
    pub topology: Topology,
    /// The kernel's own id of each cache, by `CacheId`, as in resctrl's schemata. Not unique across levels.
    pub kernel_cache_ids: Vec<Option<u32>>,
    /// Missing or contradictory information, with the assumption that replaces it.
    pub warnings: Vec<String>,
}

impl HostTopology {
    /// The cache of a level that the kernel numbers so; `None` if the topology does not know it.
    pub fn cache_of_domain(&self, level: CacheLevel, domain: u32) -> Option<CacheId> {
        let ids = &self.kernel_cache_ids;
        let mut caches = self.topology.caches.iter();
        let is_match = |cache: &&Cache| {
            let id = ids.get(cache.id.0 as usize).copied().flatten();
            cache.level == level && id == Some(domain)
        };
        caches.find(is_match).map(|cache| cache.id)
    }
}

/// A file that cannot be read or understood.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{file}: found {found}, expected {expected}")]
pub struct TopologyError {
    /// Path of the file, including the root.
    pub file: Box<str>,
    /// The found text, or the error of reading it.
    pub found: Box<str>,
    /// The expected text.
    pub expected: Box<str>,
}

/// Reads the topology of the host whose file system is mounted at `root` (`/` for this one).
///
/// # Errors
/// There is no `sys/devices/system/cpu` below `root`, or a file in it cannot be understood; the error names the file.
pub fn read_topology(root: &Path) -> Result<HostTopology, TopologyError> {
    let mut reader = SysfsReader {
        cpu_dir: root.join("sys/devices/system/cpu"),
        warnings: Vec::new(),
    };
    let present_cpus = reader.read_present_cpus()?;
    let online_cpus = reader.read_online_cpus(&present_cpus)?;
    if online_cpus.is_empty() {
        return Err(invalid_file(
            &reader.cpu_dir,
            "no online CPU",
            "at least one",
        ));
    }
    let cpus = reader.read_cpus(root, &present_cpus, &online_cpus)?;
    let memory_latency = reader.read_memory_latency(root)?;
    let unnumbered_caches = reader.describe_caches(&online_cpus)?;
    let (caches, kernel_cache_ids) = reader.number_caches(unnumbered_caches, &online_cpus);
    Ok(HostTopology {
        topology: Topology {
            cpus,
            caches,
            memory_latency,
        },
        kernel_cache_ids,
        warnings: reader.warnings,
    })
}

/// Maximum number of memory nodes of any kernel (`CONFIG_NODES_SHIFT` is 10 at most).
pub(crate) const MAX_NODES: u32 = 1024;

struct SysfsReader {
    cpu_dir: PathBuf,
    warnings: Vec<String>,
}

/// A cache as one or more of its CPUs describe it.
struct CacheDescription {
    level: CacheLevel,
    cpus: CpuSet,
    size_bytes: Option<u64>,
    ways: Option<u32>,
    line_bytes: Option<u32>,
    kernel_id: Option<u32>,
}

impl SysfsReader {
    /// CPUs that have a directory, without those that are possible but not present.
    fn read_present_cpus(&self) -> Result<Vec<u32>, TopologyError> {
        let list = read_cpu_list(&self.cpu_dir.join("present"))?;
        let mut cpus = list_numbers(&self.cpu_dir, "cpu", CpuSet::LIMIT)?;
        cpus.retain(|&cpu| list.as_ref().is_none_or(|list| list.contains(cpu)));
        Ok(cpus)
    }

    fn read_online_cpus(&mut self, present: &[u32]) -> Result<CpuSet, TopologyError> {
        if let Some(list) = read_cpu_list(&self.cpu_dir.join("online"))? {
            return Ok(present
                .iter()
                .copied()
                .filter(|&cpu| list.contains(cpu))
                .collect());
        }
        let mut online = CpuSet::default();
        for &cpu in present {
            // A CPU that cannot be taken offline (often CPU 0) has no such file.
            if read_number(&self.cpu_dir.join(format!("cpu{cpu}/online")))? != Some(0) {
                online.insert(cpu);
            }
        }
        Ok(online)
    }

    fn read_cpus(
        &mut self,
        root: &Path,
        present: &[u32],
        online: &CpuSet,
    ) -> Result<Vec<Cpu>, TopologyError> {
        let nodes = self.read_memory_nodes(root)?;
        let mut placements = Vec::new();
        let mut cpus_without_package = CpuSet::default();
        for &cpu in present {
            let dir = self.cpu_dir.join(format!("cpu{cpu}/topology"));
            let package = read_number(&dir.join("physical_package_id"))?.filter(|&id| id >= 0);
            let siblings = match read_first_set(
                &dir,
                ["core_cpus_list", "thread_siblings_list"],
                read_cpu_list,
            )? {
                Some(set) => Some(set),
                None => read_first_set(&dir, ["core_cpus", "thread_siblings"], read_cpu_map)?,
            };
            let core_id = read_number(&dir.join("core_id"))?.filter(|&id| id >= 0);
            if package.is_none() && online.contains(cpu) {
                cpus_without_package.insert(cpu);
            }
            // The first sibling identifies the core, because core ids repeat across dies and packages.
            let first_sibling = siblings
                .and_then(|set| set.intersection(online).first())
                .filter(|_| online.contains(cpu));
            let core = match (first_sibling, core_id) {
                (Some(first), _) => (0, i64::from(first), 0),
                (None, Some(id)) => (1, package.unwrap_or(0), id),
                (None, None) => (2, i64::from(cpu), 0),
            };
            // An offline CPU has no topology; it must not count as a core or a package of its own.
            let is_known = online.contains(cpu) || package.is_some() || core_id.is_some();
            placements.push((cpu, is_known.then_some((package.unwrap_or(0), core))));
        }
        if !cpus_without_package.is_empty() {
            self.warnings.push(format!(
                "CPUs {cpus_without_package}: no physical_package_id; taken as one package"
            ));
        }
        let known_places = || placements.iter().filter_map(|(_, place)| *place);
        let packages = dense_ranks(known_places().map(|(package, _)| package));
        let cores = dense_ranks(known_places().map(|(_, core)| core));
        let mut next_core = cores.len() as u32;
        let mut cpus = Vec::new();
        for (cpu, place) in &placements {
            let (package, core) = match place {
                Some((package, core)) => (packages[package], cores[core]),
                None => {
                    next_core += 1;
                    (0, next_core - 1)
                }
            };
            cpus.push(Cpu {
                id: CpuId(*cpu),
                core,
                package,
                memory_node: nodes.get(cpu).copied().unwrap_or(0),
                online: online.contains(*cpu),
                hertz: self.read_hertz(*cpu)?,
            });
        }
        Ok(cpus)
    }

    /// Memory node of each CPU, in the kernel's numbering, which often has gaps.
    fn read_memory_nodes(&mut self, root: &Path) -> Result<BTreeMap<u32, u32>, TopologyError> {
        let dir = root.join("sys/devices/system/node");
        let mut nodes = BTreeMap::new();
        if !dir.is_dir() {
            self.warnings
                .push("no sys/devices/system/node: all memory taken as one node".to_string());
            return Ok(nodes);
        }
        for node in list_numbers(&dir, "node", MAX_NODES)? {
            let node_dir = dir.join(format!("node{node}"));
            let cpus = match read_cpu_list(&node_dir.join("cpulist"))? {
                Some(list) => Some(list),
                None => read_cpu_map(&node_dir.join("cpumap"))?,
            };
            nodes.extend(cpus.unwrap_or_default().iter().map(|cpu| (cpu, node)));
        }
        Ok(nodes)
    }

    /// Distances from the firmware's SLIT (10 = own memory; ACPI 6.5, 5.2.17), relative to each node's own.
    fn read_memory_latency(&mut self, root: &Path) -> Result<Vec<Vec<f64>>, TopologyError> {
        let dir = root.join("sys/devices/system/node");
        let nodes = if dir.is_dir() {
            list_numbers(&dir, "node", MAX_NODES)?
        } else {
            Vec::new()
        };
        let Some(&last_node) = nodes.last().filter(|_| nodes.len() > 1) else {
            return Ok(Vec::new());
        };
        let row_len = last_node as usize + 1;
        let mut latencies = vec![Vec::new(); row_len];
        for (index, &node) in nodes.iter().enumerate() {
            let file = dir.join(format!("node{node}/distance"));
            let Some(content) = read_trimmed(&file)? else {
                self.warnings.push(format!(
                    "{}: no such file; how far memory is, is not known",
                    file.display()
                ));
                return Ok(Vec::new());
            };
            let distances: Option<Vec<u32>> = content
                .split_whitespace()
                .map(|word| word.parse().ok())
                .collect();
            let expected = "a distance to each node, its own the shortest";
            let distances =
                distances.ok_or_else(|| invalid_file(&file, &format!("'{content}'"), expected))?;
            let own_distance = distances.get(index).copied().filter(|own_distance| {
                distances
                    .iter()
                    .all(|far| far >= own_distance && *own_distance > 0)
            });
            let Some(own_distance) = own_distance.filter(|_| distances.len() == nodes.len()) else {
                self.warnings.push(format!(
                    "{}: '{content}' is not {expected}; left out",
                    file.display()
                ));
                return Ok(Vec::new());
            };
            let mut row = vec![0.0; row_len];
            for (&to_node, &distance) in nodes.iter().zip(&distances) {
                row[to_node as usize] = f64::from(distance) / f64::from(own_distance);
            }
            latencies[node as usize] = row;
        }
        Ok(latencies)
    }

    fn read_hertz(&self, cpu: u32) -> Result<Option<u64>, TopologyError> {
        for name in ["cpufreq/base_frequency", "cpufreq/cpuinfo_max_freq"] {
            let kilohertz = read_number(&self.cpu_dir.join(format!("cpu{cpu}/{name}")))?;
            if let Some(kilohertz) = kilohertz.filter(|&k| k > 0) {
                return Ok((kilohertz as u64).checked_mul(1000));
            }
        }
        Ok(None)
    }

    fn describe_caches(&mut self, online: &CpuSet) -> Result<Vec<CacheDescription>, TopologyError> {
        let mut caches: Vec<CacheDescription> = Vec::new();
        let mut cacheless_cpus = CpuSet::default();
        for cpu in online.iter() {
            let dir = self.cpu_dir.join(format!("cpu{cpu}/cache"));
            let mut index_names = if dir.is_dir() {
                list_entry_names(&dir)?
            } else {
                Vec::new()
            };
            index_names.retain(|name| {
                name.strip_prefix("index")
                    .is_some_and(|digits| digits.parse::<u32>().is_ok())
            });
            index_names.sort();
            if index_names.is_empty() {
                cacheless_cpus.insert(cpu);
            }
            for index in index_names {
                if let Some(cache) = self.describe_cache(&dir.join(index), cpu, online)? {
                    self.merge_cache(&mut caches, cache);
                }
            }
        }
        if !cacheless_cpus.is_empty() {
            let warning = format!(
                "CPUs {cacheless_cpus}: no cache directory; which caches they share is not known"
            );
            self.warnings.push(warning);
        }
        Ok(caches)
    }

    fn describe_cache(
        &mut self,
        dir: &Path,
        cpu: u32,
        online: &CpuSet,
    ) -> Result<Option<CacheDescription>, TopologyError> {
        let cache_type = read_trimmed(&dir.join("type"))?.unwrap_or_else(|| "Unified".to_string());
        let Some(level) = read_number(&dir.join("level"))? else {
            self.warnings
                .push(format!("{}: no level; cache left out", dir.display()));
            return Ok(None);
        };
        let level = match (level, cache_type.as_str()) {
            (1, "Instruction") => CacheLevel::L1Instruction,
            (1, _) => CacheLevel::L1Data,
            (_, "Instruction") => return Ok(None),
            (2, _) => CacheLevel::L2,
            (3, _) => CacheLevel::L3,
            (4, _) => CacheLevel::L4,
            (other, _) => {
                return Err(invalid_file(
                    &dir.join("level"),
                    &other.to_string(),
                    "1 to 4",
                ));
            }
        };
        let shared_cpus = match read_cpu_list(&dir.join("shared_cpu_list"))? {
            Some(list) if !list.is_empty() => Some(list),
            _ => read_cpu_map(&dir.join("shared_cpu_map"))?,
        };
        let mut cpus = shared_cpus.unwrap_or_default().intersection(online);
        if !cpus.contains(cpu) {
            let warning = format!(
                "{}: no CPUs that share it are named; taken as private to CPU {cpu}",
                dir.display()
            );
            self.warnings.push(warning);
            cpus = [cpu].into_iter().collect();
        }
        // Some firmware reports zero, which means "unknown" in all of these files.
        let read_count = |name: &str| {
            read_number(&dir.join(name)).map(|n| n.and_then(|n| u32::try_from(n).ok()))
        };
        Ok(Some(CacheDescription {
            level,
            cpus,
            size_bytes: read_size(&dir.join("size"))?.filter(|&size| size > 0),
            ways: read_count("ways_of_associativity")?.filter(|&ways| ways > 0),
            line_bytes: read_count("coherency_line_size")?.filter(|&line| line > 0),
            kernel_id: read_count("id")?,
        }))
    }

    /// Adds a description, and merges it with those of the same level that share a CPU with it.
    fn merge_cache(
        &mut self,
        descriptions: &mut Vec<CacheDescription>,
        mut cache: CacheDescription,
    ) {
        while let Some(index) = descriptions
            .iter()
            .position(|other| other.level == cache.level && other.cpus.intersects(&cache.cpus))
        {
            let other_cache = descriptions.remove(index);
            if other_cache.cpus != cache.cpus {
                let (level, a, b) = (cache.level, &other_cache.cpus, &cache.cpus);
                let warning = format!(
                    "{level:?}: shared by CPUs {a} and by CPUs {b} at once; taken as shared by all of them"
                );
                self.warnings.push(warning);
            }
            cache.cpus = cache.cpus.union(&other_cache.cpus);
            cache.size_bytes = other_cache.size_bytes.or(cache.size_bytes);
            cache.ways = other_cache.ways.or(cache.ways);
            cache.line_bytes = other_cache.line_bytes.or(cache.line_bytes);
            cache.kernel_id = other_cache.kernel_id.or(cache.kernel_id);
        }
        descriptions.push(cache);
    }

    fn number_caches(
        &mut self,
        mut descriptions: Vec<CacheDescription>,
        online: &CpuSet,
    ) -> (Vec<Cache>, Vec<Option<u32>>) {
        descriptions.sort_by_key(|cache| (cache.level, cache.cpus.first()));
        let last_cache_index = |cpu: u32| {
            let data_caches = descriptions
                .iter()
                .enumerate()
                .filter(|(_, cache)| cache.level != CacheLevel::L1Instruction);
            data_caches
                .filter(|(_, cache)| cache.cpus.contains(cpu))
                .map(|(at, _)| at)
                .next_back()
        };
        let last_level_indices: BTreeSet<usize> =
            online.iter().filter_map(last_cache_index).collect();
        let mut unsized_levels = BTreeSet::new();
        let numbered_caches = descriptions.iter().enumerate().map(|(index, cache)| {
            if cache.size_bytes.is_none() {
                unsized_levels.insert(cache.level);
            }
            Cache {
                id: CacheId(index as u32),
                level: cache.level,
                cpus: cache.cpus.clone(),
                last_level: last_level_indices.contains(&index),
                size_bytes: cache.size_bytes,
                ways: cache.ways,
                line_bytes: cache.line_bytes,
            }
        });
        let caches = numbered_caches.collect();
        self.warnings.extend(
            unsized_levels
                .iter()
                .map(|level| format!("{level:?}: the host does not report its size")),
        );
        (
            caches,
            descriptions.iter().map(|cache| cache.kernel_id).collect(),
        )
    }
}

/// Ranks of the distinct values, ascending.
fn dense_ranks<T: Ord + Copy>(values: impl Iterator<Item = T>) -> BTreeMap<T, u32> {
    let distinct_values: BTreeSet<T> = values.collect();
    distinct_values
        .into_iter()
        .enumerate()
        .map(|(rank, value)| (value, rank as u32))
        .collect()
}

fn invalid_file(file: &Path, found: &str, expected: &str) -> TopologyError {
    TopologyError {
        file: file.display().to_string().into(),
        found: found.into(),
        expected: expected.into(),
    }
}

fn list_entry_names(dir: &Path) -> Result<Vec<String>, TopologyError> {
    let entries = cachemate_files::list_dir(dir);
    let entries =
        entries.map_err(|error| invalid_file(dir, &error.to_string(), "a readable directory"))?;
    Ok(entries
        .iter()
        .filter_map(|path| path.file_name()?.to_str().map(str::to_string))
        .collect())
}

/// Maximum length of a sysfs file; most are at most one page long.
const MAX_SYSFS_BYTES: u64 = 1 << 20;

/// The trimmed content of a file; `None` if the file does not exist or cannot be read, as those of an offline CPU.
fn read_trimmed(file: &Path) -> Result<Option<String>, TopologyError> {
    match cachemate_files::read_text_limited(file, MAX_SYSFS_BYTES) {
        // Recorded trees contain the zero byte that some kernels leave at the end.
        Ok(text) => Ok(Some(
            text.trim_matches(|c: char| c.is_whitespace() || c == '\0')
                .to_string(),
        )),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error)
            if error.raw_os_error().is_some() && error.kind() != ErrorKind::PermissionDenied =>
        {
            Ok(None)
        }
        Err(error) => Err(invalid_file(
            file,
            &error.to_string(),
            "a readable text file",
        )),
    }
}

/// Numbers below `limit` of the entries that are named by this prefix and a number, ascending.
fn list_numbers(dir: &Path, prefix: &str, limit: u32) -> Result<Vec<u32>, TopologyError> {
    let number_of = |name: String| {
        name.strip_prefix(prefix)
            .and_then(|digits| digits.parse::<u32>().ok())
    };
    let mut numbers: Vec<u32> = list_entry_names(dir)?
        .into_iter()
        .filter_map(number_of)
        .filter(|number| *number < limit)
        .collect();
    numbers.sort_unstable();
    Ok(numbers)
}

fn read_number(file: &Path) -> Result<Option<i64>, TopologyError> {
    let parse = |text: String| {
        text.parse()
            .map_err(|_| invalid_file(file, &format!("'{text}'"), "a whole number"))
    };
    read_trimmed(file)?
        .filter(|text| !text.is_empty())
        .map(parse)
        .transpose()
}

fn read_size(file: &Path) -> Result<Option<u64>, TopologyError> {
    let Some(text) = read_trimmed(file)?.filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    let scales = [("K", 1u64 << 10), ("M", 1 << 20), ("G", 1 << 30), ("", 1)];
    let size_bytes = scales.iter().find_map(|(unit, scale)| {
        text.strip_suffix(unit)?
            .parse::<u64>()
            .ok()?
            .checked_mul(*scale)
    });
    size_bytes
        .map(Some)
        .ok_or_else(|| invalid_file(file, &format!("'{text}'"), "a size such as 32768K"))
}

/// Reads a list such as `0-3,8`. An empty file is the empty set.
fn read_cpu_list(file: &Path) -> Result<Option<CpuSet>, TopologyError> {
    let parse = |text: String| {
        text.parse()
            .map_err(|_| invalid_file(file, &format!("'{text}'"), "a list such as 0-3,8"))
    };
    read_trimmed(file)?.map(parse).transpose()
}

/// Reads a hexadecimal map of words separated by commas, the highest CPUs first.
fn read_cpu_map(file: &Path) -> Result<Option<CpuSet>, TopologyError> {
    let Some(text) = read_trimmed(file)? else {
        return Ok(None);
    };
    let mut cpus = CpuSet::default();
    for (nibble, digit) in text
        .chars()
        .rev()
        .filter(|&letter| letter != ',')
        .enumerate()
    {
        let bits = digit
            .to_digit(16)
            .filter(|_| nibble < CpuSet::LIMIT as usize / 4);
        let bits = bits.ok_or_else(|| {
            invalid_file(
                file,
                &format!("'{text}'"),
                "a map such as 00000000,000000ff",
            )
        })?;
        (0..4)
            .filter(|bit| bits >> bit & 1 == 1)
            .for_each(|bit| cpus.insert(4 * nibble as u32 + bit));
    }
    Ok(Some(cpus))
}

/// The set in the first of these files that is not empty.
fn read_first_set(
    dir: &Path,
    file_names: [&str; 2],
    read_set: fn(&Path) -> Result<Option<CpuSet>, TopologyError>,
) -> Result<Option<CpuSet>, TopologyError> {
    for name in file_names {
        if let Some(set) = read_set(&dir.join(name))?.filter(|set| !set.is_empty()) {
            return Ok(Some(set));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
