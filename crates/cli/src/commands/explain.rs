//! `cachemate explain`: explains a program's placement.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::anyhow;
use clap::Args;

use super::history::{find_state_dir, read_ended_service};
use super::status::SocketArg;
use crate::args::JsonArg;
use crate::history_text::service_text;
use crate::service_text::nearest_name_hint;
use crate::session::Session;
use crate::status_text::{ExplainJson, explain_text};
use cachemate_daemon::socket;
use cachemate_page::{ServiceSnapshot, TaskSnapshot, describe_thread};

/// Explain a service or a program: the slowdown and its causes, the reasons of the placement, and the measurements
#[derive(Args)]
pub struct Explain {
    /// A service such as redis, unit/redis or pod/NAMESPACE/NAME, a process or thread id, or a program's name
    #[arg(value_name = "SERVICE|PID|NAME")]
    program: String,
    #[command(flatten)]
    socket: SocketArg,
    #[command(flatten)]
    json: JsonArg,
}

/// Maximum length of a program's name that the kernel stores, in bytes.
const MAX_NAME_BYTES: usize = 15;

/// `program` is a process id, a thread id or a name.
fn is_named(task: &TaskSnapshot, program: &str) -> bool {
    match program.parse::<i32>() {
        Ok(id) => task.pid == id || task.tid == id,
        Err(_) => {
            let name_bytes = program.as_bytes();
            task.name.as_bytes() == &name_bytes[..name_bytes.len().min(MAX_NAME_BYTES)]
        }
    }
}

/// For a program that no managed task matches: the error names the reason.
fn no_data_error(
    program: &str,
    tasks: &[TaskSnapshot],
    services: &[ServiceSnapshot],
) -> anyhow::Error {
    if program.parse::<i32>().is_err() {
        let programs = tasks.iter().map(|task| task.name.as_str());
        let names = programs.chain(services.iter().map(|service| service.name.as_str()));
        let hint = nearest_name_hint(program, names);
        return anyhow!(
            "no managed service or program is named '{program}'{hint}; cachemate status lists all"
        );
    }
    let explanation =
        match cachemate_files::path_exists(std::path::Path::new(&format!("/proc/{program}"))) {
            true => "no rule of the configuration matches it, or it started after the last window",
            false => "no such process exists",
        };
    anyhow!("process {program} is not managed: {explanation}")
}

impl Explain {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let status = socket::query_status(&self.socket.path())?;
        let named_services: Vec<ServiceSnapshot> = status
            .snapshot
            .services
            .iter()
            .filter(|service| service.identity().is_named(&self.program))
            .cloned()
            .collect();
        let is_in_named_service = |task: &TaskSnapshot| {
            named_services
                .iter()
                .any(|service| service.task_ids.contains(&task.task))
        };
        let is_explained =
            |task: &TaskSnapshot| is_named(task, &self.program) || is_in_named_service(task);
        let tasks: Vec<TaskSnapshot> = status
            .snapshot
            .tasks
            .iter()
            .filter(|task| is_explained(task))
            .cloned()
            .collect();
        if tasks.is_empty() && named_services.is_empty() {
            let state_dir = find_state_dir(status.state_dir.map(PathBuf::from), &self.socket);
            if let Ok(history) = read_ended_service(&state_dir, &self.program) {
                return session.print_result(self.json.json, &history, || {
                    let text = service_text(&history, &self.program);
                    format!("{} does not run now; its history\n{text}", self.program)
                });
            }
            return Err(no_data_error(
                &self.program,
                &status.snapshot.tasks,
                &status.snapshot.services,
            ));
        }
        let pids: BTreeSet<i32> = tasks.iter().map(|task| task.pid).collect();
        let sole_pid = if let [pid] = pids.iter().copied().collect::<Vec<i32>>()[..] {
            Some(pid)
        } else {
            None
        };
        let has_selected_task = |ids: &[u32]| tasks.iter().any(|task| ids.contains(&task.task));
        let shares_cache = |task: &TaskSnapshot| {
            tasks
                .iter()
                .any(|own_task| own_task.cache.is_some() && own_task.cache == task.cache)
        };
        let other_tasks = status
            .snapshot
            .tasks
            .iter()
            .filter(|task| !is_explained(task) && shares_cache(task));
        let task_labels: Vec<String> = tasks
            .iter()
            .map(|task| describe_thread(&task.name, task.tid))
            .collect();
        let result = ExplainJson {
            pid: self.program.parse().ok().or(sole_pid),
            policy: status.policy.clone(),
            mode: status.mode,
            co_runners: other_tasks
                .map(|task| describe_thread(&task.name, task.tid))
                .collect(),
            decisions: status
                .decisions
                .iter()
                .filter(|decision| has_selected_task(&decision.tasks))
                .cloned()
                .collect(),
            refused: status
                .snapshot
                .refused
                .iter()
                .filter(|line| task_labels.iter().any(|name| line.contains(name)))
                .cloned()
                .collect(),
            conflicts: status
                .kernel_conflicts
                .iter()
                .filter(|conflict| tasks.iter().any(|task| task.pid == conflict.pid))
                .map(|conflict| conflict.detail.clone())
                .collect(),
            services: match named_services.is_empty() {
                false => named_services,
                true => {
                    let owns_selected_task = |service: &&ServiceSnapshot| {
                        tasks
                            .iter()
                            .any(|task| service.task_ids.contains(&task.task))
                    };
                    status
                        .snapshot
                        .services
                        .iter()
                        .filter(owns_selected_task)
                        .cloned()
                        .collect()
                }
            },
            promises: status
                .snapshot
                .promises
                .iter()
                .filter(|promise| promise.pid.is_some_and(|pid| pids.contains(&pid)))
                .cloned()
                .collect(),
            tasks,
        };
        session.print_result(self.json.json, &result, || explain_text(&result))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_task(pid: i32, tid: i32, name: &str) -> TaskSnapshot {
        TaskSnapshot {
            pid,
            tid,
            name: name.into(),
            ..TaskSnapshot::default()
        }
    }

    fn sample_service(name: &str) -> ServiceSnapshot {
        serde_json::from_value(serde_json::json!({
            "kind": "unit", "name": name, "tasks": 1, "task_ids": [1], "unread_programs": null, "cpu_share": 0.1,
            "waiting_share": null, "run_time_percent": null, "run_time_range_percent": null, "cache_percent": null,
            "cache_range_percent": null, "cache_source": null, "cache_by": [], "waiting_percent": null,
            "waiting_range_percent": null, "waiting_by": [], "reason": null, "max_slowdown_percent": null
        }))
        .unwrap()
    }

    /// Is a program found by process id, thread id and name, even if the kernel truncated the name, and is the nearest
    /// name suggested?
    #[test]
    fn programs_are_found_by_id_and_by_name() {
        let redis = sample_task(40, 41, "redis-server");
        for given in ["40", "41", "redis-server"] {
            assert!(is_named(&redis, given), "{given}");
        }
        assert!(!is_named(&redis, "redis"));
        assert!(is_named(
            &sample_task(1, 1, "a-very-long-com"),
            "a-very-long-command"
        ));
        let message = no_data_error("redis-sever", &[redis], &[]).to_string();
        assert!(message.contains("did you mean 'redis-server'"), "{message}");
        let message = no_data_error("rediss", &[], &[sample_service("redis.service")]).to_string();
        assert!(message.contains("did you mean 'redis'"), "{message}");
    }
}
