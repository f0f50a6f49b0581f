//! Machines by name or by path.

use cachemate_core::{MachineSpec, Topology};

use crate::located_toml::Located;
use crate::overrides::{Override, split_overrides};
use crate::{SpecError, read_text};

/// Name and text of every built-in machine, in the order of their names.
const BUILT_IN_MACHINES: &[(&str, &str)] = &[
    (
        "altra-max",
        include_str!("../../../machines/altra-max.toml"),
    ),
    (
        "epyc-7742",
        include_str!("../../../machines/epyc-7742.toml"),
    ),
    (
        "epyc-7763",
        include_str!("../../../machines/epyc-7763.toml"),
    ),
    (
        "epyc-9654",
        include_str!("../../../machines/epyc-9654.toml"),
    ),
    (
        "epyc-9754",
        include_str!("../../../machines/epyc-9754.toml"),
    ),
    (
        "epyc-9755",
        include_str!("../../../machines/epyc-9755.toml"),
    ),
    (
        "graviton3",
        include_str!("../../../machines/graviton3.toml"),
    ),
    (
        "lab-2x16M",
        include_str!("../../../machines/lab-2x16M.toml"),
    ),
    (
        "lab-2x16M-hashed",
        include_str!("../../../machines/lab-2x16M-hashed.toml"),
    ),
    (
        "lab-chiplets",
        include_str!("../../../machines/lab-chiplets.toml"),
    ),
    ("lab-vm", include_str!("../../../machines/lab-vm.toml")),
    (
        "niagara-2core",
        include_str!("../../../machines/niagara-2core.toml"),
    ),
    (
        "opteron-2350",
        include_str!("../../../machines/opteron-2350.toml"),
    ),
    (
        "p4-xeon-ht",
        include_str!("../../../machines/p4-xeon-ht.toml"),
    ),
    ("pairs-04", include_str!("../../../machines/pairs-04.toml")),
    ("pairs-06", include_str!("../../../machines/pairs-06.toml")),
    ("pairs-08", include_str!("../../../machines/pairs-08.toml")),
    ("pairs-10", include_str!("../../../machines/pairs-10.toml")),
    (
        "power5-2x2x2",
        include_str!("../../../machines/power5-2x2x2.toml"),
    ),
    (
        "power5-8x2x2",
        include_str!("../../../machines/power5-8x2x2.toml"),
    ),
    (
        "ryzen-7800x3d",
        include_str!("../../../machines/ryzen-7800x3d.toml"),
    ),
    ("smt-av", include_str!("../../../machines/smt-av.toml")),
    (
        "xeon-6980p",
        include_str!("../../../machines/xeon-6980p.toml"),
    ),
    (
        "xeon-8380",
        include_str!("../../../machines/xeon-8380.toml"),
    ),
    (
        "xeon-8490h",
        include_str!("../../../machines/xeon-8490h.toml"),
    ),
    (
        "xeon-8592",
        include_str!("../../../machines/xeon-8592.toml"),
    ),
    (
        "xeon-x5365",
        include_str!("../../../machines/xeon-x5365.toml"),
    ),
    (
        "xeon-x5365-4",
        include_str!("../../../machines/xeon-x5365-4.toml"),
    ),
    (
        "xeon-x5365-4-page",
        include_str!("../../../machines/xeon-x5365-4-page.toml"),
    ),
];

/// Names of the built-in machines, in order.
pub fn machine_names() -> Vec<&'static str> {
    BUILT_IN_MACHINES.iter().map(|(name, _)| *name).collect()
}

/// `None` if no built-in machine has this name.
pub fn built_in_machine_text(name: &str) -> Option<&'static str> {
    BUILT_IN_MACHINES
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, text)| *text)
}

/// The machine with the given name: a built-in one (`xeon-x5365`), or the path of a TOML file (it contains a `/` or
/// ends in `.toml`); either with overrides (`niagara-2core?caches.l2.size=384K`).
///
/// # Errors
/// An unknown name (with the known ones and the nearest one), an unreadable file, invalid TOML, an ill-typed or unknown
/// field, or an impossible machine; each with file, line, column, field, the value found and the values expected.
pub fn load_machine(name_or_path: &str) -> Result<MachineSpec, SpecError> {
    let (name, overrides) = split_overrides(name_or_path)?;
    let is_path = name.contains('/') || name.ends_with(".toml");
    let text = match built_in_machine_text(name) {
        Some(text) => text.to_string(),
        None if is_path => read_text(name)?,
        None => return Err(SpecError::unknown_name("machine", name, &machine_names())),
    };
    read_machine(name, &text, &overrides)
}

/// The machine that a text describes; `file` is its name in errors.
pub fn parse_machine(file: &str, text: &str) -> Result<MachineSpec, SpecError> {
    read_machine(file, text, &[])
}

fn read_machine(file: &str, text: &str, overrides: &[Override]) -> Result<MachineSpec, SpecError> {
    let located = Located::parse(file, text)?;
    let machine: MachineSpec = located.deserialize_with_overrides(overrides)?;
    machine
        .check()
        .map_err(|error| located.error_at(&error.field, error.found, error.expected))?;
    Ok(machine)
}

/// A machine's CPUs and caches, in the form that policies use; see [`load_machine`].
pub fn load_topology(name_or_path: &str) -> Result<Topology, SpecError> {
    load_machine(name_or_path).map(|machine| machine.topology())
}
