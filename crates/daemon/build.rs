//! Builds the preloaded library of colored programs with the same compiler, so that the command can contain it.
//!
//! Cargo cannot make the shared library of one crate an input of another. Because the agent has no dependencies, one
//! call of the compiler suffices.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

fn main() {
    let agent = PathBuf::from("../agent/src");
    println!("cargo::rerun-if-changed={}", agent.display());
    println!("cargo::rerun-if-changed=build.rs");
    let read_variable = |name: &str| env::var(name).unwrap_or_default();
    let library = PathBuf::from(read_variable("OUT_DIR")).join("libcachemate_color.so");
    let mut compiler = Command::new(read_variable("RUSTC"));
    compiler.args(["--edition", "2024", "--crate-name", "cachemate_color", "--crate-type", "cdylib"]);
    compiler.args(["-C", "opt-level=3", "-C", "panic=abort", "-C", "strip=debuginfo"]);
    // All symbols are bound at load time, because the handler's thread must not run the dynamic linker.
    compiler.args(["-C", "link-arg=-Wl,-z,now", "-C", "link-arg=-nostartfiles", "--cfg", "feature=\"preload\""]);
    if read_variable("TARGET") != read_variable("HOST") {
        compiler.args(["--target", &read_variable("TARGET")]);
    }
    compiler.arg(agent.join("lib.rs")).arg("-o").arg(&library);
    match compiler.status() {
        Ok(status) if status.success() => {}
        Ok(status) => {
            eprintln!("the agent of 'cachemate page-color run' was not built: {compiler:?} ended with {status}");
            exit(1);
        }
        Err(error) => {
            eprintln!("the agent of 'cachemate page-color run' was not built: {compiler:?}: {error}");
            exit(1);
        }
    }
}
