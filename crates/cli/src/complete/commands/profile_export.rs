//! `cachemate profile export`: writes the stored profiles of services as profile files.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::bail;
use cachemate_core::{Facts, ServiceIdentity, StoredServiceProfile};
use cachemate_daemon::paths;
use cachemate_daemon::service_profiles::{FILE_NAME, read_stored_profiles};
use cachemate_report::Table;
use cachemate_report::text::{escape_controls, format_names};
use cachemate_trace::{ProfileFile, ProfileSource};
use clap::Args;

use crate::args::JsonArg;
use crate::files::{check_output_path, write_json};
use crate::session::Session;

/// Write what the daemon has measured of the programs of services as profile files
///
/// The daemon stores the facts that it measures of each program of a service, so that the next start of the program
/// begins with them. This command writes one profile file for each stored program. A daemon on another host reads such
/// files by the key profiles of its configuration (profiles = ["DIR"]); plan and predict read them if the misses by
/// cache size were measured.
#[derive(Args)]
pub struct ProfileExport {
    /// Services, such as redis, redis.service or unit/redis; all services if none is given
    #[arg(value_name = "SERVICE")]
    services: Vec<String>,
    /// Directory of the files
    #[arg(short, long, value_name = "DIR", default_value = ".")]
    output: PathBuf,
    /// Overwrite files that exist
    #[arg(long)]
    force: bool,
    /// State directory of the daemon [default: the daemon's own default]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArg,
}

/// Kind of the source of a profile that was measured while its program ran.
pub const LIVE_SOURCE: &str = "live";
/// Maximum number of services that an error names.
const MAX_NAMED_SERVICES: usize = 12;
/// Maximum length of a file's name before its ending and number; a file system takes 255 bytes.
const MAX_STEM_BYTES: usize = 200;

impl ProfileExport {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let stored_path = self
            .state_dir
            .clone()
            .unwrap_or_else(paths::state_dir)
            .join(FILE_NAME);
        let stored_profiles = read_stored_profiles(&stored_path)
            .map_err(|error| anyhow::anyhow!("{}: {error}", stored_path.display()))?;
        if stored_profiles.is_empty() {
            bail!(
                "{}: no profile is stored; a daemon stores the profiles of the programs that its rules select",
                stored_path.display()
            );
        }
        let selected_profiles = self.select(&stored_profiles)?;
        let host = cachemate_files::read_text_limited(Path::new("/etc/hostname"), 1 << 12)
            .unwrap_or_default();
        let files: Vec<ProfileFile> = selected_profiles
            .iter()
            .map(|stored| profile_file(stored, host.trim()))
            .collect();
        if self.json.json {
            // With --json, no file is written.
            let result = BTreeMap::from([("profiles", files)]);
            return session.print_result(true, &result, String::new);
        }
        let file_paths: Vec<PathBuf> = file_names(&selected_profiles)
            .into_iter()
            .map(|name| self.output.join(name))
            .collect();
        // With --force each file is tried, so that one that cannot be written costs no other.
        if !self.force {
            file_paths
                .iter()
                .try_for_each(|path| check_output_path(path, false))?;
        }
        let mut table = Table::from_header("service | program | known | file");
        let mut failures = Vec::new();
        for ((stored, file), path) in selected_profiles.iter().zip(&files).zip(&file_paths) {
            if let Err(error) = write_json(path, file, self.force) {
                failures.push(format!("{error:#}"));
                continue;
            }
            table.add_row([
                service_of(stored).to_string(),
                stored.key.program.clone(),
                known_facts(stored),
                path.display().to_string(),
            ]);
        }
        session.print(&table.text())?;
        if !failures.is_empty() {
            bail!("{}", failures.join("; "));
        }
        Ok(())
    }

    /// Profiles of the named services; an error names a service that has none.
    fn select<'a>(
        &self,
        stored_profiles: &'a [StoredServiceProfile],
    ) -> anyhow::Result<Vec<&'a StoredServiceProfile>> {
        let is_of = |stored: &StoredServiceProfile, word: &str| service_of(stored).is_named(word);
        for word in &self.services {
            if !stored_profiles.iter().any(|stored| is_of(stored, word)) {
                let known_services: BTreeSet<String> = stored_profiles
                    .iter()
                    .map(|stored| escape_controls(&service_of(stored).to_string()))
                    .collect();
                let service_list = format_names(
                    &known_services.into_iter().collect::<Vec<_>>(),
                    MAX_NAMED_SERVICES,
                );
                bail!(
                    "SERVICE: found {}, expected one of the stored services: {service_list}",
                    escape_controls(word)
                );
            }
        }
        let is_selected = |stored: &&StoredServiceProfile| {
            self.services.is_empty() || self.services.iter().any(|word| is_of(stored, word))
        };
        Ok(stored_profiles.iter().filter(is_selected).collect())
    }
}

fn service_of(stored: &StoredServiceProfile) -> ServiceIdentity {
    ServiceIdentity::new(stored.key.kind, stored.key.service.clone())
}

/// Names the facts of a profile, in the words of `explain`.
fn known_facts(stored: &StoredServiceProfile) -> String {
    let mut origins = Vec::new();
    stored.profile.list_origins("", 0, &mut origins);
    origins
        .into_iter()
        .map(|origin| origin.fact)
        .collect::<Vec<_>>()
        .join(", ")
}

fn profile_file(stored: &StoredServiceProfile, host: &str) -> ProfileFile {
    let source = ProfileSource {
        tool: format!("cachemate {}", env!("CARGO_PKG_VERSION")),
        kind: LIVE_SOURCE.to_string(),
        from: Some(host.to_string()).filter(|host| !host.is_empty()),
        filter: None,
    };
    ProfileFile {
        profile: stored.profile.clone(),
        ..ProfileFile::new(stored.key.program.clone(), source)
    }
}

/// A name for each file, from the service and the program; equal ones are numbered.
fn file_names(stored_profiles: &[&StoredServiceProfile]) -> Vec<String> {
    let mut taken_names = BTreeSet::new();
    let name_of = |stored: &&StoredServiceProfile| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
        let stem: String = format!("{}-{}", stored.key.service, stored.key.program)
            .chars()
            .map(|c| if is_plain(c) { c } else { '-' })
            .take(MAX_STEM_BYTES)
            .collect();
        let stem = stem.trim_start_matches('.').to_string();
        let mut name = format!("{stem}.profile.json");
        let mut number = 1;
        while !taken_names.insert(name.clone()) {
            number += 1;
            name = format!("{stem}-{number}.profile.json");
        }
        name
    };
    stored_profiles.iter().map(name_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{Profile, ProfileKey, ServiceKind};

    fn stored(kind: ServiceKind, service: &str, program: &str) -> StoredServiceProfile {
        let key = ProfileKey {
            kind,
            service: service.into(),
            program: program.into(),
            image: None,
        };
        StoredServiceProfile {
            key,
            profile: Profile::default(),
            last_use: 1,
        }
    }

    /// Does each program have a file of its own, whose name contains no path?
    #[test]
    fn each_program_has_a_file_of_its_own() {
        let profiles = [
            stored(ServiceKind::Unit, "redis.service", "redis-server"),
            stored(ServiceKind::Container, "redis.service", "redis-server"),
            stored(ServiceKind::Command, "../etc/x", "a b"),
        ];
        let names = file_names(&profiles.iter().collect::<Vec<_>>());
        let expected = [
            "redis.service-redis-server",
            "redis.service-redis-server-2",
            "-etc-x-a-b",
        ];
        assert_eq!(names, expected.map(|stem| format!("{stem}.profile.json")));
    }
}
