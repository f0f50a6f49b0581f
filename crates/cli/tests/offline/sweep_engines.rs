//! Do sweeps end with the same bytes on real engines whose nodes, workers and servers are killed during the run?
//!
//! `make sweep-engines` installs the engines and runs this; missing engines are reported. Everything uses loopback and
//! separate directories.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::{ChildGuard, command, run, until};
use crate::sweep::results_in;

fn asked() -> bool {
    let is_requested = std::env::var_os("CACHEMATE_ENGINES").is_some();
    if !is_requested {
        println!("not shown here: sweeps on other engines; make sweep-engines");
    }
    is_requested
}

/// Length of one task: about a third of a CPU second in a release build.
const CYCLES: u64 = 3_000_000;

/// A directory with a sweep of this number of tasks, and the local engine's result.
fn prepare_sweep(tasks: u32) -> (tempfile::TempDir, Vec<u8>) {
    let dir = tempfile::Builder::new()
        .prefix("engines")
        .tempdir()
        .unwrap();
    let root = dir.path();
    let scenario = format!(
        "name = \"pair\"\ndescription = \"two programs\"\nmachine = \"xeon-x5365-4\"\nseed = 1\nscale = 100\n\
         length = {{ cycles = {CYCLES} }}\n[[programs]]\nprogram = \"mcf\"\n[[programs]]\nprogram = \"gamess\"\n"
    );
    fs::write(root.join("pair.toml"), scenario).unwrap();
    let sweep = format!(
        "name = \"pairs\"\ndetail = false\n[axes]\nscenario = [\"pair.toml\"]\nseed = {{ first = 1, count = {tasks} }}\n"
    );
    fs::write(root.join("sweep.toml"), sweep).unwrap();
    run(root, &["sweep", "run", "sweep.toml", "-o", "local"]).ok();
    run(root, &["sweep", "merge", "local"]).ok();
    let bytes = fs::read(root.join("local/merged.jsonl")).unwrap();
    (dir, bytes)
}

/// A sweep in progress; its messages go to a file.
struct SweepProcess {
    running: ChildGuard,
    said: PathBuf,
}

impl SweepProcess {
    fn start(at: &Path, out: &str, args: &[&str], env: &[(&str, &Path)]) -> SweepProcess {
        let message = at.join(format!("{out}.said"));
        let file = fs::File::create(&message).unwrap();
        let mut sweep = command(
            at,
            &[&["sweep", "run", "sweep.toml", "-o", out], args].concat(),
        );
        sweep
            .envs(env.iter().copied())
            .stdout(file.try_clone().unwrap())
            .stderr(file);
        SweepProcess {
            running: ChildGuard(sweep.spawn().unwrap()),
            said: message,
        }
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.said).unwrap()
    }

    /// Checks that it ended successfully with these bytes.
    #[track_caller]
    fn ends_with(mut self, at: &Path, out: &str, expected: &[u8]) {
        let mut code = None;
        until("the sweep's end", || {
            code = self.running.0.try_wait().unwrap();
            code.is_some()
        });
        assert!(code.is_some_and(|code| code.success()), "{}", self.said());
        let merged = run(at, &["sweep", "merge", out]).ok();
        assert!(
            fs::read(at.join(out).join("merged.jsonl")).unwrap() == expected,
            "other bytes: {}",
            merged.out
        );
        println!("{out}: {}", self.said().trim());
    }
}

fn find_free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

fn spawn_logged(mut command: Command, log: &Path) -> ChildGuard {
    let log = fs::File::create(log).unwrap();
    let started = command
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn();
    ChildGuard(started.unwrap_or_else(|error| panic!("{command:?}: {error}")))
}

/// Slurm's daemons on loopback: a controller and four node names on this host.
struct Cluster {
    dir: PathBuf,
    controller: Option<ChildGuard>,
    nodes: Vec<ChildGuard>,
    _munge: ChildGuard,
}

impl Cluster {
    fn start(dir: &Path) -> Cluster {
        use std::os::unix::fs::PermissionsExt;
        let path_of = |name: &str| dir.join(name);
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["munge", "state"] {
            fs::create_dir(path_of(name)).unwrap();
            fs::set_permissions(path_of(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::write(path_of("munge/key"), [7u8; 128]).unwrap();
        fs::set_permissions(path_of("munge/key"), fs::Permissions::from_mode(0o600)).unwrap();
        let mut munged = Command::new("munged");
        munged.args(["--foreground", "--force"]);
        for (name, file) in [
            ("key-file", "key"),
            ("socket", "socket"),
            ("pid-file", "pid"),
            ("seed-file", "seed"),
        ] {
            munged.arg(format!(
                "--{name}={}",
                path_of("munge").join(file).display()
            ));
        }
        let munge = spawn_logged(munged, &path_of("munge.log"));
        until("munge's socket", || path_of("munge/socket").exists());
        fs::write(path_of("slurm.conf"), Self::slurm_config(dir)).unwrap();
        let mut cluster = Cluster {
            dir: dir.to_path_buf(),
            controller: None,
            nodes: Vec::new(),
            _munge: munge,
        };
        cluster.start_controller(true);
        for node in 0..4 {
            let mut slurmd = Command::new("slurmd");
            slurmd
                .args(["-D", "-N", &format!("n{node}"), "-f"])
                .arg(path_of("slurm.conf"));
            cluster.nodes.push(spawn_logged(
                slurmd,
                &path_of(&format!("slurmd-{node}.out")),
            ));
        }
        until("four idle nodes", || {
            cluster
                .ask("sinfo", &["-h", "-N", "-o", "%T"])
                .matches("idle")
                .count()
                == 4
        });
        cluster
    }

    fn slurm_config(dir: &Path) -> String {
        let host =
            String::from_utf8(Command::new("hostname").arg("-s").output().unwrap().stdout).unwrap();
        let (host, d) = (host.trim(), dir.display());
        let mut text = format!(
            "ClusterName=cachemate\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={}\nAuthType=auth/munge\n\
             AuthInfo=socket={d}/munge/socket\nSlurmUser=root\nSlurmdUser=root\nStateSaveLocation={d}/state\n\
             SlurmdSpoolDir={d}/spool-%n\nSlurmctldPidFile={d}/controller.pid\nSlurmdPidFile={d}/slurmd-%n.pid\n\
             SlurmctldLogFile={d}/controller.log\nSlurmdLogFile={d}/slurmd-%n.log\nProctrackType=proctrack/linuxproc\n\
             TaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\nReturnToService=2\nSlurmdTimeout=10\n\
             SlurmdParameters=config_overrides\nSelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\n\
             MaxArraySize=11\nMpiDefault=none\n",
            find_free_port()
        );
        for node in 0..4 {
            let port = find_free_port();
            text.push_str(&format!(
                "NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2\n"
            ));
        }
        text + "PartitionName=all Nodes=ALL Default=YES State=UP\n"
    }

    fn start_controller(&mut self, fresh: bool) {
        let mut slurmctld = Command::new("slurmctld");
        slurmctld
            .args(["-D", "-f"])
            .arg(self.dir.join("slurm.conf"));
        if fresh {
            slurmctld.arg("-c");
        }
        self.controller = Some(spawn_logged(slurmctld, &self.dir.join("controller.out")));
    }

    fn ask(&self, program: &str, args: &[&str]) -> String {
        // Clients hang without a controller.
        let mut client = Command::new("timeout");
        client
            .args(["-k", "1", "10", program])
            .args(args)
            .env("SLURM_CONF", self.dir.join("slurm.conf"));
        String::from_utf8_lossy(&client.output().unwrap().stdout).into_owned()
    }

    fn set_nodes(&self, nodes: &str, state: &str) {
        let (nodes, state) = (format!("NodeName={nodes}"), format!("State={state}"));
        until("the node's state", || {
            self.ask("scontrol", &["update", &nodes, &state, "Reason=test"]);
            let shown = self.ask(
                "sinfo",
                &["-h", "-N", "-n", &nodes["NodeName=".len()..], "-o", "%T"],
            );
            shown.contains("drain") == (state == "State=DRAIN")
        });
    }
}

fn has(program: &str, version: &str) -> bool {
    Command::new(program)
        .arg(version)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success())
}

/// Can the program be started? Without a configuration, Slurm's clients fail even with `--version`.
fn is_there(program: &str) -> bool {
    Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok()
}

/// Is every task in the merged result once, although a node is drained, and a node's daemon and the controller are
/// killed?
#[test]
fn slurm_merges_every_task_once_despite_lost_nodes() {
    if !asked() {
        return;
    }
    if !["slurmctld", "slurmd", "squeue", "munged"]
        .iter()
        .all(|program| is_there(program))
    {
        println!("not shown here: Slurm (slurmctld, slurmd, slurm-client, munge)");
        return;
    }
    let (dir, expected) = prepare_sweep(40);
    let root = dir.path();
    let mut cluster = Cluster::start(
        &tempfile::Builder::new()
            .prefix("slurm")
            .tempdir()
            .unwrap()
            .keep(),
    );
    let conf = cluster.dir.join("slurm.conf");
    let env: [(&str, &Path); 1] = [("SLURM_CONF", &conf)];
    let args = ["--engine", "slurm", "--heartbeat-timeout", "10"];
    SweepProcess::start(root, "plain", &args, &env).ends_with(root, "plain", &expected);
    // Forty tasks are four arrays if the maximum size is eleven.
    let scripts = fs::read_dir(root.join("plain/engine/slurm"))
        .unwrap()
        .flatten();
    assert_eq!(
        scripts
            .filter(|entry| entry.path().extension().is_some_and(|kind| kind == "sh"))
            .count(),
        4
    );

    let sweep = SweepProcess::start(root, "hurt", &args, &env);
    until("the first results", || results_in(&root.join("hurt")) >= 3);
    cluster.set_nodes("n0", "DRAIN");
    cluster.nodes[1].0.kill().unwrap();
    until("more results", || results_in(&root.join("hurt")) >= 8);
    cluster.controller = None; // killed when dropped
    std::thread::sleep(Duration::from_secs(3));
    cluster.start_controller(false);
    sweep.ends_with(root, "hurt", &expected);

    for node in ["n0", "n1", "n2", "n3"] {
        cluster.set_nodes(node, "DRAIN");
    }
    let sweep = SweepProcess::start(root, "stuck", &args, &env);
    until("word of it", || sweep.said().contains("all 4 nodes are d"));
    for node in ["n0", "n2", "n3"] {
        cluster.set_nodes(node, "RESUME");
    }
    sweep.ends_with(root, "stuck", &expected);
    cluster.ask("scancel", &["--user", "root"]);
    let cluster_dir = cluster.dir.clone();
    drop(cluster);
    let _ = fs::remove_dir_all(cluster_dir);
}

/// The Python interpreter with Dask.
fn find_dask_python() -> Option<String> {
    let python = std::env::var("CACHEMATE_DASK_PYTHON").unwrap_or("python3".to_string());
    let import = Command::new(&python)
        .args(["-c", "import distributed"])
        .stderr(Stdio::null())
        .status();
    if !import.is_ok_and(|status| status.success()) {
        println!(
            "not shown here: Dask (pip install distributed; CACHEMATE_DASK_PYTHON names its Python)"
        );
        return None;
    }
    Some(python)
}

/// Is every task in the merged result once on a local Dask cluster, even if a worker and the scheduler are killed?
#[test]
fn dask_merges_every_task_once_despite_kills() {
    if !asked() {
        return;
    }
    let Some(python) = find_dask_python() else {
        return;
    };
    let (dir, expected) = prepare_sweep(40);
    let root = dir.path();
    let args = [
        "--engine",
        "dask",
        "--python",
        &python,
        "--heartbeat-timeout",
        "10",
    ];
    SweepProcess::start(root, "own", &[&args[..], &["--workers", "2"]].concat(), &[])
        .ends_with(root, "own", &expected);

    let address = format!("tcp://127.0.0.1:{}", find_free_port());
    let start_scheduler = || {
        let mut scheduler = Command::new(&python);
        let port = address.rsplit(':').next().unwrap();
        scheduler.args([
            "-m",
            "distributed.cli.dask_scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            port,
        ]);
        scheduler
            .args(["--no-dashboard", "--no-show"])
            .current_dir(root);
        spawn_logged(scheduler, &root.join("scheduler.log"))
    };
    let start_worker = |name: &str| {
        let mut worker = Command::new(&python);
        worker.args([
            "-m",
            "distributed.cli.dask_worker",
            &address,
            "--no-nanny",
            "--nthreads",
            "1",
            "--no-dashboard",
        ]);
        worker
            .args(["--name", name, "--death-timeout", "120"])
            .current_dir(root);
        spawn_logged(worker, &root.join(format!("worker-{name}.log")))
    };
    let mut first = start_scheduler();
    let mut workers = [start_worker("a"), start_worker("b"), start_worker("c")];
    let sweep = SweepProcess::start(
        root,
        "hurt",
        &[&args[..], &["--scheduler", &address]].concat(),
        &[],
    );
    until("the first results", || results_in(&root.join("hurt")) >= 3);
    workers[0].0.kill().unwrap();
    until("more results", || results_in(&root.join("hurt")) >= 10);
    first.0.kill().unwrap();
    first.0.wait().unwrap();
    workers.iter_mut().for_each(|worker| _ = worker.0.kill());
    let _second = start_scheduler();
    let _others = [start_worker("d"), start_worker("e")];
    sweep.ends_with(root, "hurt", &expected);
}

/// Is every task in the merged result once on a HyperQueue server that the sweep starts, even if a worker and the
/// server are killed?
#[test]
fn hyperqueue_merges_every_task_once_despite_kills() {
    if !asked() {
        return;
    }
    let hq = std::env::var("CACHEMATE_HQ").unwrap_or("hq".to_string());
    if !has(&hq, "--version") {
        println!("not shown here: HyperQueue (no 'hq'; CACHEMATE_HQ names it)");
        return;
    }
    let (dir, expected) = prepare_sweep(40);
    let root = dir.path();
    let args = ["--engine", "hq", "--hq", &hq, "--heartbeat-timeout", "10"];
    SweepProcess::start(root, "own", &[&args[..], &["--workers", "2"]].concat(), &[])
        .ends_with(root, "own", &expected);

    let server_dir = root.join("server");
    let start_hq = |arguments: &[&str], log: &str| {
        let mut hq = Command::new(&hq);
        hq.arg("--server-dir")
            .arg(&server_dir)
            .args(arguments)
            .current_dir(root);
        spawn_logged(hq, &root.join(log))
    };
    let journal = root.join("journal").display().to_string();
    let server = [
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--journal",
        &journal,
        "--journal-flush-period",
        "200ms",
    ];
    let worker = ["worker", "start", "--cpus", "1", "--heartbeat", "1s"];
    let mut first = start_hq(&server, "server-1.log");
    until("the server", || {
        let mut info = Command::new(&hq);
        info.arg("--server-dir")
            .arg(&server_dir)
            .args(["server", "info"]);
        info.stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    });
    let mut workers = [
        start_hq(&worker, "worker-1.log"),
        start_hq(&worker, "worker-2.log"),
    ];
    let place = server_dir.display().to_string();
    let sweep = SweepProcess::start(
        root,
        "hurt",
        &[&args[..], &["--scheduler", &place]].concat(),
        &[],
    );
    until("the first results", || results_in(&root.join("hurt")) >= 3);
    workers[0].0.kill().unwrap();
    until("more results", || results_in(&root.join("hurt")) >= 10);
    first.0.kill().unwrap();
    first.0.wait().unwrap();
    workers.iter_mut().for_each(|worker| _ = worker.0.kill());
    let _second = start_hq(&server, "server-2.log");
    let _others = [
        start_hq(&worker, "worker-3.log"),
        start_hq(&worker, "worker-4.log"),
    ];
    sweep.ends_with(root, "hurt", &expected);
}
