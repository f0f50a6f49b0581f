//! Fleets and the scheduler extender, through the command.

use std::collections::BTreeSet;
use std::io::BufReader;
use std::net::TcpStream;
use std::time::Instant;

use crate::common::run;
use crate::extender_watch::{
    FakeServer, exchange, node_state, post_request, send_request, workload_profile,
};
use cachemate_core::quantile;
use serde_json::{Value, json};

const FLEET: &str = "name = \"two kinds\"\nmachine = \"xeon-x5365-4\"\nhosts = 4\nhours = 2\nservices_per_host = 3\n\
    step_minutes = 60\n\
    [[services]]\nname = \"reuse\"\ncpus = 1\nload = 0.8\nmax_slowdown_percent = 5\n[services.references]\n\
    base_cycles_per_instr = 0.7\nstall_cycles_per_miss = 150\nreferences_per_kilo_instr = 15\n\
    working_sets = [{ bytes = 3e6, share = 0.98 }]\n\
    [[services]]\nname = \"stream\"\ncpus = 1\nload = 0.8\n[services.references]\n\
    base_cycles_per_instr = 0.7\nstall_cycles_per_miss = 60\nreferences_per_kilo_instr = 30\nworking_sets = []\n";

/// Does a fleet print exactly the promised fields, the same when it is made again, and write its page and rows?
#[test]
fn a_fleet_prints_the_promised_fields_and_is_repeatable() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    std::fs::write(root.join("fleet.toml"), FLEET).unwrap();
    let run_fleet = || {
        let args = [
            "fleet",
            "fleet.toml",
            "--seed",
            "4",
            "--no-store",
            "--json",
            "--force",
            "--csv",
            "rows.csv",
        ];
        let mut printed = run(root, &[&args[..], &["-o", "page.html"]].concat()).json();
        assert!(printed["cpu_seconds"].take().as_f64().unwrap() > 0.0);
        printed
    };
    let single = run_fleet();
    assert_eq!(single, run_fleet());
    let keys_of = |value: &Value| {
        value
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect::<BTreeSet<_>>()
    };
    assert_eq!(
        keys_of(&single),
        BTreeSet::from(["hosts", "services", "seed", "cpu_seconds", "policies"].map(String::from))
    );
    let row = ["name", "limits_kept_share", "hosts_needed", "moves"].map(String::from);
    let slowdowns = ["p50", "p95", "p99"].map(|name| format!("slowdown_{name}_percent"));
    assert_eq!(
        keys_of(&single["policies"][0]),
        row.into_iter().chain(slowdowns).collect()
    );
    assert_eq!(
        (&single["hosts"], &single["seed"], &single["services"]),
        (&Value::from(4), &Value::from(4), &Value::from(12))
    );
    let names: Vec<&str> = single["policies"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names[..5],
        ["requests", "spread", "bin-pack", "misses", "forecast"]
    );
    assert_eq!(names[9], "forecast+auto");
    let rows = std::fs::read_to_string(root.join("rows.csv")).unwrap();
    assert_eq!(rows.lines().count(), 11);
    let page = std::fs::read_to_string(root.join("page.html")).unwrap();
    assert!(
        page.contains("forecast+auto")
            && page.matches("<svg").count() >= 12
            && !page.contains("<script src")
    );
    let output = run(root, &["fleet", "fleet.toml", "--what-if", "one-more-host"])
        .ok()
        .out;
    assert!(output.contains("forecast+auto, one more host"), "{output}");
}

/// Do two shards, whose stores are joined in any order, give the fleet of one process, and is nothing run again?
#[test]
fn a_fleet_of_two_shards_prints_the_same_as_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let text = FLEET.replace("hosts = 4", "hosts = 4\ncell_hosts = 2\nnodes = [\"off\"]");
    std::fs::write(root.join("fleet.toml"), text).unwrap();
    let fleet =
        |more: &[&str]| run(root, &[&["fleet", "fleet.toml", "--json"], more].concat()).json();
    let printed = |more: &[&str]| {
        let mut result = fleet(more);
        result["cpu_seconds"].take();
        result
    };
    let whole = printed(&["--no-store"]);
    let first = fleet(&["--shard", "1/2", "--store", "a"]);
    let second = fleet(&["--shard", "2/2", "--store", "b"]);
    let count = |shard: &serde_json::Value| shard["runs"].as_u64().unwrap();
    assert_eq!(
        count(&first) + count(&second),
        15,
        "two cells and a search for each policy"
    );

    let merged = run(root, &["merge", "all", "b", "a", "--json"]).json();
    assert_eq!(merged["copied"], 15, "{merged}");
    assert_eq!(printed(&["--store", "all"]), whole);
    let again = run(root, &["merge", "all", "a", "--json"]).json();
    assert_eq!(again["copied"], 0, "{again}");
    run(root, &["fleet", "fleet.toml", "--shard", "1/2"]).exits_with(2, &["--store"]);
    run(root, &["merge", "all", "nowhere"]).exits_with(1, &["nowhere: found nothing"]);
}

/// Are errors reported with file, place, value found and values expected?
#[test]
fn errors_name_their_file_and_place() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for (text, words) in [
        (
            FLEET.replace("hosts = 4", "hosts = 4\nhots = 3"),
            vec!["bad.toml:4:8", "found 'hots'", "expected one of"],
        ),
        (
            FLEET.replace("hosts = 4", "hosts = \"four\""),
            vec!["bad.toml:3:", "hosts"],
        ),
        (
            FLEET.replace("hosts = 4", "hosts = 0"),
            vec!["bad.toml", "hosts: found 0, expected 1 to"],
        ),
        (
            FLEET.replace("share = 0.98", "share = 1.5"),
            vec!["bad.toml", "services[0].references.working_sets[0].share"],
        ),
        (
            FLEET.replace("xeon-x5365-4", "xeon-x5356-4"),
            vec!["xeon-x5356-4", "did you mean"],
        ),
        (
            FLEET.replace("name = \"two kinds\"", "name = \"two"),
            vec!["bad.toml:1:"],
        ),
        (
            format!("cluster = \"pods.json\"\n{FLEET}"),
            vec!["pods.json"],
        ),
    ] {
        std::fs::write(root.join("bad.toml"), &text).unwrap();
        let outcome = run(root, &["fleet", "bad.toml"]);
        assert_eq!(outcome.code, Some(1), "{}", outcome.err);
        for word in words {
            assert!(outcome.err.contains(word), "{word}: {}", outcome.err);
        }
    }
    assert_eq!(
        run(root, &["fleet", "bad.toml", "--hosts", "0"]).code,
        Some(2)
    );
    std::fs::write(root.join("good.toml"), FLEET).unwrap();
    assert_eq!(
        run(root, &["fleet", "good.toml", "--hours", "0"]).code,
        Some(2)
    );
    assert_eq!(
        run(root, &["fleet", "good.toml", "--what-if", "other-machine"]).code,
        Some(2)
    );
}

/// Do a cluster's pods run as its services, with those without a profile reported?
#[test]
fn a_clusters_pods_run_as_fleet_services() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let pod_json = |name: &str, marks: Value| {
        json!({ "metadata": { "name": name, "namespace": "shop", "annotations": marks },
            "spec": { "containers": [{ "image": "a", "resources": { "requests": { "cpu": "500m", "memory": "1Gi" } } }] } })
    };
    let known = json!({ "cachemate.io/profile": "reuse", "cachemate.io/max-slowdown": "10%" });
    let list = json!({ "items": [pod_json("a", known.clone()), pod_json("b", known), pod_json("c", json!({}))] });
    std::fs::write(root.join("pods.json"), list.to_string()).unwrap();
    std::fs::write(
        root.join("fleet.toml"),
        format!("cluster = \"pods.json\"\n{FLEET}"),
    )
    .unwrap();
    let outcome = run(root, &["fleet", "fleet.toml", "--json"]);
    assert!(
        outcome.err.contains("1 of 3 pods have no profile"),
        "{}",
        outcome.err
    );
    let printed: Value = serde_json::from_str(&outcome.out).unwrap();
    assert_eq!(printed["services"], 3);
    assert_eq!(printed["policies"][0]["limits_kept_share"], 1.0);
}

/// Does the extender answer requests in kube-scheduler's format: known pods by forecast, others neutrally, forged ones
/// with an error, and does a forged object not stop it?
#[test]
fn requests_of_kube_scheduler_are_answered() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let forged = json!({ "kind": "NodeCacheState", "metadata": { "name": "x" } });
    let nodes = vec![node_state("node-quiet", 1e6), forged];
    let server = FakeServer::listing(vec![workload_profile()], nodes);
    let busy = node_state("node-busy", 9e9);
    let (_guard, address) = server.start_informed_extender(root, &[], &busy, 2);
    let recorded = include_str!("../fixtures/extender-request.json");
    let (status, scores) = post_request(&address, "/prioritize", recorded);
    assert_eq!(status, 200, "{scores}");
    let score = |host: &str| {
        scores
            .as_array()
            .unwrap()
            .iter()
            .find(|entry| entry["host"] == host)
            .unwrap()["score"]
            .as_u64()
    };
    assert_eq!(score("node-quiet"), Some(10), "{scores}");
    assert!(
        score("node-busy") < Some(5) && score("node-new") == Some(5),
        "{scores}"
    );
    let (_, filtered) = post_request(&address, "/filter", recorded);
    assert_eq!(
        filtered["nodenames"],
        json!(["node-quiet", "node-new"]),
        "{filtered}"
    );
    assert!(
        filtered["failedNodes"]["node-busy"].is_string() && filtered["error"] == "",
        "{filtered}"
    );
    let unknown = recorded.replace("cachemate.io/profile", "other.io/profile");
    let (_, neutral) = post_request(&address, "/prioritize", &unknown);
    assert!(
        neutral
            .as_array()
            .unwrap()
            .iter()
            .all(|entry| entry["score"] == 5),
        "{neutral}"
    );
    for (path, body, expected) in [
        ("/prioritize", "{\"Pod\": 3}", 400),
        ("/filter", "{\"Pod\": {}}", 400),
        ("/bind", "{}", 404),
        ("/filter", "not JSON", 400),
    ] {
        assert_eq!(
            post_request(&address, path, body).0,
            expected,
            "{path} {body}"
        );
    }
    // The target of a CONNECT has no path.
    assert_eq!(send_request(&address, "CONNECT", "a:1", "").0, 404);
    // Do the metrics count exactly the answers and refusals above, and no others?
    let (_, page) = send_request(&address, "GET", "/metrics", "");
    for line in [
        "request_seconds_count{verb=\"filter\"} 1",
        "request_seconds_count{verb=\"prioritize\"} 2",
        "refused_requests_total 3",
        "fresh_nodes 2.0",
    ] {
        assert!(
            page.contains(&format!("cachemate_extender_{line}\n")),
            "{line}: {page}"
        );
    }
}

/// Does an extender with a token refuse everybody else, does one without a token record nothing, and are requests with
/// too many containers or bytes refused while others are answered at once?
#[test]
fn strangers_move_no_pod_and_delay_no_answer() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let nodes = vec![node_state("node-quiet", 1e6)];
    let server = FakeServer::listing(vec![workload_profile()], nodes);
    let busy = node_state("node-busy", 9e9);
    let token = "0123456789abcdef-secret";
    std::fs::write(root.join("scheduler-token"), format!("{token}\n")).unwrap();
    std::fs::write(root.join("short"), "abc").unwrap();
    let recorded = include_str!("../fixtures/extender-request.json");
    let in_flight = |address: &str| {
        let (_, page) = send_request(address, "GET", "/metrics", "");
        let line = page
            .lines()
            .find(|line| line.contains("in_flight") && !line.starts_with('#'));
        line.unwrap_or_else(|| panic!("{page}")).to_string()
    };

    let (_guard, address) = server.start_informed_extender(root, &[], &busy, 2);
    for number in 0..5 {
        let pod = recorded.replace("\"uid\":\"", &format!("\"uid\":\"{number}"));
        assert_eq!(post_request(&address, "/prioritize", &pod).0, 200);
    }
    assert!(in_flight(&address).ends_with(" 0.0") || in_flight(&address).ends_with(" 0"));
    let containers = vec!["{}"; 300].join(",");
    let many =
        format!("{{\"Pod\":{{\"spec\":{{\"containers\":[{containers}]}}}},\"NodeNames\":[\"n\"]}}");
    let (status, error) = post_request(&address, "/prioritize", &many);
    assert!(
        status == 400 && error.to_string().contains("at most 256 containers"),
        "{error}"
    );
    assert_eq!(
        post_request(&address, "/filter", &" ".repeat(2 << 20)).0,
        413
    );
    assert_eq!(post_request(&address, "/filter", recorded).0, 200);

    let args = ["--scheduler-token-file", "scheduler-token"];
    let (_guard, address) = server.start_informed_extender(root, &args, &busy, 2);
    for path in [
        "/prioritize",
        "/wrong/prioritize",
        &format!("/{token}x/filter"),
    ] {
        assert_eq!(post_request(&address, path, recorded).0, 401, "{path}");
    }
    let path = format!("/{token}/prioritize");
    assert_eq!(post_request(&address, &path, recorded).0, 200);
    assert!(in_flight(&address).ends_with(" 1.0") || in_flight(&address).ends_with(" 1"));
    run(root, &["extender", "--scheduler-token-file", "short"])
        .exits_with(1, &["found a token of 3 bytes, expected at least 16"]);
    run(root, &["extender"]).exits_with(2, &["--api-server: found none"]);
}

/// Does the extender answer every request for 1 000 nodes of eight caches on one connection? The test prints the times
/// of `CACHEMATE_REQUESTS` requests, or of four.
#[test]
fn requests_for_a_thousand_nodes_are_answered_and_timed() {
    let dir = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..1000).map(|node| format!("node-{node:04}")).collect();
    let mut nodes = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let mut node = node_state(name, 0.0);
        let caches = &mut node["status"]["state"]["caches"];
        let mut cache_state = caches[0].clone();
        cache_state["freeClasses"] = 8.into();
        cache_state["effects"] = [1.0, 0.75, 0.5, 0.25]
            .map(|share| json!({ "share": share, "slowdownPercent": 40.0 * (1.0 - share), "brokenLimits": 0.0 }))
            .to_vec()
            .into();
        let with_fills = |cache: usize| {
            let mut cache_state = cache_state.clone();
            cache_state["fillBytesPerSecond"] = (1e8 * ((index * 8 + cache) % 97) as f64).into();
            cache_state
        };
        *caches = (0..8).map(with_fills).collect();
        nodes.push(node);
    }
    let last = nodes.pop().unwrap();
    let server = FakeServer::listing(vec![workload_profile()], nodes);
    let (_guard, address) = server.start_informed_extender(dir.path(), &[], &last, 1000);
    let mut connection = BufReader::new(TcpStream::connect(&address).unwrap());
    let requests: u32 =
        std::env::var("CACHEMATE_REQUESTS").map_or(4, |count| count.parse().unwrap());
    let mut milliseconds = Vec::new();
    for request in 0..requests {
        // `filter` and `prioritize` alternate, with a new pod each time.
        let path = if request % 2 == 0 {
            "/filter"
        } else {
            "/prioritize"
        };
        let metadata = json!({ "uid": format!("pod-{}", request / 2), "annotations": { "cachemate.io/profile": "index" } });
        let containers =
            json!([{ "image": "index:1", "resources": { "requests": { "cpu": "500m" } } }]);
        let pod = json!({ "metadata": metadata, "spec": { "containers": containers } });
        let body = json!({ "Pod": pod, "NodeNames": names }).to_string();
        let start_time = Instant::now();
        let (status, answer) = exchange(&mut connection, "POST", path, &body);
        milliseconds.push(start_time.elapsed().as_secs_f64() * 1e3);
        assert!(
            status == 200 && answer.contains("node-0999"),
            "{status}: {answer}"
        );
    }
    let at = |share: f64| quantile(&milliseconds, share).unwrap();
    println!(
        "{requests} requests: median {:.2} ms, 99 % {:.2} ms, longest {:.2} ms",
        at(0.5),
        at(0.99),
        at(1.0)
    );
}
