use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Instant;

use super::wire::{PLUGIN_CONNECTION, parse_fields};
use super::*;
use crate::act::group_owners::GroupOwners;
use crate::kernel::{Kernel, LinuxHost};
use crate::safety::journal::{JournalObject, ObjectState};
use crate::safety::object_state::write_state;

const PATIENCE: Duration = Duration::from_secs(60);

fn request(stream: u32, method: &str, payload: &[u8]) -> WireMessage {
    let body = MessageBuilder::default()
        .with_bytes(1, b"nri")
        .with_bytes(2, method.as_bytes())
        .with_bytes(3, payload)
        .build();
    WireMessage {
        connection: PLUGIN_CONNECTION,
        stream,
        kind: REQUEST,
        body,
    }
}

fn pod_message(id: &str, name: &str) -> Vec<u8> {
    let label = MessageBuilder::default()
        .with_bytes(1, b"app")
        .with_bytes(2, b"cart")
        .build();
    let ids = MessageBuilder::default()
        .with_bytes(1, id.as_bytes())
        .with_bytes(2, name.as_bytes());
    let limit = MessageBuilder::default()
        .with_bytes(1, b"cachemate.io/max-slowdown")
        .with_bytes(2, b"10%")
        .build();
    let other = MessageBuilder::default()
        .with_bytes(1, b"app")
        .with_bytes(2, b"not the label")
        .build();
    let ids = ids
        .with_bytes(3, b"uid")
        .with_bytes(4, b"shop")
        .with_bytes(5, &label);
    ids.with_bytes(6, &limit).with_bytes(6, &other).build()
}

fn container_message(id: &str, pod: &str, name: &str) -> Vec<u8> {
    let linux = MessageBuilder::default()
        .with_bytes(5, b"/fleet/redis")
        .build();
    let image = MessageBuilder::default()
        .with_bytes(1, b"redis")
        .with_bytes(2, b"sha256:1")
        .build();
    let ids = MessageBuilder::default()
        .with_bytes(1, id.as_bytes())
        .with_bytes(2, pod.as_bytes())
        .with_bytes(3, name.as_bytes());
    ids.with_bytes(11, &linux)
        .with_number(12, 4711)
        .with_bytes(22, &image)
        .build()
}

fn state_change(event: u64, pod: &[u8], container: &[u8]) -> Vec<u8> {
    MessageBuilder::default()
        .with_number(1, event)
        .with_bytes(2, pod)
        .with_bytes(3, container)
        .build()
}

fn payload_of(answer: &[u8]) -> Vec<u8> {
    let fields = parse_fields(answer).unwrap();
    fields
        .into_iter()
        .find(|(field, _)| *field == 2)
        .unwrap()
        .1
        .bytes()
        .to_vec()
}

/// Does the plugin learn all containers at the synchronization, each that starts later, and forget those that are
/// removed?
#[test]
fn the_plugin_learns_started_and_forgets_removed_containers() {
    let directory = ServiceDirectory::default();
    let mut plugin = NriPlugin::new(directory.clone());
    let mut ask = |method: &str, payload: &[u8]| {
        payload_of(
            &plugin
                .handle(&request(1, method, payload))
                .unwrap()
                .unwrap(),
        )
    };
    let configured = ask(
        "Configure",
        &MessageBuilder::default()
            .with_bytes(2, b"containerd")
            .with_bytes(3, b"2.4")
            .build(),
    );
    assert_eq!(
        parse_fields(&configured).unwrap()[0].1.to_number(),
        0b111_0010_0100
    );
    let part = MessageBuilder::default()
        .with_bytes(1, &pod_message("p1", "cart-1"))
        .with_bytes(2, &container_message("c1", "p1", "redis"));
    ask("Synchronize", &part.with_number(3, 1).build());
    assert!(directory.is_empty(), "more parts follow");
    ask(
        "Synchronize",
        &MessageBuilder::default()
            .with_bytes(2, &container_message("c2", "p1", "web"))
            .build(),
    );
    let name = |id: &str| {
        directory
            .find_by_id(id)
            .map(|record| record.identity(id).to_string())
    };
    assert_eq!(name("c1").as_deref(), Some("pod/shop/cart-1/redis"));
    assert_eq!(name("c2").as_deref(), Some("pod/shop/cart-1/web"));
    let record = directory.find_by_id("c1").unwrap();
    assert_eq!(
        (record.image_name.as_deref(), record.max_slowdown()),
        (Some("redis"), Some(0.1))
    );
    assert_eq!(
        (record.image.as_deref(), record.labels["app"].as_str()),
        (Some("sha256:1"), "cart")
    );
    ask(
        "StateChange",
        &state_change(
            6,
            &pod_message("p2", "cart-2"),
            &container_message("c3", "p2", "redis"),
        ),
    );
    assert_eq!(name("c3").as_deref(), Some("pod/shop/cart-2/redis"));
    ask(
        "StateChange",
        &state_change(
            11,
            &pod_message("p2", "cart-2"),
            &container_message("c3", "p2", "redis"),
        ),
    );
    assert_eq!(name("c3"), None);
    assert_eq!(
        ask("ValidateContainerAdjustment", b""),
        b"",
        "unknown requests change nothing"
    );
    assert_eq!(
        (plugin.take_start(), plugin.take_start()),
        (Some(("c3".to_string(), 4711)), None)
    );
    assert_eq!(plugin.runtime(), Some("containerd 2.4"));
    assert!(
        plugin
            .handle(&request(1, "StateChange", &[0xff; 12]))
            .is_err()
    );
}

fn channels() -> NriChannels {
    NriChannels {
        directory: ServiceDirectory::default(),
        starts: ContainerStarts::default(),
        updates: ContainerUpdates::new().unwrap(),
        wake: Arc::default(),
    }
}

/// Accepts the plugin's registration, configures and synchronizes the plugin, and returns the connection.
fn serve(listener: &UnixListener) -> UnixStream {
    let (mut socket, _) = listener.accept().unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut reader = MessageReader::default();
    let mut next = |socket: &mut UnixStream| next_call(socket, &mut reader);
    let register = next(&mut socket);
    assert_eq!(
        (register.connection, register.kind),
        (RUNTIME_CONNECTION, REQUEST)
    );
    for (stream, method, payload) in [
        (
            1,
            "Configure",
            MessageBuilder::default().with_bytes(2, b"test").build(),
        ),
        (
            3,
            "Synchronize",
            MessageBuilder::default()
                .with_bytes(2, &container_message("c1", "", "redis"))
                .build(),
        ),
    ] {
        socket
            .write_all(&request(stream, method, &payload).encode())
            .unwrap();
        let answer = next(&mut socket);
        assert_eq!(
            (answer.connection, answer.kind, answer.stream),
            (PLUGIN_CONNECTION, RESPONSE, stream)
        );
    }
    socket
}

fn wait(mut is_done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_done() {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Does the plugin register, notice the end of the runtime, and register anew with all containers?
#[test]
fn the_plugin_registers_anew_after_a_runtime_restart() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nri.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let (channels, options) = (channels(), NriOptions { socket, index: 10 });
    let NriChannels {
        directory, wake, ..
    } = channels.clone();
    let plugin = NriThread::start(options, channels).unwrap();
    let mut connection = serve(&listener);
    wait(|| plugin.state().runtime.as_deref() == Some("test"));
    assert!(directory.find_by_id("c1").is_some() && !wake.load(Ordering::Relaxed));
    let started = state_change(
        6,
        &pod_message("p1", "cart"),
        &container_message("c2", "p1", "web"),
    );
    connection
        .write_all(&request(5, "StateChange", &started).encode())
        .unwrap();
    wait(|| directory.find_by_id("c2").is_some() && wake.load(Ordering::Relaxed));
    drop(connection);
    wait(|| {
        plugin
            .state()
            .error
            .is_some_and(|error| error.contains("closed the connection"))
    });
    let mut broken = serve(&listener);
    wait(|| plugin.state().registrations == 2 && directory.find_by_id("c2").is_none());
    broken.write_all(&[0xff; 64]).unwrap();
    wait(|| {
        plugin
            .state()
            .error
            .is_some_and(|error| error.contains("expected connection 1 or 2"))
    });
}

/// Takes the next call of the plugin.
fn next_call(connection: &mut UnixStream, reader: &mut MessageReader) -> WireMessage {
    let mut bytes = [0; 4096];
    loop {
        let count = connection.read(&mut bytes).unwrap();
        assert!(count > 0, "the plugin closed the connection");
        if let Some(message) = reader.push(&bytes[..count]).unwrap().into_iter().next() {
            return message;
        }
    }
}

/// A container's CPUs, as a call of `UpdateContainers` has them.
fn update_of(call: &WireMessage) -> (String, String) {
    let body = parse_fields(&call.body).unwrap();
    assert_eq!(
        body.iter()
            .find(|(field, _)| *field == 2)
            .unwrap()
            .1
            .to_text(),
        "UpdateContainers"
    );
    let inner = |bytes: &[u8], field: u64| {
        let fields = parse_fields(bytes).unwrap();
        fields
            .into_iter()
            .find(|(number, _)| *number == field)
            .unwrap()
            .1
            .bytes()
            .to_vec()
    };
    let update = inner(&inner(&call.body, 3), 1);
    let cpu = inner(&inner(&inner(&update, 2), 1), 2);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (text(inner(&update, 1)), text(inner(&cpu, 6)))
}

/// Is a container's cpuset changed and restored by its runtime, its refusal reported in its words, and the group's file
/// written if there is no runtime any more?
#[test]
fn the_runtime_changes_the_cpus_of_its_containers() {
    let dir = tempfile::tempdir().unwrap();
    let put = |path: &str, text: &str| crate::fake_tests::write_tree(dir.path(), [(path, text)]);
    put(
        "proc/mounts",
        "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n",
    );
    let cpus_file = "sys/fs/cgroup/cpuset/fleet/redis/cpuset.cpus";
    put(cpus_file, "0-3\n");
    let socket = dir.path().join("nri.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let channels = channels();
    let owners = GroupOwners::with_runtime(channels.directory.clone(), channels.updates.clone());
    let host = LinuxHost::new(dir.path()).with_owners(owners);
    let plugin = NriThread::start(NriOptions { socket, index: 10 }, channels.clone()).unwrap();
    let mut connection = serve(&listener);
    wait(|| channels.updates.is_connected());
    let object = JournalObject::File {
        path: format!("/{cpus_file}").into(),
    };
    let set = |cpus: &str| write_state(&host, &object, &ObjectState::Text(cpus.to_string()));
    let refusal = MessageBuilder::default()
        .with_number(1, 3)
        .with_bytes(2, b"not now")
        .build();
    std::thread::scope(|scope| {
        let runtime = scope.spawn(|| {
            let mut reader = MessageReader::default();
            let mut updates = Vec::new();
            for error in [None, None, Some(&refusal)] {
                let call = next_call(&mut connection, &mut reader);
                let (id, cpus) = update_of(&call);
                if error.is_none() {
                    put(cpus_file, &format!("{cpus}\n"));
                }
                updates.push((id, cpus));
                let body = error.map_or(Vec::new(), |error| {
                    MessageBuilder::default().with_bytes(1, error).build()
                });
                let answer = WireMessage {
                    kind: RESPONSE,
                    body,
                    ..call
                };
                connection.write_all(&answer.encode()).unwrap();
            }
            drop(connection);
            updates
        });
        set("1").unwrap();
        assert_eq!(
            host.read(Path::new(&format!("/{cpus_file}"))).unwrap(),
            "1\n"
        );
        set("0-3").unwrap();
        assert!(
            set("2")
                .unwrap_err()
                .to_string()
                .contains("error 3: not now")
        );
        let expected = ["1", "0-3", "2"].map(|cpus| ("c1".to_string(), cpus.to_string()));
        assert_eq!(runtime.join().unwrap(), expected);
    });
    wait(|| !channels.updates.is_connected());
    set("2").unwrap();
    assert!(
        host.read(Path::new(&format!("/{cpus_file}")))
            .unwrap()
            .starts_with("2\n")
    );
    drop(plugin);
}

/// Does a container start within five milliseconds although the daemon stays busy, and is it placed first if the
/// daemon is idle?
#[test]
fn no_container_waits_for_a_busy_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nri.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let channels = channels();
    let plugin = NriThread::start(NriOptions { socket, index: 10 }, channels.clone()).unwrap();
    let mut connection = serve(&listener);
    let mut reader = MessageReader::default();
    let mut start_container = |stream: u32| {
        let started = state_change(
            6,
            &pod_message("p1", "cart"),
            &container_message("c2", "p1", "web"),
        );
        let start = Instant::now();
        connection
            .write_all(&request(stream, "StateChange", &started).encode())
            .unwrap();
        let answer = next_call(&mut connection, &mut reader);
        assert_eq!((answer.kind, answer.stream), (RESPONSE, stream));
        start.elapsed()
    };
    // The fastest of twenty, because other programs share the processors.
    let fastest = (0..20)
        .map(|round| start_container(5 + 2 * round))
        .min()
        .unwrap();
    assert!(fastest <= Duration::from_millis(5), "{fastest:?}");
    wait(|| plugin.state().starts == 20);
    assert_eq!(plugin.state().placed_starts, 0);
    while channels.starts.wait_for_start(Duration::ZERO).is_some() {} // what nobody waits for any more
    // The wait of the plugin is short, and a crowded host may take longer to wake the daemon.
    let starts = channels.starts.clone();
    let stop = Arc::new(AtomicBool::new(false));
    let ended = stop.clone();
    let daemon = std::thread::spawn(move || {
        while !ended.load(Ordering::Relaxed) {
            if let Some(start) = starts.wait_for_start(Duration::from_millis(100)) {
                assert_eq!((start.id.as_str(), start.pid), ("c2", 4711));
                start.answer(true);
            }
        }
    });
    let mut stream = 101;
    wait(|| {
        stream += 2;
        start_container(stream);
        plugin.state().placed_starts > 0
    });
    stop.store(true, Ordering::Relaxed);
    daemon.join().unwrap();
}
