//! Files given on the command line that never answer or never end: FIFOs and devices.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::common::{ChildGuard, command};

/// Far longer than any rejection takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Does every command reject a FIFO and an endless device in place of a file, name it, and end, instead of waiting or
/// filling the memory?
#[test]
fn no_command_waits_for_a_fifo_or_reads_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
    std::os::unix::fs::symlink("/dev/zero", dir.path().join("zero")).unwrap();
    // Programs are looked up before the machine is read.
    std::fs::write(dir.path().join("program.cmt"), "").unwrap();
    for (name, kind) in [("./fifo", "a FIFO"), ("./zero", "a device")] {
        let commands: [&[&str]; 9] = [
            &["predict", name, name, "--machine", "xeon-x5365-4"],
            &["manage", "--check", "--config", name],
            &[
                "manage",
                "--config",
                name,
                "--state-dir",
                "state",
                "--socket",
                "s.sock",
            ],
            &["sim", name],
            &["replay", name],
            &["replay", name, "-o", "page.html"],
            &["mrc", name],
            &["plan", "--slowdowns", name, "--machine", "xeon-x5365-4"],
            &["predict", "program.cmt", "program.cmt", "--machine", name],
        ];
        for arguments in commands {
            let mut started = command(dir.path(), arguments);
            let mut child = ChildGuard(
                started
                    .stdout(Stdio::null())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap(),
            );
            let start = Instant::now();
            while child.0.try_wait().unwrap().is_none() {
                assert!(start.elapsed() < PATIENCE, "{arguments:?} waits");
                std::thread::sleep(Duration::from_millis(20));
            }
            let mut message = String::new();
            std::io::Read::read_to_string(&mut child.0.stderr.take().unwrap(), &mut message)
                .unwrap();
            assert_eq!(
                child.0.wait().unwrap().code(),
                Some(1),
                "{arguments:?}: {message}"
            );
            assert!(
                message.contains(name.trim_start_matches("./")) && message.contains(kind),
                "{arguments:?}: {message}"
            );
        }
    }
}
