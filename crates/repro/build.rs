//! Computes digests of the sources on which simulated runs depend.
//!
//! Method: every module of this crate (a file or directory below `src`) depends on the modules and crates that its
//! code names; crates depend on those that their manifests and the lock file name. The digest of a module covers the
//! compiler's version and the code of everything that the module reaches. Lines of comments, blank lines and tests do
//! not affect runs, so they are left out; a changed layout makes runs again, because that is cheaper than a parser.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use sha2::{Digest, Sha256};

/// Crates whose sources do not affect stored runs: a run's key contains the machine by value or the digest of all
/// built-in machines, and the others draw, write or read files.
const WITHOUT_INFLUENCE: [&str; 3] = ["cachemate-spec", "cachemate-report", "cachemate-files"];
/// Modules of this crate that store runs or describe results, but simulate nothing. `recordings` counts only for runs
/// of recorded programs.
const OUTSIDE_RUNS: [&str; 6] = ["index", "lib", "recordings", "sources", "encoding", "store"];

fn main() {
    let root = Path::new("../..");
    let workspace = Workspace::read(root);
    let rows = module_digests(root, &workspace);
    let table: String = rows
        .iter()
        .map(|(name, digest)| format!("    (\"{name}\", \"{digest}\"),\n"))
        .collect();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo names the directory"));
    fs::write(out.join("sources.rs"), format!("&[\n{table}]\n"))
        .expect("cargo's directory can be written to");
    for watched in ["build.rs", "src", "../../Cargo.lock"] {
        println!("cargo::rerun-if-changed={watched}");
    }
    for name in workspace.manifests.keys() {
        println!(
            "cargo::rerun-if-changed={}",
            source_dir(root, name).display()
        );
    }
}

pub fn module_digests(root: &Path, workspace: &Workspace) -> BTreeMap<String, String> {
    let modules = read_modules(&source_dir(root, "cachemate-repro"));
    let module_digest =
        |name: &String| source_digest(&reachable_modules(name, &modules), &modules, workspace);
    modules
        .keys()
        .map(|name| (name.clone(), module_digest(name)))
        .collect()
}

/// Code of one module, with the names in the code.
#[derive(Default)]
struct ModuleCode {
    text: String,
    /// Names that follow `crate::`.
    paths: BTreeSet<String>,
    /// Names that follow `super::`, most of which are modules in the same directory.
    siblings: BTreeSet<String>,
    /// All identifiers.
    words: BTreeSet<String>,
    /// Items that the module declares.
    items: BTreeSet<String>,
}

/// Files of a directory and its subdirectories with this extension, ordered by name.
fn files_with(extension: &str, dir: &Path) -> Vec<PathBuf> {
    let (mut files, mut pending) = (Vec::new(), vec![dir.to_path_buf()]);
    while let Some(path) = pending.pop() {
        match fs::read_dir(&path) {
            Ok(entries) => pending.extend(entries.flatten().map(|entry| entry.path())),
            Err(_) if path.extension().is_some_and(|found| found == extension) => files.push(path),
            Err(_) => {}
        }
    }
    files.sort();
    files
}

fn read_modules(src: &Path) -> BTreeMap<String, ModuleCode> {
    let mut modules: BTreeMap<String, ModuleCode> = BTreeMap::new();
    for (file, code) in read_code(src) {
        let relative = file
            .strip_prefix(src)
            .expect("a file below src")
            .with_extension("");
        let first = relative
            .iter()
            .next()
            .expect("a file has a name")
            .to_string_lossy()
            .into_owned();
        modules.entry(first).or_default().add(&code);
    }
    modules
}

/// The code of a crate by file, without files of tests.
fn read_code(src: &Path) -> Vec<(PathBuf, String)> {
    let is_test = |file: &PathBuf| {
        let path = file.with_extension("");
        path.iter()
            .any(|part| part == "tests" || part.to_string_lossy().ends_with("_tests"))
    };
    let files = files_with("rs", src)
        .into_iter()
        .filter(|file| !is_test(file));
    files
        .map(|file| {
            let text = fs::read_to_string(&file).expect("a source file can be read");
            let code = code_lines(&text);
            (file, code)
        })
        .collect()
}

/// The lines of code of a file, up to a module of tests, which is the last item.
fn code_lines(text: &str) -> String {
    let tests = text.find("\n#[cfg(test)]\nmod tests {");
    let code = &text[..tests.unwrap_or(text.len())];
    code.lines()
        .filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with("//"))
        .fold(String::new(), |code, line| code + line + "\n")
}

impl ModuleCode {
    fn add(&mut self, code: &str) {
        self.text.push_str(code);
        let words: Vec<&str> = words_of(code).collect();
        let declares = |word: &str| {
            ["struct", "enum", "trait", "type", "fn", "const", "static"].contains(&word)
        };
        let declared = words.windows(2).filter(|pair| declares(pair[0]));
        self.items.extend(declared.map(|pair| pair[1].to_string()));
        self.words.extend(words.into_iter().map(str::to_string));
        let names_after = |prefix| code.split(prefix).skip(1).flat_map(first_names);
        self.paths.extend(names_after("crate::"));
        self.siblings.extend(names_after("super::"));
    }
}

fn words_of(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
}

/// The name at the start of a path, or the first names of a group: `a` and `b` of `{a::c, b::{d, e}}`.
fn first_names(path: &str) -> Vec<String> {
    let Some(group) = path.strip_prefix('{') else {
        let end = path.find(|c: char| !c.is_alphanumeric() && c != '_');
        return vec![path[..end.unwrap_or(path.len())].to_string()];
    };
    let (mut depth, mut top_level) = (0, String::new());
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            _ if depth == 0 => top_level.push(c),
            _ => {}
        }
    }
    let paths = top_level.split(',');
    paths
        .filter_map(|path| words_of(path).next())
        .map(str::to_string)
        .collect()
}

/// Modules that a module's code reaches, including itself. A name that no module declares reaches all modules.
fn reachable_modules(name: &str, modules: &BTreeMap<String, ModuleCode>) -> BTreeSet<String> {
    let (mut reached, mut pending) = (BTreeSet::new(), vec![name.to_string()]);
    while let Some(name) = pending.pop() {
        if !reached.insert(name.clone()) {
            continue;
        }
        let ModuleCode {
            paths, siblings, ..
        } = &modules[&name];
        pending.extend(
            paths
                .iter()
                .chain(siblings)
                .filter(|path| modules.contains_key(*path))
                .cloned(),
        );
        for path in paths.iter().filter(|path| !modules.contains_key(*path)) {
            let declares_path = |(_, module): &(&String, &ModuleCode)| module.items.contains(path);
            let declaring: Vec<String> = modules
                .iter()
                .filter(declares_path)
                .map(|(module, _)| module.clone())
                .collect();
            pending.extend(if declaring.is_empty() {
                modules.keys().cloned().collect()
            } else {
                declaring
            });
        }
        pending.retain(|module| !OUTSIDE_RUNS.contains(&module.as_str()));
    }
    reached
}

/// Crates of the workspace, with their manifests and the lock file.
pub struct Workspace {
    /// Dependencies of each crate of the workspace.
    manifests: BTreeMap<String, BTreeSet<String>>,
    codes: BTreeMap<String, String>,
    /// Version and dependencies of each package in the lock file.
    locked: BTreeMap<String, BTreeSet<(String, Vec<String>)>>,
}

fn source_dir(root: &Path, name: &str) -> PathBuf {
    root.join("crates")
        .join(name.trim_start_matches("cachemate-"))
        .join("src")
}

impl Workspace {
    pub fn read(root: &Path) -> Self {
        let mut manifests = BTreeMap::new();
        let mut pending = vec!["cachemate-repro".to_string()];
        while let Some(name) = pending.pop() {
            let manifest = root
                .join("crates")
                .join(name.trim_start_matches("cachemate-"))
                .join("Cargo.toml");
            let text = fs::read_to_string(&manifest).expect("a crate has a manifest");
            let dependencies: BTreeSet<String> = dependency_names(&text).into_iter().collect();
            let is_new = |name: &&String| {
                name.starts_with("cachemate-") && !WITHOUT_INFLUENCE.contains(&name.as_str())
            };
            pending.extend(
                dependencies
                    .iter()
                    .filter(is_new)
                    .filter(|name| !manifests.contains_key(*name))
                    .cloned(),
            );
            manifests.insert(name, dependencies);
        }
        let read_crate_code = |name: &String| {
            let src = source_dir(root, name);
            // Tables that the code includes.
            let tables = files_with("toml", &src)
                .into_iter()
                .map(|file| fs::read_to_string(file).expect("a readable file"));
            let code = read_code(&src).into_iter().map(|(_, code)| code);
            (name.clone(), code.chain(tables).collect::<String>())
        };
        let codes = manifests
            .keys()
            .filter(|name| *name != "cachemate-repro")
            .map(read_crate_code)
            .collect();
        let lock = fs::read_to_string(root.join("Cargo.lock")).unwrap_or_default();
        Workspace {
            codes,
            manifests,
            locked: read_lock(&lock),
        }
    }

    /// The crates of this workspace, and the packages of others.
    fn reachable_packages(
        &self,
        names: impl IntoIterator<Item = String>,
    ) -> (BTreeSet<String>, BTreeSet<String>) {
        let (mut crates, mut packages) = (BTreeSet::new(), BTreeSet::new());
        let mut pending: Vec<String> = names.into_iter().collect();
        while let Some(name) = pending.pop() {
            if WITHOUT_INFLUENCE.contains(&name.as_str()) {
                continue;
            }
            if let Some(dependencies) = self.manifests.get(&name) {
                if crates.insert(name) {
                    pending.extend(dependencies.iter().cloned());
                }
            } else if packages.insert(name.clone()) {
                let versions = self.locked.get(&name).into_iter().flatten();
                pending.extend(versions.flat_map(|(_, dependencies)| dependencies.iter().cloned()));
            }
        }

        (crates, packages)
    }
}

/// Names in the manifest's table of dependencies.
fn dependency_names(manifest: &str) -> Vec<String> {
    let lines = manifest
        .lines()
        .skip_while(|line| line.trim() != "[dependencies]")
        .skip(1);
    let names = lines
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| line.split(['.', '=', ' ']).next());
    names
        .filter(|name| !name.is_empty() && !name.starts_with('#'))
        .map(str::to_string)
        .collect()
}

fn read_lock(lock: &str) -> BTreeMap<String, BTreeSet<(String, Vec<String>)>> {
    let mut packages: BTreeMap<String, BTreeSet<(String, Vec<String>)>> = BTreeMap::new();
    for package in lock.split("[[package]]").skip(1) {
        let package_field = |name: &str| {
            let line = package
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""));
            line.map_or(String::new(), |value| {
                value.trim_end_matches('"').to_string()
            })
        };

        let listed = package
            .split("dependencies = [")
            .nth(1)
            .and_then(|list| list.split(']').next())
            .unwrap_or("");
        let names = listed.split(',').map(|name| {
            name.trim()
                .trim_matches('"')
                .split(' ')
                .next()
                .unwrap_or("")
        });
        let dependencies = names
            .filter(|name| !name.is_empty())
            .map(str::to_string)
            .collect();
        packages
            .entry(package_field("name"))
            .or_default()
            .insert((package_field("version"), dependencies));
    }

    packages
}

fn source_digest(
    reached: &BTreeSet<String>,
    modules: &BTreeMap<String, ModuleCode>,
    workspace: &Workspace,
) -> String {
    let mut digest = Sha256::new();
    let is_named_in_code = |name: &String| {
        reached
            .iter()
            .any(|module| modules[module].words.contains(&name.replace('-', "_")))
    };
    let used_crates = workspace.manifests["cachemate-repro"]
        .iter()
        .filter(|name| is_named_in_code(name))
        .cloned();
    let (crates, packages) = workspace.reachable_packages(used_crates);
    for module in reached {
        digest.update(format!("module {module}\n{}\n", modules[module].text));
    }

    for name in &crates {
        digest.update(format!("crate {name}\n{}\n", workspace.codes[name]));
    }

    for name in &packages {
        let versions = workspace
            .locked
            .get(name)
            .into_iter()
            .flatten()
            .map(|(version, _)| version.as_str());
        digest.update(format!(
            "package {name} {}\n",
            versions.collect::<Vec<&str>>().join(" ")
        ));
    }

    digest.update(compiler_version());
    digest
        .finalize()
        .iter()
        .take(16)
        .fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").expect("a string takes every digit");
            text
        })
}

fn compiler_version() -> Vec<u8> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    Command::new(rustc)
        .arg("-V")
        .output()
        .map(|answer| answer.stdout)
        .unwrap_or_default()
}
