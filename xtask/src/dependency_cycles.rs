//! Checks that files of a crate do not use one another in a cycle, because files in a cycle cannot be read in
//! sequence. A file and its parent may use each other, because they form one module.
//!
//! Method: `use` lines and paths that begin with `crate`, `self` or `super` are resolved to files; test code is
//! ignored. Two files are in one cycle if each can be reached from the other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Path of a file's module; empty for the crate's root.
type Module = Vec<String>;

/// Adds a complaint for each cycle of a crate.
///
/// # Errors
/// The tree cannot be read.
pub fn check(
    crate_name: &str,
    src: &Path,
    files: &[PathBuf],
    complaints: &mut Vec<String>,
) -> io::Result<()> {
    let edges = file_edges(src, files)?;
    for cycle in find_cycles(&edges) {
        let names: Vec<String> = cycle.iter().map(|module| module.join("/")).collect();
        complaints.push(format!(
            "crates/{crate_name}: files that use one another in a cycle: {}",
            names.join(", ")
        ));
    }
    Ok(())
}

/// Parents and children of a file do not count.
fn file_edges(src: &Path, files: &[PathBuf]) -> io::Result<BTreeMap<Module, BTreeSet<Module>>> {
    let mut texts = BTreeMap::new();
    for file in files {
        if let Ok(relative_path) = file.strip_prefix(src) {
            texts.insert(module_of(relative_path), fs::read_to_string(file)?);
        }
    }
    let modules: BTreeSet<Module> = texts.keys().cloned().collect();
    let used_files_of = |(module, text): (&Module, &String)| {
        let is_related = |other: &Module| other.starts_with(module) || module.starts_with(other);
        let used_modules: BTreeSet<Module> = crate_paths(text)
            .iter()
            .filter_map(|path| resolve_path(module, path, &modules))
            .filter(|used| !is_related(used))
            .collect();
        (module.clone(), used_modules)
    };
    Ok(texts.iter().map(used_files_of).collect())
}

fn module_of(relative_path: &Path) -> Module {
    let mut module: Module = relative_path
        .with_extension("")
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    if module
        .last()
        .is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main"))
    {
        module.pop();
    }
    module
}

/// Tests are left out, and groups are expanded.
fn crate_paths(text: &str) -> Vec<String> {
    let code = text.split("mod tests {").next().unwrap_or_default();
    let code: String = code
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n");

    let mut paths = Vec::new();
    let mut remaining_code = code.as_str();
    while let Some(index) = ["crate::", "self::", "super::"]
        .iter()
        .filter_map(|root| remaining_code.find(root))
        .min()
    {
        let is_path_start = !remaining_code[..index]
            .ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
        let tree = &remaining_code[index..index + tree_length(&remaining_code[index..])];
        if is_path_start {
            expand(&tree.split_whitespace().collect::<String>(), &mut paths);
        }
        remaining_code = &remaining_code[index + tree.len().max(1)..];
    }

    paths
}

/// The bytes of a path with its groups, at the start of `text`.
fn tree_length(text: &str) -> usize {
    let mut depth = 0;
    for (index, c) in text.char_indices() {
        match c {
            '{' if depth > 0 || text[..index].ends_with("::") => depth += 1,
            '}' if depth > 0 => {
                depth -= 1;
                if depth == 0 {
                    return index + 1;
                }
            }
            _ if depth > 0 || c.is_alphanumeric() || c == '_' || c == ':' => {}
            _ => return index,
        }
    }
    text.len()
}

/// Expands `a::{b, c::{d, e}}` to `a::b`, `a::c::d` and `a::c::e`.
fn expand(tree: &str, paths: &mut Vec<String>) {
    let Some((head, group)) = tree.split_once('{') else {
        paths.push(tree.to_string());
        return;
    };
    let (mut depth, mut part_start) = (0, 0);
    let group = group.strip_suffix('}').unwrap_or(group);
    for (index, c) in group.char_indices().chain([(group.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand(&format!("{head}{}", &group[part_start..index]), paths);
                part_start = index + 1;
            }
            _ => {}
        }
    }
}

/// The file with the longest part of this path; `None` if there is none.
fn resolve_path(module: &Module, path: &str, modules: &BTreeSet<Module>) -> Option<Module> {
    let mut current = module.clone();
    for (position, part) in path.split("::").enumerate() {
        match part {
            "crate" if position == 0 => current.clear(),
            "self" => {}
            "super" => {
                current.pop();
            }
            name => current.push(name.to_string()),
        }
    }
    while !current.is_empty() && !modules.contains(&current) {
        current.pop();
    }
    (!current.is_empty()).then_some(current)
}

/// Sets of files in which every file can be reached from every other file.
fn find_cycles(edges: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<BTreeSet<Module>> {
    let reachable_files: BTreeMap<&Module, BTreeSet<&Module>> = edges
        .keys()
        .map(|module| (module, files_reachable_from(module, edges)))
        .collect();
    let cycle_of = |module: &&Module| -> BTreeSet<Module> {
        let reaches_back = |other: &&&Module| reachable_files[**other].contains(*module);
        reachable_files[module]
            .iter()
            .filter(reaches_back)
            .map(|other| (*other).clone())
            .collect()
    };

    let all_cycles: BTreeSet<BTreeSet<Module>> = edges
        .keys()
        .collect::<Vec<_>>()
        .iter()
        .map(cycle_of)
        .collect();
    all_cycles
        .into_iter()
        .filter(|cycle| cycle.len() > 1)
        .collect()
}

fn files_reachable_from<'a>(
    start: &'a Module,
    edges: &'a BTreeMap<Module, BTreeSet<Module>>,
) -> BTreeSet<&'a Module> {
    let (mut reached_modules, mut pending) = (BTreeSet::new(), vec![start]);
    while let Some(module) = pending.pop() {
        for used in edges.get(module).into_iter().flatten() {
            if reached_modules.insert(used) {
                pending.push(used);
            }
        }
    }
    reached_modules
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycles_of(files: &[(&str, &str)]) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let mut paths = Vec::new();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            paths.push(path);
        }
        let mut complaints = Vec::new();
        check("name", dir.path(), &paths, &mut complaints).unwrap();
        complaints
    }

    /// Is a cycle through groups, `super` and a third file detected, with all its files named?
    #[test]
    fn a_cycle_is_named_by_its_files() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::{b::{One, Two}, other};"),
            ("b/mod.rs", "fn f() { super::c::g() }"),
            ("c.rs", "use super::a::Three;\n"),
        ];
        assert_eq!(
            cycles_of(&files),
            ["crates/name: files that use one another in a cycle: a, b, c"]
        );
    }

    /// Are parents and their children, tests, comments and a chain accepted?
    #[test]
    fn parents_tests_comments_and_chains_are_accepted() {
        let files = [
            (
                "a.rs",
                "use crate::a::below::X;\n// crate::b::Y\n#[cfg(test)]\nmod tests {\n use crate::b::Z;\n}\n",
            ),
            ("a/below.rs", "use super::W; use crate::b::V;"),
            ("b.rs", "use crate::a::W;"),
        ];
        assert_eq!(cycles_of(&files[..2]), [] as [&str; 0]);
        assert_eq!(cycles_of(&[files[0], files[2]]), [] as [&str; 0]);
    }
}
