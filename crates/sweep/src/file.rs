//! The sweep file: its axes, and the points that are left out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cachemate_core::nearest_name;
use cachemate_files::read_text_limited;
use cachemate_spec::{Located, PolicyChoice, SpecError};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::SweepError;

/// Kinds of tasks of a sweep.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SweepKind {
    /// A scenario on the simulated machine.
    #[default]
    Scenario,
    /// The miss-rate curve of a recording.
    Curve,
    /// One run of the papers' experiments.
    Repro,
    /// One part of a fleet.
    Fleet,
}

/// Content of a sweep file (`sweep-*.toml`); docs/sweeps.md explains every field.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweepFile {
    /// Name of the sweep, for display.
    pub name: String,
    /// Purpose of the sweep, in a sentence or two; may be empty.
    #[serde(default)]
    pub description: String,
    /// Kind of each task.
    #[serde(default)]
    pub kind: SweepKind,
    /// Do results contain everything that a run counted, or only the figures that reports show?
    #[serde(default = "yes")]
    pub detail: bool,
    /// Parameters that the sweep varies.
    pub axes: Axes,
    /// Filters; a point that matches any of them is left out.
    #[serde(default)]
    pub skip: Vec<toml::Table>,
    /// Filters; if there are any, a point that matches none of them is left out.
    #[serde(default)]
    pub only: Vec<toml::Table>,
}

/// The axes as written in the file; the sweep's kind determines which are allowed.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Axes {
    /// Scenario files, relative to the sweep file's directory.
    pub scenario: Vec<String>,
    /// Machines by name or path, used instead of the scenario's machine.
    pub machine: Vec<String>,
    /// Policies, each given by its name or by a table of its name and parameters.
    pub policy: Vec<toml::Value>,
    /// Bundled recordings by name, or recordings by path; `["all"]` stands for all bundled ones.
    pub recording: Vec<String>,
    /// Any other field by its path, with its values.
    pub parameters: BTreeMap<String, Vec<toml::Value>>,
    /// Seeds, or a table of `first` and `count`.
    pub seed: Option<toml::Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SeedRange {
    first: u64,
    count: u64,
}

fn yes() -> bool {
    true
}

/// One axis: its name and its values, in the order of the file.
#[derive(Clone, PartialEq, Debug)]
pub struct SweepAxis {
    /// Name of the axis as in the file; for a parameter, the path of the field.
    pub name: String,
    /// Values of the axis, at least one, without duplicates.
    pub values: Vec<Value>,
}

/// A sweep file with its path, and its axes in order.
#[derive(Clone, PartialEq, Debug)]
pub struct SweepDefinition {
    /// The file as written.
    pub file: SweepFile,
    /// Path of the sweep file, for messages.
    pub path: String,
    /// Directory to which relative paths of scenario files refer.
    pub dir: PathBuf,
    /// Axes, the slowest one first; seeds last.
    pub axes: Vec<SweepAxis>,
    /// Filters, each with allowed values by axis. A point that matches any of them is left out.
    pub skip: Vec<BTreeMap<String, Vec<Value>>>,
    /// Filters of the same form. If there are any, a point must match at least one.
    pub only: Vec<BTreeMap<String, Vec<Value>>>,
}

/// Maximum size of scenario, machine and sweep files, which people write and which are therefore small.
pub(crate) const INPUT_BYTES_LIMIT: u64 = 16 << 20;
/// Maximum number of points; more are probably a typing error.
pub const MAX_POINTS: usize = 10_000_000;
const CURVE_PARAMETERS: [&str; 3] = ["line_bytes", "sizes", "sample"];

/// Reads and checks a sweep file. `bundled` lists the recordings for which `all` stands.
///
/// # Errors
/// The file cannot be read, or has an error of [`parse_sweep`].
pub fn load_sweep(path: &Path, bundled: &[String]) -> Result<SweepDefinition, SweepError> {
    let text = read_text_limited(path, INPUT_BYTES_LIMIT)
        .map_err(|error| SweepError::file(path, error))?;
    parse_sweep(path, &text, bundled)
}

/// Parses a sweep file from a text.
///
/// # Errors
/// Invalid TOML, unknown or ill-typed fields, an empty axis or one with a duplicate value, an axis that the kind does
/// not have, a filter for a missing axis; each with file, line, field, the value found and the values expected.
pub fn parse_sweep(
    path: &Path,
    text: &str,
    bundled: &[String],
) -> Result<SweepDefinition, SweepError> {
    let display_path = path.display().to_string();
    let located = Located::parse(&display_path, text)?;
    let mut file: SweepFile = located.deserialize()?;
    if file.axes.recording == ["all"] {
        if bundled.is_empty() {
            return Err(located
                .error_at(
                    "axes.recording",
                    "no bundled recordings",
                    "recordings by path, or bundled ones",
                )
                .into());
        }
        file.axes.recording = bundled.to_vec();
    }
    let axes = parse_axes(&file, &located)?;
    let parse_field_filters =
        |field: &str, tables: &[toml::Table]| parse_filters(field, tables, &axes, &located);
    let (skip, only) = (
        parse_field_filters("skip", &file.skip)?,
        parse_field_filters("only", &file.only)?,
    );
    let dir = path
        .parent()
        .filter(|dir| !dir.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    Ok(SweepDefinition {
        dir: dir.to_path_buf(),
        skip,
        only,
        axes,
        file,
        path: display_path,
    })
}

fn parse_axes(file: &SweepFile, located: &Located<'_>) -> Result<Vec<SweepAxis>, SpecError> {
    if file.name.is_empty() {
        return Err(located.error_at("name", "an empty name", "a short name"));
    }
    let string_values = |values: &[String]| values.iter().cloned().map(Value::String).collect();
    let new_axis = |name: &str, values: Vec<Value>| SweepAxis {
        name: name.to_string(),
        values,
    };
    let file_axes = &file.axes;
    let (required_axis, forbidden_axes): (&str, &[(&str, bool)]) = match file.kind {
        SweepKind::Scenario => ("scenario", &[("recording", file_axes.recording.is_empty())]),
        SweepKind::Curve => {
            let are_empty = [
                file_axes.scenario.is_empty(),
                file_axes.machine.is_empty(),
                file_axes.policy.is_empty(),
            ];
            (
                "recording",
                &[
                    ("scenario", are_empty[0]),
                    ("machine", are_empty[1]),
                    ("policy", are_empty[2]),
                ],
            )
        }
        SweepKind::Repro => {
            return Err(located.error_at(
                "kind",
                "'repro'",
                "'scenario' or 'curve': 'cachemate repro' makes these",
            ));
        }
        SweepKind::Fleet => {
            return Err(located.error_at(
                "kind",
                "'fleet'",
                "'scenario' or 'curve': 'cachemate fleet' makes these",
            ));
        }
    };
    if let Some((name, _)) = forbidden_axes.iter().find(|(_, is_empty)| !is_empty) {
        let expected = format!("no such axis where kind is '{}'", kind_name(file.kind));
        return Err(located.error_at(&format!("axes.{name}"), "an axis", expected));
    }
    let mut axes = vec![
        new_axis("scenario", string_values(&file_axes.scenario)),
        new_axis("machine", string_values(&file_axes.machine)),
        new_axis("policy", parse_policies(&file_axes.policy, located)?),
        new_axis("recording", string_values(&file_axes.recording)),
    ];
    if axes
        .iter()
        .all(|axis| axis.name != required_axis || axis.values.is_empty())
    {
        return Err(located.error_at(
            &format!("axes.{required_axis}"),
            "no value",
            "one value or more",
        ));
    }
    axes.retain(|axis| !axis.values.is_empty());
    for (name, values) in &file_axes.parameters {
        let field = format!("axes.parameters.{name}");
        if file.kind == SweepKind::Curve && !CURVE_PARAMETERS.contains(&name.as_str()) {
            let expected = format!("one of {}", CURVE_PARAMETERS.join(", "));
            return Err(located.error_at(&field, format!("'{name}'"), expected));
        }
        if axes.iter().any(|axis| axis.name == *name) || name == "seed" {
            return Err(located.error_at(
                &field,
                "an axis of its own",
                "a field that no axis sets",
            ));
        }
        if values.is_empty() {
            return Err(located.error_at(&field, "no value", "one value or more"));
        }
        let values = values
            .iter()
            .map(|value| json_value(value, &field, located));
        axes.push(new_axis(name, values.collect::<Result<_, _>>()?));
    }
    if let Some(seeds) = parse_seeds(file_axes.seed.as_ref(), located)? {
        axes.push(new_axis("seed", seeds));
    }
    check_axes(&axes, located)?;
    Ok(axes)
}

fn kind_name(kind: SweepKind) -> &'static str {
    match kind {
        SweepKind::Scenario => "scenario",
        SweepKind::Curve => "curve",
        SweepKind::Repro => "repro",
        SweepKind::Fleet => "fleet",
    }
}

fn check_axes(axes: &[SweepAxis], located: &Located<'_>) -> Result<(), SpecError> {
    let mut point_count = 1usize;
    for axis in axes {
        let field = format!("axes.{}", axis.name);
        let mut sorted_texts: Vec<String> = axis.values.iter().map(Value::to_string).collect();
        sorted_texts.sort();
        if let Some(duplicate_pair) = sorted_texts.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(located.error_at(
                &field,
                format!("{} twice", duplicate_pair[0]),
                "every value once",
            ));
        }
        point_count = point_count.saturating_mul(axis.values.len());
        if point_count > MAX_POINTS {
            return Err(located.error_at(
                &field,
                format!("{point_count} points and more"),
                format!("at most {MAX_POINTS}"),
            ));
        }
    }
    Ok(())
}

/// Parses policies. A policy without parameters is represented by its name, so that equal policies compare as equal.
fn parse_policies(entries: &[toml::Value], located: &Located<'_>) -> Result<Vec<Value>, SpecError> {
    let policy_axis = |(index, value): (usize, &toml::Value)| {
        let field = format!("axes.policy[{index}]");
        if let toml::Value::String(name) = value {
            return Ok(Value::String(name.clone()));
        }
        let choice: PolicyChoice = value.clone().try_into().map_err(|error: toml::de::Error| {
            located.error_at(
                &field,
                error.message(),
                "a name, or a table of name and parameters",
            )
        })?;
        if choice.parameters.is_empty() {
            return Ok(Value::String(choice.name));
        }
        json_value(value, &field, located)
    };
    entries.iter().enumerate().map(policy_axis).collect()
}

fn parse_seeds(
    value: Option<&toml::Value>,
    located: &Located<'_>,
) -> Result<Option<Vec<Value>>, SpecError> {
    let seeds_error = |found: String| {
        located.error_at(
            "axes.seed",
            found,
            "whole numbers, 0 or more, or a table such as { first = 1, count = 3 }",
        )
    };
    let Some(seed_value) = value else {
        return Ok(None);
    };
    let seeds: Vec<u64> = match seed_value {
        toml::Value::Array(_) => seed_value
            .clone()
            .try_into()
            .map_err(|error: toml::de::Error| seeds_error(error.message().into()))?,
        _ => {
            let range: SeedRange = seed_value
                .clone()
                .try_into()
                .map_err(|error: toml::de::Error| seeds_error(error.message().into()))?;
            let seed_end = range
                .first
                .checked_add(range.count)
                .filter(|_| range.count <= MAX_POINTS as u64);
            (range.first..seed_end.ok_or_else(|| seeds_error(format!("{} seeds", range.count)))?)
                .collect()
        }
    };
    if seeds.is_empty() {
        return Err(seeds_error("no seed".to_string()));
    }
    Ok(Some(seeds.into_iter().map(Value::from).collect()))
}

/// Converts a TOML value to JSON; values that JSON lacks are errors.
fn json_value(value: &toml::Value, field: &str, located: &Located<'_>) -> Result<Value, SpecError> {
    let type_error = |found: &str| {
        located.error_at(
            field,
            found,
            "a text, a number, true or false, a list or a table of these",
        )
    };
    match value {
        toml::Value::Datetime(_) => Err(type_error("a date")),
        toml::Value::Float(number) if !number.is_finite() => {
            Err(type_error("a number that is not finite"))
        }
        value => serde_json::to_value(value).map_err(|error| type_error(&error.to_string())),
    }
}

fn parse_filters(
    field: &str,
    tables: &[toml::Table],
    axes: &[SweepAxis],
    located: &Located<'_>,
) -> Result<Vec<BTreeMap<String, Vec<Value>>>, SpecError> {
    let axis_names = || axes.iter().map(|axis| axis.name.as_str());
    let parse_filter = |(index, table): (usize, &toml::Table)| {
        let mut filter = BTreeMap::new();
        for (name, value) in table {
            let field_path = format!("{field}[{index}].{name}");
            if !axis_names().any(|axis_name| axis_name == name) {
                let expected = format!(
                    "one of the axes {}",
                    axis_names().collect::<Vec<_>>().join(", ")
                );
                let nearest_axis = nearest_name(name, axis_names()).map(Box::from);
                return Err(SpecError {
                    nearest: nearest_axis,
                    ..located.error_at(&field_path, format!("'{name}'"), expected)
                });
            }
            let values = match value {
                toml::Value::Array(values) => values
                    .iter()
                    .map(|value| json_value(value, &field_path, located))
                    .collect(),
                value => json_value(value, &field_path, located).map(|value| vec![value]),
            }?;
            let is_axis_value = |candidate: &Value| {
                axes.iter().any(|a| {
                    a.name == *name && a.values.iter().any(|v| matches_value(v, candidate))
                })
            };
            if let Some(unknown_value) = values.iter().find(|candidate| !is_axis_value(candidate)) {
                return Err(located.error_at(
                    &field_path,
                    unknown_value.to_string(),
                    "values of that axis",
                ));
            }
            filter.insert(name.clone(), values);
        }
        if filter.is_empty() {
            return Err(located.error_at(
                &format!("{field}[{index}]"),
                "nothing",
                "axes with values",
            ));
        }
        Ok(filter)
    };
    tables.iter().enumerate().map(parse_filter).collect()
}

/// Does a value match? The name of a policy also matches the policy with parameters.
pub fn matches_value(value: &Value, pattern: &Value) -> bool {
    value == pattern
        || (value.is_object() && pattern.is_string() && value.get("name") == Some(pattern))
}
