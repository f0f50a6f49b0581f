//! Is the code in `docs/writing-a-policy.md` identical to this file's, a valid policy, and effective on the simulator
//! as the page says?

use std::collections::BTreeMap;

use cachemate_papers::conformance::check_policy;
use cachemate_pipeline::{Pipeline, StandardPipeline, miss_penalty_of_machine};
use cachemate_sim::kernels;
use cachemate_sim::machine::{RunLimit, SimMachine, SimOptions, SimProgram};

// The page's code begins here.
use cachemate_core::{Decision, Plan, Policy, Reason, TaskId, View, WindowLength};

/// Places streams on the last cache and all other programs on the rest.
pub struct StreamIsolation {
    /// Bytes read from memory per thousand instructions above which a program counts as a stream. Misses would not do,
    /// because a stream whose prefetchers stay ahead hardly misses.
    pub stream_from_bytes: f64,
}

impl StreamIsolation {
    /// `None` if nothing was counted: absent evidence is not zero.
    fn is_stream(&self, view: &View<'_>, task: TaskId) -> Option<bool> {
        let bytes = view
            .profiles
            .get(&task)?
            .rates
            .observed_read_bytes_per_kilo_instr?;
        Some(bytes.value >= self.stream_from_bytes)
    }
}

impl Policy for StreamIsolation {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000_000 });
        let mut reasons = Vec::new();
        let domains = view.last_level_domains();
        let Some((last, others)) = domains
            .split_last()
            .filter(|(_, others)| !others.is_empty())
        else {
            return Decision::new(plan, reasons); // one cache: nothing to choose
        };
        let rest = others
            .iter()
            .fold(others[0].clone(), |all, cpus| all.union(cpus));
        let online = view.online();

        for task in view.movable_tasks() {
            let before = view
                .previous_plan
                .affinity
                .get(&task.task)
                .filter(|cpus| cpus.intersects(&online));
            let Some(is_stream) = self.is_stream(view, task.task) else {
                // Without evidence the placement stays as it is.
                plan.affinity
                    .extend(before.map(|cpus| (task.task, cpus.clone())));
                continue;
            };

            let cpus = if is_stream { last } else { &rest };
            if before != Some(cpus) {
                let behavior = if is_stream {
                    "streams"
                } else {
                    "keeps data in the cache"
                };
                let text = format!("{{0}} {behavior}: to CPUs {cpus}");
                reasons.push(Reason::new(vec![task.task], text, Vec::new()));
            }
            plan.affinity.insert(task.task, cpus.clone());
        }

        Decision::new(plan, reasons)
    }
}
// The page's code ends here.

fn read_project_file(file: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn code_blocks(page: &str, language: &str) -> Vec<String> {
    let opening_fence = format!("```{language}\n");
    let parts = page.split(&opening_fence).skip(1);
    parts
        .map(|rest| rest.split("```").next().unwrap_or_default().to_string())
        .collect()
}

/// Is the code on the page identical to the code in this file?
#[test]
fn the_page_shows_the_code_that_is_tested() {
    let source = read_project_file("crates/pipeline/tests/suite/writing_a_policy.rs");
    let code = source
        .split("// The page's code begins here.\n")
        .nth(1)
        .unwrap();
    let code = code.split("// The page's code ends here.").next().unwrap();
    assert_eq!(
        code_blocks(&read_project_file("docs/writing-a-policy.md"), "rust"),
        [code.to_string()]
    );
}

/// Does the policy pass the conformance rules?
#[test]
fn the_policy_conforms_to_the_rules() {
    check_policy(
        &|_| {
            Box::new(StreamIsolation {
                stream_from_bytes: 500.0,
            })
        },
        40,
    )
    .unwrap();
}

/// Does the page's scenario end with each kind of program on its own cache?
#[test]
fn each_kind_of_program_ends_on_its_own_cache() {
    let scenario = code_blocks(&read_project_file("docs/writing-a-policy.md"), "toml")
        .remove(0)
        .replace("streams-together", "default");
    let (scenario, spec) =
        cachemate_spec::parse_scenario("the page's scenario", &scenario).unwrap();
    let programs = scenario.programs.iter().flat_map(|program| {
        (0..program.count).map(|copy| {
            let name = program.program.clone();
            let maker = move |run: u32| {
                kernels::build_threads(
                    &name,
                    u64::from(run + 10 * copy),
                    &kernels::Options::default(),
                )
                .unwrap()
            };
            SimProgram::new(program.program.clone(), Box::new(maker))
        })
    });

    let options = SimOptions {
        seed: scenario.seed,
        scale: 1_000,
        ends: Some(RunLimit::Cycles(8_000_000)),
        ..SimOptions::default()
    };
    let mut machine = SimMachine::new(&spec, &options, programs.collect()).unwrap();
    let standard = StandardPipeline {
        policy: cachemate_core::PolicyConfig {
            name: "streams-together".into(),
            parameters: String::new(),
            seed: 1,
        },
        guard: None,
        counted_instructions: 50_000.0,
        predictor: miss_penalty_of_machine(&spec),
        watches_code: true,
        first_window: WindowLength::Time { ns: 100_000_000 },
    };
    let config = standard.for_machine(
        cachemate_core::Machine::topology(&machine),
        cachemate_core::Machine::capabilities(&machine),
    );
    machine.set_first_window(config.first_window);
    let mut last_affinity = BTreeMap::new();
    let pipeline = Pipeline::with_policy(
        config,
        Box::new(StreamIsolation {
            stream_from_bytes: 500.0,
        }),
    );
    pipeline
        .run(machine, |_, record| {
            last_affinity = record.decision.plan.affinity;
            true
        })
        .unwrap();
    let cpu_lists: Vec<String> = last_affinity.values().map(ToString::to_string).collect();
    assert_eq!(cpu_lists, ["0-1", "0-1", "2-3", "2-3"]);
}
