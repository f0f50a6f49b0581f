//! A change as one line of text.

use std::fmt;

use super::{Change, ChangeKind, ClassLimits, ColorAssignment, ServiceClassId};
use crate::{CpuSet, GangSchedule, PageMigration};

impl fmt::Display for Change {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(out)
    }
}

impl fmt::Display for ChangeKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChangeKind::Affinity {
                task,
                name,
                from,
                to,
            } => {
                write!(
                    out,
                    "move task {} '{name}' to CPUs {to} (was {from})",
                    task.0
                )
            }
            ChangeKind::Weight {
                task,
                name,
                from,
                to,
            } => {
                write!(
                    out,
                    "give task {} '{name}' a weight of {to} (was {from})",
                    task.0
                )
            }
            ChangeKind::Cpuset { group, from, to } => {
                write!(
                    out,
                    "confine group '{group}' to {} (was {})",
                    describe_cpus(to),
                    describe_cpus(from)
                )
            }
            ChangeKind::CreateClass { class, limits } if limits.is_empty() => {
                write!(out, "create class of service {}", class.0)
            }
            ChangeKind::CreateClass { class, limits } => {
                write!(
                    out,
                    "create class of service {} with {}",
                    class.0,
                    describe_limits(limits)
                )
            }
            ChangeKind::Schemata { class, from, to } => {
                write!(
                    out,
                    "give class of service {} {} (was {})",
                    class.0,
                    describe_limits(to),
                    describe_limits(from)
                )
            }
            ChangeKind::Member {
                task,
                name,
                from,
                to,
            } => {
                write!(
                    out,
                    "put task {} '{name}' in {} (was in {})",
                    task.0,
                    describe_class(*to),
                    describe_class(*from)
                )
            }
            ChangeKind::RemoveClass { class, .. } => {
                write!(out, "remove class of service {}", class.0)
            }
            ChangeKind::Colors { process, from, to } => {
                write!(
                    out,
                    "give process {} {} (was {})",
                    process.0,
                    describe_colors(to),
                    describe_colors(from)
                )
            }
            ChangeKind::StopGangs { schedule } => {
                write!(out, "stop gangs on {}", describe_gangs(schedule))
            }
            ChangeKind::StartGangs { schedule } => {
                write!(out, "start gangs on {}", describe_gangs(schedule))
            }
        }
    }
}

fn describe_cpus(cpus: &CpuSet) -> String {
    if cpus.is_empty() {
        "the CPUs of its parent".to_string()
    } else {
        format!("CPUs {cpus}")
    }
}

fn describe_limits(limits: &ClassLimits) -> String {
    let masks = limits
        .masks
        .iter()
        .map(|(cache, mask)| format!("ways {mask} of cache {}", cache.0));
    let levels = limits
        .bandwidth
        .iter()
        .map(|(cache, level)| format!("bandwidth {level} behind cache {}", cache.0));
    let texts: Vec<String> = masks.chain(levels).collect();
    match texts.is_empty() {
        true => "all ways".to_string(),
        false => texts.join(", "),
    }
}

fn describe_class(class: Option<ServiceClassId>) -> String {
    class.map_or("no class of service".to_string(), |class| {
        format!("class of service {}", class.0)
    })
}

fn describe_colors(colors: &Option<ColorAssignment>) -> String {
    let Some(ColorAssignment {
        allowed,
        migration: migration_mode,
    }) = colors
    else {
        return "all colors".to_string();
    };
    let migration_text = match migration_mode {
        PageMigration::Never => "for new pages",
        PageMigration::Lazy => "and moves pages when they are touched",
        PageMigration::HotFirst => "and moves its pages, hot ones first",
        PageMigration::All => "and moves all its pages",
    };
    format!("colors {allowed} {migration_text}")
}

fn describe_gangs(schedule: &GangSchedule) -> String {
    let describe_gang = |gang: &crate::Gang| {
        let members: Vec<String> = gang
            .members
            .iter()
            .map(|(task, _)| task.0.to_string())
            .collect();
        let slices = if gang.slices == 1 {
            String::new()
        } else {
            format!(" for {} slices", gang.slices)
        };
        format!("tasks {}{slices}", members.join("+"))
    };

    let gangs: Vec<String> = schedule.gangs.iter().map(describe_gang).collect();
    format!(
        "CPUs {}: {}, {} ms a slice",
        schedule.cpus,
        gangs.join(", then "),
        schedule.slice_ns as f64 / 1e6
    )
}
