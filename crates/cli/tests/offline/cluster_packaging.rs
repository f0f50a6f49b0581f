//! The shipped parts for clusters: image, resources, chart and Slurm scripts.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::not_shown::report_unchecked;
use crate::common::run;
use cachemate_fleet::profile::{MissPoint, WorkloadProfile};
use cachemate_fleet::scorer::{CacheState, NodeCacheState, ShareEffect};
use serde::Deserialize;
use serde_json::Value;

fn packaging_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging")
}

fn read_documents(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    documents
        .map(|document| {
            Value::deserialize(document).unwrap_or_else(|error| panic!("{path:?}: {error}"))
        })
        .collect()
}

/// Does the image of a program have the same bytes each time, and no shell in it?
#[test]
fn an_image_is_reproducible() {
    if Command::new("python3")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_err()
    {
        report_unchecked("the image", "no python3");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let build_image = |name: &str| {
        let output = dir.path().join(name);
        let script = packaging_dir().join("kubernetes/image.py");
        let script_output = Command::new("python3")
            .arg(script)
            .arg("/bin/true")
            .arg(&output)
            .output()
            .unwrap();
        assert!(
            script_output.status.success(),
            "{}",
            String::from_utf8_lossy(&script_output.stderr)
        );
        std::fs::read(output).unwrap()
    };
    let image = build_image("one.tar");
    assert_eq!(image, build_image("two.tar"));
    let image_contains = |text: &str| {
        image
            .windows(text.len())
            .any(|window| window == text.as_bytes())
    };
    assert!(
        image_contains("imageLayoutVersion")
            && image_contains("/usr/bin/cachemate")
            && !image_contains("bin/sh")
    );
}

/// Names of a schema's properties, as paths.
fn collect_properties(path: &str, schema: &Value, names: &mut BTreeSet<String>) {
    for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        collect_properties(&path, inner, names);
        collect_properties(&path, &inner["items"], names);
        names.insert(path);
    }
}

/// Names of a value's fields, as paths.
fn collect_fields(path: &str, value: &Value, names: &mut BTreeSet<String>) {
    for (name, inner) in value.as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        collect_fields(&path, inner, names);
        names.insert(path);
    }
    value
        .as_array()
        .into_iter()
        .flatten()
        .for_each(|entry| collect_fields(path, entry, names));
}

/// Do the resources' schemas have exactly the fields that the extender reads?
#[test]
fn schemas_have_the_fields_that_are_read() {
    let profile = WorkloadProfile {
        base_cycles_per_instr: 1.0,
        stall_cycles_per_miss: 1.0,
        references_per_kilo_instr: 1.0,
        write_share: 0.5,
        curve: vec![MissPoint {
            bytes: 1.0,
            misses_per_kilo_instr: 1.0,
        }],
        certainty: Some(1.0),
    };
    let effect = ShareEffect {
        share: 1.0,
        slowdown_percent: 0.0,
        broken_limits: 0.0,
    };
    let cache = CacheState {
        fill_bytes_per_second: Some(1.0),
        bandwidth_left_bytes_per_second: Some(1.0),
        free_classes: Some(1),
        effects: vec![effect],
        ..CacheState::default()
    };
    let state = NodeCacheState {
        memory_bytes_per_second: Some(1.0),
        caches: vec![cache],
        ..NodeCacheState::default()
    };
    let profile = serde_json::json!({ "profile": profile, "images": [] });
    let state = serde_json::json!({ "state": state, "observedUnixSeconds": 0 });
    for (file, part, value) in [
        ("workloadprofile", "spec", profile),
        ("nodecachestate", "status", state),
    ] {
        let crds = read_documents(&packaging_dir().join(format!("kubernetes/crds/{file}.yaml")));
        let schema =
            &crds[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][part];
        let (mut declared, mut read) = (BTreeSet::new(), BTreeSet::new());
        collect_properties("", schema, &mut declared);
        collect_fields("", &value, &mut read);
        assert_eq!(declared, read, "{file}");
    }
}

/// The objects of the chart with these values, or helm's message; `None` without helm.
fn render_chart(values: &[&str]) -> Option<Result<Vec<Value>, String>> {
    let mut helm = Command::new("helm");
    helm.args(["template", "cachemate", "--namespace", "cachemate"]);
    values.iter().for_each(|value| {
        helm.args(["--set", value]);
    });
    let Ok(output) = helm.arg(packaging_dir().join("kubernetes/chart")).output() else {
        report_unchecked("the chart", "no helm");
        return None;
    };
    if !output.status.success() {
        return Some(Err(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    let text = String::from_utf8(output.stdout).unwrap();
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    Some(Ok(documents
        .map(|document| Value::deserialize(document).unwrap())
        .collect()))
}

fn find_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    objects
        .iter()
        .find(|document| document["kind"] == kind)
        .unwrap_or_else(|| panic!("no {kind}"))
}

/// With a PodMonitor, are the metrics where Prometheus looks for them on a node, and only for holders of the token?
#[test]
fn a_pod_monitor_finds_the_metrics_with_the_token() {
    let enabled = "podMonitor.enabled=true";
    let Some(rendered) = render_chart(&[enabled, "podMonitor.tokenSecret=scraper"]) else {
        return;
    };
    let all = rendered.unwrap();
    let endpoint = &find_kind(&all, "PodMonitor")["spec"]["podMetricsEndpoints"][0];
    let pod = &find_kind(&all, "DaemonSet")["spec"]["template"]["spec"];
    let (port, mount) = (
        &pod["containers"][0]["ports"][0],
        &pod["containers"][0]["volumeMounts"],
    );
    assert_eq!(endpoint["port"], port["name"]);
    assert_eq!(endpoint["authorization"]["credentials"]["name"], "scraper");
    let is_token = |volume: &&Value| volume["secret"]["secretName"] == "scraper";
    let volume = pod["volumes"].as_array().unwrap().iter().find(is_token);
    let is_mounted = |mount: &&Value| mount["name"] == volume.expect("the token")["name"];
    let mount = mount.as_array().unwrap().iter().find(is_mounted);
    let token_dir = mount.expect("its mount")["mountPath"].as_str().unwrap();

    let config = find_kind(&all, "ConfigMap")["data"]["cachemate.toml"]
        .as_str()
        .unwrap();
    let file = format!("{token_dir}/token");
    assert!(config.contains(&file), "{config}");
    let address = format!("\"0.0.0.0:{}\"", port["containerPort"]);
    assert!(config.contains(&address), "{config}");
    let home = tempfile::tempdir().unwrap();
    let token = home.path().join("token");
    std::fs::write(&token, "0123456789abcdef").unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o400)).unwrap();
    let config = config.replace(&file, token.to_str().unwrap());
    std::fs::write(home.path().join("c.toml"), config).unwrap();
    run(home.path(), &["manage", "--check", "--config", "c.toml"]).ok();

    let error = render_chart(&[enabled]).unwrap().unwrap_err();
    assert!(error.contains("podMonitor.tokenSecret"), "{error}");
}

fn find_named<'a>(entries: &'a Value, name: &str) -> Option<&'a Value> {
    let mut entries = entries.as_array().into_iter().flatten();
    entries.find(|entry| entry["name"] == name)
}

/// Are resctrl and the scheduler's token mounted where the daemon and the extender look for them, but only if asked for,
/// and is a scheduler on the host's network admitted?
#[test]
fn resctrl_token_and_addresses_are_given_only_on_request() {
    let values = [
        "extender.enabled=true",
        "node.resctrl=true",
        "extender.schedulerTokenSecret=scheduler",
        "extender.schedulerCidrs={10.0.0.4/32}",
    ];
    for (values, is_requested) in [(&values[..], true), (&values[..1], false)] {
        let Some(rendered) = render_chart(values) else {
            return;
        };
        let all = rendered.unwrap();
        let pod_of = |kind: &str| &find_kind(&all, kind)["spec"]["template"]["spec"];
        let (daemon, extender) = (pod_of("DaemonSet"), pod_of("Deployment"));
        let folder = find_named(&daemon["volumes"], "resctrl");
        let folder = folder.map(|volume| &volume["hostPath"]["path"]);
        let mount = find_named(&daemon["containers"][0]["volumeMounts"], "resctrl");
        let mount = mount.map(|mount| &mount["mountPath"]);
        let expected = is_requested.then(|| Value::from("/sys/fs/resctrl"));
        assert_eq!((folder, mount), (expected.as_ref(), expected.as_ref()));

        let container = &extender["containers"][0];
        let args = container["args"].as_array().unwrap();
        let file = args.iter().find_map(|arg| {
            let file = arg.as_str()?.strip_prefix("--scheduler-token-file=")?;
            Path::new(file).parent()
        });
        let mount = find_named(&container["volumeMounts"], "scheduler-token");
        let mount = mount.and_then(|mount| mount["mountPath"].as_str());
        assert_eq!(
            (file.is_some(), mount),
            (is_requested, file.and_then(Path::to_str))
        );
        let secret = find_named(&extender["volumes"], "scheduler-token");
        let secret = secret.map(|volume| &volume["secret"]["secretName"]);
        assert_eq!(secret.is_some_and(|name| name == "scheduler"), is_requested);

        let peers = &find_kind(&all, "NetworkPolicy")["spec"]["ingress"][0]["from"];
        let is_admitted = |peer: &Value| peer["ipBlock"]["cidr"] == "10.0.0.4/32";
        assert_eq!(
            peers.as_array().unwrap().iter().any(is_admitted),
            is_requested
        );
    }
}

/// Does the chart grant exactly the rights on the page: a privileged daemon that writes the two resources, an extender
/// that reads them?
#[test]
fn the_chart_grants_exactly_the_rights_on_the_page() {
    let Some(rendered) = render_chart(&["extender.enabled=true"]) else {
        return;
    };
    let all = rendered.unwrap();
    let find_kind = |kind: &str| find_kind(&all, kind);
    let daemon = &find_kind("DaemonSet")["spec"]["template"]["spec"];
    assert_eq!(
        daemon["containers"][0]["securityContext"]["privileged"],
        true
    );
    assert_eq!(daemon["automountServiceAccountToken"], true);
    let extender = &find_kind("Deployment")["spec"]["template"]["spec"];
    let security = &extender["containers"][0]["securityContext"];
    assert_eq!(
        (
            &security["allowPrivilegeEscalation"],
            &security["readOnlyRootFilesystem"]
        ),
        (&false.into(), &true.into())
    );
    assert_eq!(security["capabilities"]["drop"][0], "ALL");
    assert_eq!(
        (
            &extender["securityContext"]["runAsNonRoot"],
            &extender["automountServiceAccountToken"]
        ),
        (&true.into(), &true.into())
    );
    let rules = all
        .iter()
        .filter(|document| document["kind"] == "ClusterRole")
        .flat_map(|role| role["rules"].as_array().unwrap());
    let bound: BTreeSet<_> = all
        .iter()
        .filter(|document| document["kind"] == "ClusterRoleBinding")
        .map(|document| {
            (
                document["roleRef"]["name"].as_str().unwrap(),
                document["subjects"][0]["name"].as_str().unwrap(),
            )
        })
        .collect();
    let expected = [
        ("cachemate-publisher", "cachemate-node"),
        ("cachemate-reader", "cachemate-extender"),
    ];
    assert_eq!(bound, BTreeSet::from(expected));
    let groups: BTreeSet<_> = rules
        .map(|rule| rule["apiGroups"][0].as_str().unwrap())
        .collect();
    assert_eq!(
        groups,
        BTreeSet::from(["cachemate.io"]),
        "no role reaches beyond the two resources"
    );
    let config = find_kind("ConfigMap")["data"]["cachemate.toml"]
        .as_str()
        .unwrap()
        .to_string();
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("c.toml"), config).unwrap();
    run(home.path(), &["manage", "--check", "--config", "c.toml"]).ok();
}

/// Do Slurm's scripts pass on known marks, and neither fail on a hostile comment nor execute it?
#[test]
fn slurm_scripts_pass_on_known_marks_only() {
    let dir = tempfile::tempdir().unwrap();
    let run_script = |name: &str, job: &str, comment: &str| {
        let mut command = Command::new(packaging_dir().join("slurm").join(name));
        command
            .env("CACHEMATE_JOBS", dir.path().join("jobs"))
            .env("SLURM_JOB_ID", job);
        let output = command.env("SLURM_JOB_COMMENT", comment).output().unwrap();
        assert!(output.status.success(), "{name} {comment}");
        String::from_utf8(output.stdout).unwrap()
    };
    run_script(
        "prolog.sh",
        "17",
        "cachemate:profile=index,max-slowdown=10%,class=victim",
    );
    let exported = run_script("task-prolog.sh", "17", "");
    let expected = ["PROFILE=index", "MAX_SLOWDOWN=10%", "CLASS=victim"]
        .map(|line| format!("export CACHEMATE_{line}\n"));
    assert_eq!(exported, expected.concat());
    run_script("epilog.sh", "17", "");
    assert_eq!(run_script("task-prolog.sh", "17", ""), "");
    for comment in [
        "",
        "none",
        "cachemate:",
        "cachemate:class=king",
        "cachemate:profile=a b;rm -rf /,x=$(id)",
        "cachemate:profile=../../etc",
    ] {
        run_script("prolog.sh", "18", comment);
        assert_eq!(run_script("task-prolog.sh", "18", ""), "", "{comment}");
    }
    run_script("prolog.sh", "../19", "cachemate:class=victim");
    assert!(!dir.path().join("19").exists());
}

/// Does the submit plugin compile and check comments?
#[test]
fn the_submit_plugin_checks_comments() {
    let plugin = packaging_dir().join("slurm/job_submit.lua");
    let test = "slurm = { SUCCESS = 0, ERROR = 1, log_user = function(text) io.write(text, '\\n') end }\ndofile(arg[1])\n\
        for _, comment in ipairs({ '', 'mine', 'cachemate:class=victim,profile=a.b', 'cachemate:class=king' }) do\n\
        io.write(slurm_job_submit({ comment = comment }, nil, 0), '\\n') end";
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("t.lua"), test).unwrap();
    let lua = ["lua5.4", "lua5.3", "lua5.1", "lua"]
        .iter()
        .find_map(|lua| {
            Command::new(lua)
                .arg(dir.path().join("t.lua"))
                .arg(&plugin)
                .output()
                .ok()
        });
    let Some(output) = lua else {
        report_unchecked("the submit plugin", "no lua");
        return;
    };
    let lines = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = lines.lines().collect();
    assert_eq!(
        lines[..3],
        ["0", "0", "0"],
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        lines[3].contains("found 'class=king', expected") && lines[4] == "1",
        "{lines:?}"
    );
}
