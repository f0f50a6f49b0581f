//! The built-in machines, the reader's errors, overrides, and the documentation.

use cachemate_core::{CacheLevel, CacheSpec, MachineSpec};
use cachemate_spec::{
    built_in_machine_text, load_machine, load_topology, machine_names, parse_toml,
};

fn cache_at_level(machine: &MachineSpec, level: CacheLevel) -> &CacheSpec {
    machine
        .caches
        .iter()
        .find(|cache| cache.level == level)
        .unwrap()
}

/// Does every built-in machine parse, pass its check, and have its own name and sources?
#[test]
fn every_built_in_machine_parses_and_passes_its_check() {
    assert!(machine_names().is_sorted(), "listed in order");
    for name in machine_names() {
        let machine = load_machine(name).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(machine.name, name);
        assert!(
            !machine.sources.is_empty() && !machine.description.is_empty(),
            "{name}"
        );
        assert!(
            machine
                .caches
                .windows(2)
                .all(|pair| pair[0].latency_cycles <= pair[1].latency_cycles),
            "{name}"
        );
        let memory = machine.memory.local_latency_cycles;
        assert!(
            machine
                .caches
                .iter()
                .all(|cache| cache.latency_cycles < memory),
            "{name}"
        );
    }
}

/// Does every source state its reliability, and does the memory bandwidth in a vendor's source agree with the field?
#[test]
fn every_source_states_its_reliability() {
    let docs = include_str!("../../../../docs/machines.md");
    let mut bandwidths = 0;
    for name in machine_names() {
        let machine = load_machine(name).unwrap();
        for source in &machine.sources {
            let marks = [
                "paper:",
                "measured:",
                "vendor, unchecked:",
                "estimate:",
                "own:",
            ];
            assert!(
                marks.iter().any(|mark| source.starts_with(mark)),
                "{name}: {source}"
            );
        }
        assert!(
            docs.contains(&format!("`{name}`")),
            "docs/machines.md names {name}"
        );
        let vendor = machine
            .sources
            .iter()
            .filter(|source| source.starts_with("vendor"));
        for source in vendor.filter(|source| source.contains("GB/s") && source.contains("DDR")) {
            let words: Vec<&str> = source.split([' ', ';', ',']).collect();
            let unit = words.iter().position(|word| *word == "GB/s").unwrap();
            let bytes_per_s = words[unit - 1].parse::<f64>().unwrap() * 1e9;
            let field = machine.memory.bytes_per_cycle * machine.hertz as f64;
            let nodes = f64::from(machine.memory.nodes);
            assert!(
                (field * nodes / bytes_per_s - 1.0).abs() < 0.01,
                "{name}: {field} beside {source}"
            );
            bandwidths += 1;
        }
    }
    assert!(
        bandwidths >= 11,
        "{bandwidths} machines of today name a bandwidth"
    );
}

/// Is every file of the directory built in, under its own name?
#[test]
fn every_file_of_the_directory_is_built_in() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../machines");
    let mut files: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            entry
                .unwrap()
                .file_name()
                .into_string()
                .unwrap()
                .trim_end_matches(".toml")
                .to_string()
        })
        .collect();
    files.sort();
    assert_eq!(files, machine_names());
}

/// Do the papers' machines have the published geometry?
#[test]
fn the_papers_machines_have_the_published_shapes() {
    let shape = |name: &str| {
        let topology = load_topology(name).unwrap();
        let shared: Vec<_> = topology.last_level_caches().collect();
        (
            topology.cpus.len(),
            shared.len(),
            shared[0].cpus.count(),
            shared[0].size_bytes.unwrap() >> 10,
        )
    };
    assert_eq!(shape("niagara-2core"), (8, 1, 8, 768));
    assert_eq!(shape("smt-av"), (2, 1, 2, 512));
    assert_eq!(shape("xeon-x5365"), (8, 4, 2, 4096));
    assert_eq!(shape("xeon-x5365-4"), (4, 2, 2, 4096));
    assert_eq!(shape("opteron-2350"), (8, 2, 4, 2048));
    assert_eq!(shape("power5-2x2x2"), (8, 2, 4, 1920));
    assert_eq!(shape("power5-8x2x2"), (32, 8, 4, 1920));
    assert_eq!(shape("pairs-06"), (6, 3, 2, 4096));
    assert_eq!(shape("epyc-7763"), (128, 8, 16, 32 << 10));
    assert_eq!(shape("epyc-7742"), (128, 16, 8, 16 << 10));

    for (name, cpus, caches, cpus_each, size_kib) in [
        ("altra-max", 128, 1, 128, 16 << 10),
        ("epyc-9654", 192, 12, 16, 32 << 10),
        ("epyc-9754", 256, 16, 16, 16 << 10),
        ("epyc-9755", 256, 16, 16, 32 << 10),
        ("graviton3", 64, 1, 64, 32 << 10),
        ("ryzen-7800x3d", 16, 1, 16, 96 << 10),
        ("xeon-6980p", 256, 1, 256, 504 << 10),
        ("xeon-8380", 80, 1, 80, 60 << 10),
        ("xeon-8490h", 120, 1, 120, 115_200),
        ("xeon-8592", 128, 1, 128, 320 << 10),
    ] {
        assert_eq!(shape(name), (cpus, caches, cpus_each, size_kib), "{name}");
    }

    let power5 = load_machine("power5-2x2x2").unwrap();
    assert_eq!(
        cache_at_level(&power5, CacheLevel::L2).size_bytes
            / u64::from(cache_at_level(&power5, CacheLevel::L2).slices),
        640 << 10
    );
    assert_eq!(
        power5.colors_of(cache_at_level(&power5, CacheLevel::L2)),
        16
    );
}

/// Do overrides reach caches by level, accept suffixes and units, and get checked?
#[test]
fn overrides_change_the_named_field_and_are_checked() {
    for (size, kib) in [("48K", 48), ("96K", 96), ("192K", 192), ("384K", 384)] {
        let machine = load_machine(&format!("niagara-2core?caches.l2.size={size}")).unwrap();
        assert_eq!(
            cache_at_level(&machine, CacheLevel::L2).size_bytes,
            kib << 10
        );
    }
    let machine =
        load_machine("niagara-2core?caches.L1D.size_bytes=16384&memory.bytes_per_cycle=2&hertz=2G")
            .unwrap();
    assert_eq!(
        cache_at_level(&machine, CacheLevel::L1Data).size_bytes,
        16 << 10
    );
    assert_eq!(
        (machine.memory.bytes_per_cycle, machine.hertz),
        (2.0, 2_000_000_000)
    );
    assert_eq!(
        load_machine("power5-2x2x2?pages.colors=none")
            .unwrap()
            .pages
            .colors,
        None
    );
    assert_eq!(
        load_machine("smt-av?pages.colors=16").unwrap().pages.colors,
        Some(16)
    );

    let error = |given: &str| load_machine(given).unwrap_err().to_string();
    let refused = error("niagara-2core?caches.l2.size=100K");
    assert!(
        refused.contains("'caches[2].size_bytes': found 102400, expected a multiple of"),
        "{refused}"
    );
    assert!(error("niagara-2core?caches.l3.size=1M").contains("found 'l3' in an override"));
    assert!(error("niagara-2core?caches.l2").contains("expected field=value"));
    assert!(error("niagara-2core?wibble=3").contains("found 'wibble'"));
    assert!(error("niagara-2core?hertz=fast").contains("field 'hertz': found string \"fast\""));
    assert!(error("niagara-2core?hertz.x=1").contains("field 'hertz.x'"));
    assert!(error("niagara-2core?caches=1").contains("field 'caches'"));
    assert!(error("niagara-2core?=1").contains("field"));
}

fn error_after_change(change: impl Fn(&str) -> String) -> String {
    let dir = std::env::temp_dir().join(format!("cachemate-spec-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let text = change(built_in_machine_text("smt-av").unwrap());
    let path = dir.join(format!("{}.toml", text.len()));
    std::fs::write(&path, text).unwrap();
    let error = load_machine(path.to_str().unwrap())
        .unwrap_err()
        .to_string();
    std::fs::remove_file(&path).unwrap();
    error
        .rsplit_once("toml:")
        .expect("file and place")
        .1
        .to_string()
}

/// Does every kind of error give line, column, field, the value found and the values expected?
#[test]
fn errors_point_at_the_place() {
    let line = |wanted: &str| {
        let text = built_in_machine_text("smt-av").unwrap();
        text.lines()
            .position(|line| line.starts_with(wanted))
            .unwrap()
            + 1
    };
    assert_eq!(
        error_after_change(|text| text.replace("hertz = 2_000_000_000", "hertz = \"fast\"")),
        format!(
            "{}:9: field 'hertz': found string \"fast\", expected a whole number, 0 or more",
            line("hertz")
        )
    );
    assert_eq!(
        error_after_change(|text| text.replace("packages = 1", "packages = 0")),
        format!(
            "{}:12: field 'packages': found 0, expected 1 to 1024",
            line("packages")
        )
    );
    let unknown = error_after_change(|text| text.replacen("ways = 4", "weys = 4", 1));
    assert!(
        unknown.contains("field 'caches[0].weys': found 'weys', expected one of"),
        "{unknown}"
    );
    assert!(unknown.ends_with("(did you mean 'ways'?)"), "{unknown}");
    assert!(
        unknown.starts_with(&format!("{}:8:", line("ways"))),
        "{unknown}"
    );
    let missing = error_after_change(|text| text.replacen("ways = 4\n", "", 1));
    assert!(
        missing.contains("field 'caches[0].ways': found nothing, expected this field"),
        "{missing}"
    );
    assert!(
        missing.starts_with(&format!("{}:1:", line("[[caches]]"))),
        "{missing}"
    );
    let variant = error_after_change(|text| text.replacen("\"L1Data\"", "\"L1Date\"", 1));
    assert!(
        variant.contains("field 'caches[1].level': found 'L1Date'"),
        "{variant}"
    );
    assert!(variant.ends_with("(did you mean 'L1Data'?)"), "{variant}");
    let negative = error_after_change(|text| text.replacen("nodes = 1", "nodes = -1", 1));
    assert!(
        negative.contains("field 'memory.nodes': found integer -1, expected"),
        "{negative}"
    );
    let impossible = error_after_change(|text| text.replacen("ways = 8", "ways = 7", 1));
    assert!(
        impossible.contains("field 'caches[2].size_bytes': found 524288, expected a multiple"),
        "{impossible}"
    );
    let syntax = error_after_change(|text| text.replacen("memory]", "memory", 1));
    assert!(
        syntax.starts_with(&format!("{}:", line("[memory]")))
            && syntax.contains(", expected [NAME]"),
        "{syntax}"
    );
    let pipeline = error_after_change(|text| text.replace("\"out-of-order\"", "\"out-of-odour\""));
    assert!(
        pipeline.contains("field 'pipeline.kind': found 'out-of-odour'"),
        "{pipeline}"
    );
}

/// Does the error for an unknown machine list the known ones, and the nearest?
#[test]
fn an_unknown_machine_lists_the_known_ones_and_the_nearest() {
    let error = load_machine("xeon-x5356").unwrap_err().to_string();
    assert!(
        error.contains("'xeon-x5356'") && error.contains("epyc-7763") && error.contains("smt-av"),
        "{error}"
    );
    assert!(error.ends_with("(did you mean 'xeon-x5365'?)"), "{error}");
    let missing = load_machine("./nowhere.toml").unwrap_err().to_string();
    assert!(
        missing.starts_with("./nowhere.toml: found No such file"),
        "{missing}"
    );
    assert!(load_machine("/tmp").is_err());
}

/// The quoted names in serde's "unknown field `x`, expected one of `a`, `b`".
fn known_names(text: &str) -> Vec<String> {
    let error = parse_toml::<MachineSpec>("doc", text).unwrap_err();
    assert!(error.found.contains("zzz"), "{error}");
    error
        .expected
        .split('\'')
        .skip(1)
        .step_by(2)
        .map(str::to_string)
        .collect()
}

/// Does docs/machines.md name every machine, every field and every value?
#[test]
fn the_documentation_names_every_machine_field_and_value() {
    let page = include_str!("../../../../docs/machines.md");
    let text = built_in_machine_text("epyc-7763").unwrap();
    let add = |table: &str| text.replacen(table, &format!("{table}\nzzz = 1"), 1);
    let mut names = known_names(&format!("zzz = 1\n{text}"));
    assert!(names.len() > 10, "{names:?}");
    for table in ["[[caches]]", "[coherence]", "[memory]", "[counters]"] {
        names.extend(known_names(&add(table)));
    }
    for table in ["[os]", "[pages]"] {
        names.extend(known_names(&format!("{text}\n{table}\nzzz = 1")));
    }
    names.extend(known_names(
        &text.replace("groups = 16", "groups = 16, zzz = 1"),
    ));

    let values = [
        ("\"L2\"", "level"),
        ("\"out-of-order\"", "kind"),
        ("\"stride\"", "kind"),
        ("\"tagged\"", "sampler"),
    ];
    for (value, _) in values {
        names.extend(known_names(&text.replacen(value, "\"zzz\"", 1)));
    }
    for field in ["replacement", "write", "inclusion"] {
        names.extend(known_names(&text.replacen(
            "[[caches]]",
            &format!("[[caches]]\n{field} = \"zzz\""),
            1,
        )));
    }

    for (old, new) in [
        ("mshrs = 24", "mshrs = 24, zzz = 1"),
        ("degree = 2", "degree = 2\nzzz = 1"),
    ] {
        names.extend(known_names(&text.replacen(old, new, 1)));
    }
    names.extend(machine_names().iter().map(|name| name.to_string()));
    for name in names {
        assert!(
            page.contains(&format!("`{name}`")),
            "docs/machines.md does not mention `{name}`"
        );
    }
}
