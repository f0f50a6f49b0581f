//! Layouts of the BPF maps, which must match bpf/state.h.

pub const MAX_CPUS: usize = 512;
pub const MAX_CACHES: usize = 32;
pub const MAX_GANGS: usize = 30;
/// Gang number of a CPU on which no managed task runs.
pub const NOBODY: u32 = u32::MAX;

const TURN_BYTES: usize = 16;
const ROTATION_BYTES: usize = 16 + MAX_GANGS * TURN_BYTES;

/// Key of a place in the plan: a thread, or a whole process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TaskKey {
    Thread(u32),
    Process(u32),
}

impl TaskKey {
    /// Encodes the key as `struct place_key`.
    pub fn to_bytes(self) -> [u8; 8] {
        let (kind, id) = match self {
            TaskKey::Thread(id) => (0, id),
            TaskKey::Process(id) => (1, id),
        };
        bytes_of_words([kind, id])
    }
}

/// Place of a task in the plan (`struct place`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskPlace {
    pub gang: u32,
    /// Caches that the task may use, one bit per last-level cache.
    pub caches: u32,
    pub weight: u32,
    /// Do descendants of the process get the same place?
    pub children: bool,
}

impl TaskPlace {
    pub fn to_bytes(self) -> [u8; 16] {
        bytes_of_words([
            self.gang,
            self.caches,
            self.weight,
            u32::from(self.children),
        ])
    }
}

/// One turn of a rotation (`struct turn`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapTurn {
    pub length_ns: u64,
    pub gang: u32,
    /// Gangs that may use CPUs that this turn's gang leaves idle, one bit per gang.
    pub may_fill: u32,
}

/// Encodes at most [`MAX_GANGS`] turns as `struct rotation`.
pub fn rotation_to_bytes(turns: &[MapTurn]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(ROTATION_BYTES);
    bytes.extend(bytes_of_words::<2, 8>([turns.len() as u32, 0]));
    bytes.extend(
        turns
            .iter()
            .map(|turn| turn.length_ns)
            .sum::<u64>()
            .to_ne_bytes(),
    );
    for turn in turns {
        bytes.extend(turn.length_ns.to_ne_bytes());
        bytes.extend(bytes_of_words::<2, 8>([turn.gang, turn.may_fill]));
    }
    bytes.resize(ROTATION_BYTES, 0);
    bytes
}

/// Decodes the turns in a `struct rotation`; `None` if the bytes are malformed.
pub fn rotation_from_bytes(bytes: &[u8]) -> Option<Vec<MapTurn>> {
    let turns = u32_at(bytes, 0)? as usize;
    if bytes.len() != ROTATION_BYTES || turns > MAX_GANGS {
        return None;
    }
    (0..turns)
        .map(|index| {
            let offset = 16 + index * TURN_BYTES;
            Some(MapTurn {
                length_ns: u64_at(bytes, offset)?,
                gang: u32_at(bytes, offset + 8)?,
                may_fill: u32_at(bytes, offset + 12)?,
            })
        })
        .collect()
}

/// Encodes `struct cpu`; only its cache is set.
pub fn cpu_to_bytes(cache: u32) -> Vec<u8> {
    let mut bytes = bytes_of_words::<4, 16>([cache, NOBODY, NOBODY, 0]).to_vec();
    bytes.extend([0; 16]);
    bytes
}

/// Time in ns for which a higher scheduling class has had the CPU, up to `now_ns` on the monotonic clock.
pub fn stolen_time_ns(cpu: &[u8], now_ns: u64) -> Option<u64> {
    let since_ns = u64_at(cpu, 16)?;
    let open_ns = if since_ns > 0 {
        now_ns.saturating_sub(since_ns)
    } else {
        0
    };
    Some(u64_at(cpu, 24)? + open_ns)
}

/// Encodes `struct machine`.
pub fn machine_to_bytes(cpus: u32, caches: u32) -> Vec<u8> {
    let mut bytes = bytes_of_words::<4, 16>([cpus, caches, 0, 0]).to_vec();
    bytes.extend([0; 8]);
    bytes
}

/// Kind and code with which the kernel ended the scheduler; kind 0 means that the scheduler is running.
pub fn exit_state(machine: &[u8]) -> Option<(u32, i64)> {
    Some((u32_at(machine, 8)?, u64_at(machine, 16)? as i64))
}

/// Counts of one cache (`struct cache`) since the scheduler was attached.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CacheCounts {
    /// The gang whose turn it is; `None` if no gang has a turn.
    pub gang: Option<u32>,
    pub turns: u64,
    pub kicks: u64,
    /// Number of picks of tasks that had waited for more than a rotation.
    pub rescued: u64,
    /// Number of picks of tasks that ran in the turn of another gang, as the plan allows.
    pub fills: u64,
    /// Maximum delay of the end of a turn, in ns.
    pub latest_ns: u64,
    pub longest_wait_ns: u64,
    /// Time in which all CPUs ran the gang whose turn it was.
    pub turn_ns: u64,
    /// Time in which CPUs ran tasks of several gangs.
    pub mixed_ns: u64,
    /// Time in which CPUs ran a gang other than the one whose turn it was.
    pub off_turn_ns: u64,
    /// Time in which some CPUs were idle and the others ran the gang.
    pub partly_idle_ns: u64,
    pub idle_ns: u64,
}

impl CacheCounts {
    /// Decodes the counts; `None` if there are too few bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let count_at = |index: usize| u64_at(bytes, 48 + 8 * index);
        Some(CacheCounts {
            gang: u32_at(bytes, 0).filter(|gang| (*gang as usize) < MAX_GANGS),
            turns: count_at(0)?,
            kicks: count_at(1)?,
            rescued: count_at(2)?,
            fills: count_at(3)?,
            latest_ns: count_at(4)?,
            longest_wait_ns: count_at(5)?,
            turn_ns: count_at(6)?,
            mixed_ns: count_at(7)?,
            off_turn_ns: count_at(8)?,
            partly_idle_ns: count_at(9)?,
            idle_ns: count_at(10)?,
        })
    }
}

fn bytes_of_words<const N: usize, const BYTES: usize>(words: [u32; N]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (chunk, word) in bytes.chunks_exact_mut(4).zip(words) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}
fn u32_at(bytes: &[u8], index: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(
        bytes.get(index..index + 4)?.try_into().ok()?,
    ))
}
fn u64_at(bytes: &[u8], index: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(
        bytes.get(index..index + 8)?.try_into().ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the C side have the same limits?
    #[test]
    fn the_c_side_has_the_same_limits() {
        let header = include_str!("../bpf/state.h");
        for (name, value) in [
            ("MAX_CPUS", MAX_CPUS),
            ("MAX_CACHES", MAX_CACHES),
            ("MAX_GANGS", MAX_GANGS),
        ] {
            let line = header
                .lines()
                .find(|line| line.starts_with(&format!("#define {name} ")))
                .unwrap();
            assert_eq!(
                line.split_whitespace().nth(2),
                Some(value.to_string().as_str()),
                "{line}"
            );
        }
        for layout in [
            "struct machine",
            "struct place_key",
            "struct place",
            "struct turn",
            "struct rotation",
            "struct cpu",
        ] {
            assert!(header.contains(&format!("{layout} {{")), "{layout}");
        }
    }

    /// Is a rotation read back as written, and another size rejected?
    #[test]
    fn a_rotation_is_read_back_as_written() {
        let turn = |gang| MapTurn {
            length_ns: 20_000_000 + u64::from(gang),
            gang,
            may_fill: 1 << (gang + 1),
        };
        let turns: Vec<MapTurn> = (0..MAX_GANGS as u32).map(turn).collect();
        for some in [&turns[..], &turns[..2], &[]] {
            let bytes = rotation_to_bytes(some);
            assert_eq!(rotation_from_bytes(&bytes).as_deref(), Some(some));
            assert_eq!(rotation_from_bytes(&bytes[..bytes.len() - 1]), None);
        }
    }

    /// Is an interval that is still open added to the stolen time, and only if there is one?
    #[test]
    fn an_open_interval_counts_as_stolen_time() {
        let mut cpu = cpu_to_bytes(3);
        cpu[24..32].copy_from_slice(&500u64.to_ne_bytes());
        assert_eq!(stolen_time_ns(&cpu, 10_000), Some(500));
        cpu[16..24].copy_from_slice(&9_000u64.to_ne_bytes());
        assert_eq!(stolen_time_ns(&cpu, 10_000), Some(1_500));
    }
}
