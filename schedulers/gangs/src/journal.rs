//! The journal of the threads' policies before adoption. It has one line per thread, `thread start policy`, written
//! before the change. The start time distinguishes a thread from a later one with the same number.

/// Number of the policy SCHED_EXT (include/uapi/linux/sched.h).
pub const POLICY_EXT: i32 = 7;

/// Original state of one thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub thread: u32,
    /// Start time in ticks since boot (field 22 of `/proc/PID/stat`).
    pub start_ticks: u64,
    pub policy: i32,
}

/// Formats the line for a thread.
pub fn journal_line(entry: &Entry) -> String {
    format!("{} {} {}\n", entry.thread, entry.start_ticks, entry.policy)
}

/// Parses all entries. If a thread has two entries, only the first is returned, because it is the thread's oldest
/// state.
///
/// # Errors
/// A line is malformed. An incomplete last line is ignored, because its change was not started.
pub fn parse(text: &str) -> Result<Vec<Entry>, String> {
    let mut entries: Vec<Entry> = Vec::new();
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let Some(line) = line.strip_suffix('\n') else {
            break;
        };
        let fields: Vec<&str> = line.split(' ').collect();
        let entry = match fields[..] {
            [thread, start, policy] => thread
                .parse()
                .ok()
                .zip(start.parse().ok())
                .zip(policy.parse().ok()),
            _ => None,
        };
        let Some(((thread, start_ticks), policy)) = entry else {
            return Err(format!(
                "line {}: found '{line}', expected 'thread start policy'",
                number + 1
            ));
        };
        if !entries
            .iter()
            .any(|known| known.thread == thread && known.start_ticks == start_ticks)
        {
            entries.push(Entry {
                thread,
                start_ticks,
                policy,
            });
        }
    }
    Ok(entries)
}

/// Entries to keep after a restore: those that `is_kept` selects, and `refused_entries`, whose policy the kernel
/// refused to restore. A later restore retries the latter.
pub fn remaining_entries(
    entries: &[Entry],
    stays_adopted: impl Fn(&Entry) -> bool,
    refused_entries: &[Entry],
) -> Vec<Entry> {
    let is_refused = |entry: &Entry| {
        refused_entries.iter().any(|refused_entry| {
            refused_entry.thread == entry.thread && refused_entry.start_ticks == entry.start_ticks
        })
    };
    let adopted = entries
        .iter()
        .filter(|entry| stays_adopted(entry) && !is_refused(entry));
    adopted.chain(refused_entries).copied().collect()
}

/// Policy, start time and parent process from a line of `/proc/PID/stat`; `None` if the line is malformed.
pub fn stat_fields(stat: &str) -> Option<(i32, u64, u32)> {
    // The name may contain anything, but ends with the last parenthesis. The fields after it are numbered from 3.
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
    let field_at = |number: usize| fields.get(number - 3);
    Some((
        field_at(41)?.parse().ok()?,
        field_at(22)?.parse().ok()?,
        field_at(4)?.parse().ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are entries read back, with the oldest state of each thread, without an incomplete last line?
    #[test]
    fn entries_are_read_back_with_each_threads_oldest_state() {
        let first = Entry {
            thread: 7,
            start_ticks: 100,
            policy: 3,
        };
        let again = Entry {
            policy: POLICY_EXT,
            ..first
        };
        let later = Entry {
            start_ticks: 900,
            policy: 0,
            ..first
        };
        let text: String = [first, again, later].iter().map(journal_line).collect();
        assert_eq!(parse(&text), Ok(vec![first, later]));
        assert_eq!(parse(&format!("{text}8 100")), Ok(vec![first, later]));
    }

    /// Is a malformed line named in the error?
    #[test]
    fn a_malformed_line_is_named() {
        assert_eq!(
            parse("1 2 0\nx y\n").unwrap_err(),
            "line 2: found 'x y', expected 'thread start policy'"
        );
    }

    /// Are fields read correctly after a name with spaces and parentheses?
    #[test]
    fn stat_fields_are_read_after_any_name() {
        let mut fields = vec!["0"; 50];
        (fields[0], fields[1], fields[19], fields[38]) = ("S", "17", "4711", "7");
        assert_eq!(
            stat_fields(&format!("12 (a) b) c) {}", fields.join(" "))),
            Some((7, 4711, 17))
        );
        assert_eq!(stat_fields("12 (a) S 1"), None);
        assert_eq!(stat_fields(""), None);
    }

    /// If the kernel refuses to restore a thread's policy: does its entry, or that of the thread from which it
    /// inherited, stay for the next attempt, while those of restored threads are removed?
    #[test]
    fn entries_that_could_not_be_restored_stay_in_the_journal() {
        let [restored, refused, adopted] = [1, 2, 3].map(|thread| Entry {
            thread,
            start_ticks: 100,
            policy: 0,
        });
        let inherited = Entry {
            thread: 4,
            start_ticks: 200,
            policy: 3,
        };
        let entries = remaining_entries(
            &[restored, refused, adopted],
            |entry| entry.thread == 3,
            &[refused, inherited],
        );
        assert_eq!(entries, [adopted, refused, inherited]);
        assert_eq!(
            parse(&entries.iter().map(journal_line).collect::<String>()).unwrap(),
            entries
        );
        assert_eq!(remaining_entries(&entries, |_| false, &[]), []);
    }
}
