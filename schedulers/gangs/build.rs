//! Compiles the BPF object with clang (18 or later), against the headers of the linked libbpf.
use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-env-changed=CLANG");
    if env::var_os("CARGO_FEATURE_KERNEL").is_none() {
        return;
    }
    let object = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("gangs.bpf.o");
    let headers = env::var("DEP_BPF_INCLUDE").expect("libbpf-sys tells it");
    let named_clang = env::var("CLANG").ok();
    let candidates = named_clang.map_or_else(
        || {
            ["clang", "clang-21", "clang-20", "clang-19", "clang-18"]
                .map(String::from)
                .to_vec()
        },
        |clang| vec![clang],
    );
    let mut tried = Vec::new();
    for clang in candidates {
        let built = Command::new(&clang)
            .args([
                "-target",
                "bpf",
                "-mcpu=v3",
                "-g",
                "-O2",
                "-Wall",
                "-Wno-unused-function",
                "-I",
                &headers,
            ])
            .args(["-c", "bpf/gangs.bpf.c", "-o"])
            .arg(&object)
            .output();
        match built {
            Ok(output) if output.status.success() => return,
            Ok(output) => tried.push(format!(
                "{clang}: {}",
                String::from_utf8_lossy(&output.stderr)
            )),
            Err(error) => tried.push(format!("{clang}: {error}")),
        }
    }
    panic!(
        "the BPF object needs clang 18 or later (CLANG names one):\n{}",
        tried.join("\n")
    );
}
