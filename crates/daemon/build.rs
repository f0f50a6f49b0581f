//! Builds the library that is preloaded into colored programs, so that the `cachemate` binary can contain it.
//!
//! Cargo cannot make the shared library of one crate an input of another. Because the agent has no dependencies, one
//! call of the compiler suffices.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

fn main() {
    let agent_dir = PathBuf::from("../agent/src");
    println!("cargo::rerun-if-changed={}", agent_dir.display());
    println!("cargo::rerun-if-changed=build.rs");
    let read_variable = |name: &str| env::var(name).unwrap_or_default();
    let library = PathBuf::from(read_variable("OUT_DIR")).join("libcachemate_color.so");
    let mut compile_command = Command::new(read_variable("RUSTC"));
    compile_command.args([
        "--edition",
        "2024",
        "--crate-name",
        "cachemate_color",
        "--crate-type",
        "cdylib",
    ]);
    compile_command.args([
        "-C",
        "opt-level=3",
        "-C",
        "panic=abort",
        "-C",
        "strip=debuginfo",
    ]);
    // All symbols are bound at load time, because the handler's thread must not run the dynamic linker.
    compile_command.args([
        "-C",
        "link-arg=-Wl,-z,now",
        "-C",
        "link-arg=-nostartfiles",
        "--cfg",
        "feature=\"preload\"",
    ]);
    // The linker that Cargo uses, which may be one for another architecture or an older C library.
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        compile_command.args(["-C", &format!("linker={linker}")]);
    }
    if read_variable("TARGET") != read_variable("HOST") {
        compile_command.args(["--target", &read_variable("TARGET")]);
    }
    compile_command
        .arg(agent_dir.join("lib.rs"))
        .arg("-o")
        .arg(&library);
    match compile_command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => {
            eprintln!(
                "the agent of 'cachemate page-color run' was not built: {compile_command:?} ended with {status}"
            );
            exit(1);
        }
        Err(error) => {
            eprintln!(
                "the agent of 'cachemate page-color run' was not built: {compile_command:?}: {error}"
            );
            exit(1);
        }
    }
}
