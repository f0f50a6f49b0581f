//! Small changes to a machine from the command line, for sweeps: `niagara-2core?caches.l2.size=384K&hertz=1G`.
//!
//! The `?` is followed by fields with their values, separated by `&`. A field is a path; in `caches` and `prefetchers`
//! an entry is named by its level (`l1i`, `l1d`, `l2`, `l3`, `l4`; case does not matter) or by its index from 0. The
//! unit at the end of a field's name may be omitted (`size` for `size_bytes`, `latency` for `latency_cycles`). Whole
//! numbers may end in K, M or G (powers of 1024; of 1000 for `hertz`). `none` removes an optional field.

use toml::{Table, Value};

use crate::SpecError;

/// One `field=value`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Override {
    field: String,
    value: String,
}

/// `name?a=1&b=2` into `name` and two overrides; no fields are checked here.
pub(crate) fn split_overrides(text: &str) -> Result<(&str, Vec<Override>), SpecError> {
    let Some((name, changes)) = text.split_once('?') else {
        return Ok((text, Vec::new()));
    };
    let assignments = changes.split('&').filter(|part| !part.trim().is_empty());
    let parsed_overrides = assignments.map(|part| match part.split_once('=') {
        Some((field, value)) => Ok(Override {
            field: field.trim().to_string(),
            value: value.trim().to_string(),
        }),
        None => Err(SpecError::for_file(
            text,
            format!("'{part}' after the '?'"),
            "field=value",
        )),
    });
    Ok((name, parsed_overrides.collect::<Result<_, _>>()?))
}

const UNITS: [&str; 4] = ["_bytes", "_cycles", "_ns", "_bytes_per_cycle"];

/// Resolves the path of a field to its table and its full name with the unit.
fn locate_entry<'t>(
    table: &'t mut Table,
    field: &str,
) -> Result<(&'t mut Table, String), SpecError> {
    let override_error = |found: String, expected: &str| SpecError {
        field: Some(field.into()),
        ..SpecError::for_file("", format!("{found} in an override"), expected)
    };
    let mut steps: Vec<&str> = field.split('.').collect();
    let last_step = steps
        .pop()
        .filter(|last| !last.is_empty())
        .ok_or_else(|| override_error("no field".to_string(), "a field"))?;

    let mut current_table = table;
    let mut position = 0;
    while position < steps.len() {
        let step = steps[position];
        let entry = current_table
            .entry(step)
            .or_insert_with(|| Value::Table(Table::new()));
        current_table = match entry {
            Value::Table(inner_table) => inner_table,
            Value::Array(entries) => {
                position += 1;
                let selector = steps.get(position).copied().unwrap_or(last_step);
                let entry_index = entries
                    .iter()
                    .enumerate()
                    .position(|(index, entry)| matches_selector(entry, index, selector));
                match entry_index.and_then(|index| entries[index].as_table_mut()) {
                    Some(entry_table) if position < steps.len() => entry_table,
                    _ => {
                        return Err(override_error(
                            format!("'{selector}'"),
                            "a level that it has, or an index, and a field",
                        ));
                    }
                }
            }
            other => {
                return Err(override_error(
                    format!("'{step}', a {}", other.type_str()),
                    "a field with parts",
                ));
            }
        };
        position += 1;
    }

    let name_with_unit = UNITS
        .iter()
        .map(|unit| format!("{last_step}{unit}"))
        .find(|name| current_table.contains_key(name));
    let name = if current_table.contains_key(last_step) {
        last_step.to_string()
    } else {
        name_with_unit.unwrap_or_else(|| last_step.to_string())
    };
    Ok((current_table, name))
}

pub(crate) fn apply_override(table: &mut Table, change: &Override) -> Result<(), SpecError> {
    let (entry_table, name) = locate_entry(table, &change.field)?;
    if change.value == "none" {
        entry_table.remove(&name);
        return Ok(());
    }
    let kilo = if name == "hertz" { 1000 } else { 1024 };
    entry_table.insert(name, parse_value(&change.value, kilo));
    Ok(())
}

/// Replaces the value of a field, whatever its previous value.
pub(crate) fn set_field(table: &mut Table, field: &str, value: &Value) -> Result<(), SpecError> {
    let (entry_table, name) = locate_entry(table, field)?;
    entry_table.insert(name, value.clone());
    Ok(())
}

fn matches_selector(entry: &Value, index: usize, selector: &str) -> bool {
    let level = entry
        .get("level")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_lowercase();
    let lower_selector = selector.to_lowercase();
    let short_level = level.replace("instruction", "i").replace("data", "d");
    lower_selector == level || lower_selector == short_level || lower_selector == index.to_string()
}

fn parse_value(text: &str, kilo: i64) -> Value {
    let scales = [("K", kilo), ("M", kilo * kilo), ("G", kilo * kilo * kilo)];
    let scaled = scales.iter().find_map(|&(letter, scale)| {
        let number = text.strip_suffix(letter)?.parse::<i64>().ok()?;
        Some(Value::Integer(number.checked_mul(scale)?))
    });
    scaled
        .or_else(|| text.parse().ok().map(Value::Integer))
        .or_else(|| text.parse().ok().map(Value::Float))
        .or_else(|| text.parse().ok().map(Value::Boolean))
        .unwrap_or_else(|| Value::String(text.to_string()))
}
