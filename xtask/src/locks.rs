//! Checks that the fuzzer's lock file contains the dependencies of the crates.
//!
//! Problem: the fuzzer is a workspace of its own, so a change that adds a dependency to a crate may not build it.
//! Method: every dependency in a crate's `Cargo.toml` must be in the lock file if that contains the crate.

use std::fs;
use std::io;
use std::path::Path;

const FUZZER_DIR: &str = "fuzz";

/// Complaints have the form `file: description`.
///
/// # Errors
/// A lock file or a manifest cannot be read.
pub fn check(root: &Path) -> io::Result<Vec<String>> {
    let mut complaints = Vec::new();
    let lock = read_toml(&root.join(FUZZER_DIR).join("Cargo.lock"))?;
    for package in lock
        .get("package")
        .and_then(|list| list.as_array())
        .into_iter()
        .flatten()
    {
        let Some(crate_name) = text_or_empty(package.get("name")).strip_prefix("cachemate-") else {
            continue;
        };
        let manifest = root.join("crates").join(crate_name).join("Cargo.toml");
        if !manifest.exists() {
            continue; // the package of the directory itself
        }

        for used_crate in missing_dependencies(&read_toml(&manifest)?, package) {
            complaints.push(format!(
                "{FUZZER_DIR}/Cargo.lock: found no '{used_crate}' for crates/{crate_name}, which uses it: cargo update \
                 --workspace --manifest-path {FUZZER_DIR}/Cargo.toml"
            ));
        }
    }

    Ok(complaints)
}

/// Dependencies in the manifest that the package in the lock file lacks.
fn missing_dependencies(manifest: &toml::Table, package: &toml::Value) -> Vec<String> {
    let locked_entries = package.get("dependencies").and_then(|list| list.as_array());
    // A lock file's entry is a name, or a name and a version if there are several versions.
    let locked_names: Vec<&str> = locked_entries
        .into_iter()
        .flatten()
        .filter_map(|entry| text_or_empty(Some(entry)).split(' ').next())
        .collect();
    let tables = ["dependencies", "build-dependencies"]
        .map(|name| manifest.get(name).and_then(|table| table.as_table()));
    let dependencies = tables.into_iter().flatten().flat_map(|table| table.keys());
    dependencies
        .filter(|name| !locked_names.contains(&name.as_str()))
        .cloned()
        .collect()
}

fn text_or_empty(value: Option<&toml::Value>) -> &str {
    value.and_then(|value| value.as_str()).unwrap_or_default()
}

fn read_toml(path: &Path) -> io::Result<toml::Table> {
    let error_in_file =
        |error: &dyn std::fmt::Display| io::Error::other(format!("{}: {error}", path.display()));
    fs::read_to_string(path)
        .map_err(|error| error_in_file(&error))?
        .parse()
        .map_err(|error: toml::de::Error| error_in_file(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a dependency that a lock file lacks reported by its name, and nothing else, whatever its version?
    #[test]
    fn a_dependency_that_a_lock_file_lacks_is_reported() {
        let manifest = "[dependencies]\nserde.workspace = true\nsyn = \"3\"\n[build-dependencies]\ncc = \"1\"\n\
                        [dev-dependencies]\ntempfile = \"3\"\n";
        let package: toml::Table =
            "name = \"cachemate-study\"\ndependencies = [\"syn 3.0.9\", \"libm\"]\n"
                .parse()
                .unwrap();
        let lacks = missing_dependencies(&manifest.parse().unwrap(), &toml::Value::Table(package));
        assert_eq!(lacks, ["serde", "cc"]);
    }

    /// Do the project's lock files contain all dependencies of its crates?
    #[test]
    fn the_projects_lock_files_are_complete() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        assert_eq!(check(root).unwrap(), Vec::<String>::new());
    }
}
