use std::os::unix::net::UnixListener;
use std::time::Instant;

use super::wire::{PLUGIN_CONNECTION, fields};
use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

fn request(stream: u32, method: &str, payload: &[u8]) -> WireMessage {
    let body = MessageBuilder::default().bytes(1, b"nri").bytes(2, method.as_bytes()).bytes(3, payload).build();
    WireMessage { connection: PLUGIN_CONNECTION, stream, kind: REQUEST, body }
}

fn pod(id: &str, name: &str) -> Vec<u8> {
    let label = MessageBuilder::default().bytes(1, b"app").bytes(2, b"cart").build();
    let ids = MessageBuilder::default().bytes(1, id.as_bytes()).bytes(2, name.as_bytes());
    ids.bytes(3, b"uid").bytes(4, b"shop").bytes(5, &label).build()
}

fn container(id: &str, pod: &str, name: &str) -> Vec<u8> {
    let linux = MessageBuilder::default().bytes(5, b"/fleet/redis").build();
    let image = MessageBuilder::default().bytes(1, b"redis").bytes(2, b"sha256:1").build();
    let ids = MessageBuilder::default().bytes(1, id.as_bytes()).bytes(2, pod.as_bytes()).bytes(3, name.as_bytes());
    ids.bytes(11, &linux).number(12, 4711).bytes(22, &image).build()
}

fn change(event: u64, pod: &[u8], container: &[u8]) -> Vec<u8> {
    MessageBuilder::default().number(1, event).bytes(2, pod).bytes(3, container).build()
}

fn payload_of(answer: &[u8]) -> Vec<u8> {
    let fields = fields(answer).unwrap();
    fields.into_iter().find(|(field, _)| *field == 2).unwrap().1.bytes().to_vec()
}

/// Does the plugin learn all containers at the synchronization, each that starts later, and forget those that are removed?
#[test]
fn containers_come_and_go() {
    let directory = ServiceDirectory::default();
    let mut plugin = NriPlugin::new(directory.clone());
    let mut ask =
        |method: &str, payload: &[u8]| payload_of(&plugin.handle(&request(1, method, payload)).unwrap().unwrap());
    let configured = ask("Configure", &MessageBuilder::default().bytes(2, b"containerd").bytes(3, b"2.4").build());
    assert_eq!(fields(&configured).unwrap()[0].1.number(), 0b111_0010_0100);
    let part = MessageBuilder::default().bytes(1, &pod("p1", "cart-1")).bytes(2, &container("c1", "p1", "redis"));
    ask("Synchronize", &part.number(3, 1).build());
    assert!(directory.is_empty(), "more parts follow");
    ask("Synchronize", &MessageBuilder::default().bytes(2, &container("c2", "p1", "web")).build());
    let name = |id: &str| directory.by_id(id).map(|record| record.identity(id).to_string());
    assert_eq!(name("c1").as_deref(), Some("pod/shop/cart-1/redis"));
    assert_eq!(name("c2").as_deref(), Some("pod/shop/cart-1/web"));
    let record = directory.by_id("c1").unwrap();
    assert_eq!((record.image.as_deref(), record.labels["app"].as_str()), (Some("sha256:1"), "cart"));
    ask("StateChange", &change(6, &pod("p2", "cart-2"), &container("c3", "p2", "redis")));
    assert_eq!(name("c3").as_deref(), Some("pod/shop/cart-2/redis"));
    ask("StateChange", &change(11, &pod("p2", "cart-2"), &container("c3", "p2", "redis")));
    assert_eq!(name("c3"), None);
    assert_eq!(ask("ValidateContainerAdjustment", b""), b"", "unknown requests change nothing");
    assert!(plugin.take_start() && !plugin.take_start() && plugin.runtime() == Some("containerd 2.4"));
    assert!(plugin.handle(&request(1, "StateChange", &[0xff; 12])).is_err());
}

/// Takes the plugin's registration, configures and synchronizes it; answers with the connection.
fn serve(listener: &UnixListener) -> UnixStream {
    let (mut socket, _) = listener.accept().unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut reader = MessageReader::default();
    let mut next = |socket: &mut UnixStream| {
        let mut bytes = [0; 4096];
        loop {
            let count = socket.read(&mut bytes).unwrap();
            assert!(count > 0, "the plugin closed the connection");
            if let Some(message) = reader.push(&bytes[..count]).unwrap().into_iter().next() {
                return message;
            }
        }
    };
    let register = next(&mut socket);
    assert_eq!((register.connection, register.kind), (RUNTIME_CONNECTION, REQUEST));
    for (stream, method, payload) in [
        (1, "Configure", MessageBuilder::default().bytes(2, b"test").build()),
        (3, "Synchronize", MessageBuilder::default().bytes(2, &container("c1", "", "redis")).build()),
    ] {
        socket.write_all(&request(stream, method, &payload).encode()).unwrap();
        let answer = next(&mut socket);
        assert_eq!((answer.connection, answer.kind, answer.stream), (PLUGIN_CONNECTION, RESPONSE, stream));
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
fn a_restart_of_the_runtime_is_survived() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nri.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let (directory, wake) = (ServiceDirectory::default(), Arc::new(AtomicBool::new(false)));
    let options = NriOptions { socket, index: 10 };
    let plugin = NriThread::start(options, directory.clone(), wake.clone()).unwrap();
    let mut connection = serve(&listener);
    wait(|| plugin.state().runtime.as_deref() == Some("test"));
    assert!(directory.by_id("c1").is_some() && !wake.load(Ordering::Relaxed));
    let started = change(6, &pod("p1", "cart"), &container("c2", "p1", "web"));
    connection.write_all(&request(5, "StateChange", &started).encode()).unwrap();
    wait(|| directory.by_id("c2").is_some() && wake.load(Ordering::Relaxed));
    drop(connection);
    wait(|| plugin.state().error.is_some_and(|error| error.contains("closed the connection")));
    let mut broken = serve(&listener);
    wait(|| plugin.state().registrations == 2 && directory.by_id("c2").is_none());
    broken.write_all(&[0xff; 64]).unwrap();
    wait(|| plugin.state().error.is_some_and(|error| error.contains("expected connection 1 or 2")));
}
