//! Draws the picture of the crates, `docs/pictures/crates.svg`, from their `Cargo.toml` files.
//!
//! Each crate stands one row below the lowest crate that it uses. An arrow is omitted if a longer path implies it, so
//! that the picture shows an order in which the crates can be read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

const PICTURE_FILE: &str = "docs/pictures/crates.svg";
const CRATE_PREFIX: &str = "cachemate-";

const BOX_WIDTH: usize = 96;
const BOX_HEIGHT: usize = 30;
const COLUMN_WIDTH: usize = 116;
const ROW_HEIGHT: usize = 74;
const MARGIN: usize = 14;

/// Each crate, with the crates that it uses directly.
type CrateGraph = BTreeMap<String, BTreeSet<String>>;

/// Draws the picture.
///
/// # Errors
/// A `Cargo.toml` cannot be read, or the picture cannot be written.
pub fn write(root: &Path) -> Result<(), String> {
    std::fs::write(root.join(PICTURE_FILE), draw_graph(&read_graph(root)?))
        .map_err(|error| format!("{PICTURE_FILE}: {error}"))
}

/// A complaint if the picture differs from the one that the sources produce.
///
/// # Errors
/// A `Cargo.toml` cannot be read.
pub fn check(root: &Path) -> Result<Vec<String>, String> {
    let picture = std::fs::read_to_string(root.join(PICTURE_FILE)).unwrap_or_default();
    let is_current = picture == draw_graph(&read_graph(root)?);
    let complaint = format!(
        "{PICTURE_FILE}: found another picture than the crates give, expected `cargo run -p xtask -- map`"
    );
    Ok(if is_current {
        Vec::new()
    } else {
        vec![complaint]
    })
}

fn read_graph(root: &Path) -> Result<CrateGraph, String> {
    let dir = root.join("crates");
    let read_error = |error: std::io::Error| format!("{}: {error}", dir.display());
    let mut graph = CrateGraph::new();
    for entry in std::fs::read_dir(&dir).map_err(read_error)? {
        let path = entry.map_err(read_error)?.path().join("Cargo.toml");
        let Ok(text) = std::fs::read_to_string(&path) else {
            continue;
        };
        let manifest: toml::Table = text
            .parse()
            .map_err(|error| format!("{}: {error}", path.display()))?;
        let name = path
            .parent()
            .and_then(Path::file_name)
            .map_or(String::new(), |name| name.to_string_lossy().into());
        graph.insert(name, used_crates(&manifest).map(str::to_string).collect());
    }
    Ok(graph)
}

/// Crates of this workspace on which a manifest depends, without their common prefix.
pub fn used_crates(manifest: &toml::Table) -> impl Iterator<Item = &str> {
    let dependencies = manifest.get("dependencies").and_then(toml::Value::as_table);
    dependencies
        .into_iter()
        .flat_map(|table| table.keys())
        .filter_map(|key| key.strip_prefix(CRATE_PREFIX))
}

/// 0 for crates that use no other crate; every other crate is below all crates that it uses.
fn assign_rows(graph: &CrateGraph) -> BTreeMap<&str, usize> {
    let mut rows: BTreeMap<&str, usize> = graph.keys().map(|name| (name.as_str(), 0)).collect();
    // Cargo rejects cycles, so a path has fewer edges than there are crates.
    for _ in 0..graph.len() {
        for (name, dependencies) in graph {
            let row = dependencies
                .iter()
                .filter_map(|used| rows.get(used.as_str()))
                .max()
                .map_or(0, |row| row + 1);
            rows.insert(name, row);
        }
    }
    rows
}

/// Removes the edges that a longer path implies.
fn remove_implied_edges(graph: &CrateGraph) -> CrateGraph {
    let reachable_from = |start: &str| {
        let (mut reached_crates, mut pending) = (BTreeSet::new(), vec![start.to_string()]);
        while let Some(name) = pending.pop() {
            for used in graph.get(&name).into_iter().flatten() {
                if reached_crates.insert(used.clone()) {
                    pending.push(used.clone());
                }
            }
        }
        reached_crates
    };

    let direct_uses = |used: &BTreeSet<String>| {
        let implied_crates: BTreeSet<String> =
            used.iter().flat_map(|used| reachable_from(used)).collect();
        used.difference(&implied_crates).cloned().collect()
    };
    graph
        .iter()
        .map(|(name, used)| (name.clone(), direct_uses(used)))
        .collect()
}

fn draw_graph(graph: &CrateGraph) -> String {
    let (rows, edges) = (assign_rows(graph), remove_implied_edges(graph));
    let mut levels: Vec<Vec<&str>> = vec![Vec::new(); rows.values().max().map_or(0, |row| row + 1)];
    rows.iter().for_each(|(name, &row)| levels[row].push(name));
    let columns = levels.iter().map(Vec::len).max().unwrap_or(0);
    let (width, height) = (
        2 * MARGIN + columns * COLUMN_WIDTH,
        2 * MARGIN + levels.len() * ROW_HEIGHT - (ROW_HEIGHT - BOX_HEIGHT),
    );
    let mut centers: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (row, level) in levels.iter_mut().enumerate() {
        // A crate is placed near the mean position of the crates that it uses, so that fewer arrows cross.
        let preferred_position = |name: &str| {
            let xs: Vec<usize> = edges[name]
                .iter()
                .filter_map(|used| centers.get(used.as_str()))
                .map(|at| at.0)
                .collect();
            if xs.is_empty() {
                0
            } else {
                xs.iter().sum::<usize>() / xs.len()
            }
        };
        level.sort_by_key(|name| (preferred_position(name), name.to_string()));
        let left_edge = (width - level.len() * COLUMN_WIDTH) / 2;
        for (column, name) in level.iter().enumerate() {
            centers.insert(
                name,
                (
                    left_edge + column * COLUMN_WIDTH + COLUMN_WIDTH / 2,
                    MARGIN + row * ROW_HEIGHT + BOX_HEIGHT / 2,
                ),
            );
        }
    }
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         role=\"img\" aria-label=\"The crates and their dependencies\">\n<style>rect{{fill:#eef3f8;stroke:#4a6785}}\
         text{{font:13px sans-serif;fill:#16202b;text-anchor:middle}}path{{fill:none;stroke:#7d93a8}}</style>\n\
         <defs><marker id=\"a\" markerWidth=\"7\" markerHeight=\"7\" refX=\"6\" refY=\"3.5\" orient=\"auto\">\
         <path d=\"M0,0.5L6,3.5L0,6.5\"/></marker></defs>\n<rect width=\"{width}\" height=\"{height}\" \
         style=\"fill:#ffffff;stroke:none\"/>\n"
    );
    for (name, used) in &edges {
        let (x, y) = centers[name.as_str()];
        for (to_x, to_y) in used.iter().filter_map(|used| centers.get(used.as_str())) {
            let (from_y, to_y) = (y - BOX_HEIGHT / 2, to_y + BOX_HEIGHT / 2);
            let middle_y = (from_y + to_y) / 2;
            let _ = writeln!(
                svg,
                "<path d=\"M{x},{from_y}C{x},{middle_y} {to_x},{middle_y} {to_x},{to_y}\" marker-end=\"url(#a)\"/>"
            );
        }
    }
    for (name, (x, y)) in &centers {
        let _ = writeln!(
            svg,
            "<rect x=\"{}\" y=\"{}\" width=\"{BOX_WIDTH}\" height=\"{BOX_HEIGHT}\" rx=\"5\"/><text x=\"{x}\" y=\"{}\">{name}</text>",
            x - BOX_WIDTH / 2,
            y - BOX_HEIGHT / 2,
            y + 4
        );
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph_of(edges: &[(&str, &[&str])]) -> CrateGraph {
        edges
            .iter()
            .map(|(name, used)| {
                (
                    name.to_string(),
                    used.iter().map(|used| used.to_string()).collect(),
                )
            })
            .collect()
    }

    /// Is every crate below all that it uses, and is an edge omitted that a longer path implies?
    #[test]
    fn every_crate_is_below_all_that_it_uses() {
        let graph = graph_of(&[
            ("core", &[]),
            ("spec", &["core"]),
            ("cli", &["core", "spec"]),
        ]);
        assert_eq!(
            assign_rows(&graph),
            BTreeMap::from([("core", 0), ("spec", 1), ("cli", 2)])
        );
        assert_eq!(
            remove_implied_edges(&graph)["cli"],
            BTreeSet::from(["spec".to_string()])
        );
        assert_eq!(draw_graph(&graph).matches("marker-end").count(), 2);
    }

    /// Is a picture that the sources do not give rejected?
    #[test]
    fn a_stale_picture_is_rejected() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("crates/core")).unwrap();
        std::fs::create_dir_all(root.path().join("docs/pictures")).unwrap();
        std::fs::write(
            root.path().join("crates/core/Cargo.toml"),
            "[dependencies]\n",
        )
        .unwrap();
        assert_eq!(check(root.path()).unwrap().len(), 1);
        write(root.path()).unwrap();
        assert_eq!(check(root.path()).unwrap(), [""; 0]);
    }
}
