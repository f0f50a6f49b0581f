//! Programs that can be preloaded; all others are refused with the reason instead of silently running without colors.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Finds the file that a shell would run for `name`.
pub fn find_executable(name: &str, path: Option<&str>) -> Option<PathBuf> {
    let is_executable = |file: &PathBuf| {
        file.metadata()
            .is_ok_and(|meta| meta.is_file() && meta.mode() & 0o111 != 0)
    };
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(is_executable);
    }
    path?
        .split(':')
        .map(|dir| Path::new(dir).join(name))
        .find(is_executable)
}

/// The reason why the program cannot run colored; `None` if it can.
///
/// # Errors
/// The file cannot be read.
pub fn find_refusal(file: &Path) -> io::Result<Option<String>> {
    find_refusal_within(file, 4)
}

fn find_refusal_within(file: &Path, interpreters_left: u32) -> io::Result<Option<String>> {
    let path_text = file.display();
    let executable = cachemate_files::open_plain(file)?;
    let mode = executable.metadata()?.mode();
    if mode & 0o6000 != 0 {
        return Ok(Some(format!(
            "{path_text}: runs with another user's rights (set-user-id), for which nothing is preloaded"
        )));
    }
    let mut head = [0u8; 256];
    let read_len = (&executable).read(&mut head)?;
    if let Some(line) = head[..read_len].strip_prefix(b"#!") {
        let line =
            String::from_utf8_lossy(line.split(|&byte| byte == b'\n').next().unwrap_or_default())
                .into_owned();
        let mut words = line.split_ascii_whitespace();
        let interpreter = words.next().unwrap_or_default();
        if interpreters_left == 0 {
            return Ok(Some(format!(
                "{path_text}: scripts that run scripts, too deep"
            )));
        }
        // In `env NAME`, the program is NAME, which is looked up in PATH.
        let is_env = interpreter.rsplit('/').next() == Some("env");
        let command_name = if is_env {
            command_of_env(&mut words)
        } else {
            None
        };
        let path = std::env::var("PATH").ok();
        let target = command_name.map_or_else(
            || Some(PathBuf::from(interpreter)),
            |name| find_executable(name, path.as_deref()),
        );
        return match target {
            Some(target) => find_refusal_within(&target, interpreters_left - 1),
            None => Ok(Some(format!(
                "{path_text}: its interpreter '{line}' is not found"
            ))),
        };
    }
    Ok(check_loader(&executable, &head[..read_len])
        .err()
        .map(|reason| format!("{path_text}: {reason}")))
}

/// The program that `env` runs: the first word that is no option, no argument of an option, and no variable.
fn command_of_env<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<&'a str> {
    while let Some(word) = words.next() {
        if matches!(word, "-u" | "--unset" | "-C" | "--chdir") {
            words.next();
        } else if !word.starts_with('-') && !word.contains('=') {
            return Some(word);
        }
    }
    None
}

/// Checks that an ELF program's dynamic linker can preload a library; the error is the reason why it cannot.
fn check_loader(executable: &File, head: &[u8]) -> Result<(), String> {
    let u16_at = |index: usize| {
        head.get(index..index + 2)
            .map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
    };
    if head.get(..4) != Some(b"\x7fELF") {
        return Err("neither an ELF program nor a script".to_string());
    }
    if head.get(4..6) != Some(&[2, 1]) || u16_at(18) != Some(62) {
        return Err("not a program for x86-64".to_string());
    }
    let table_offset = head
        .get(32..40)
        .map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")));
    let (Some(table), Some(size), Some(count)) = (table_offset, u16_at(54), u16_at(56)) else {
        return Err("its ELF header is cut off".to_string());
    };
    for index in 0..u64::from(count) {
        let mut entry = [0u8; 56];
        let entry_offset = table
            .checked_add(index * u64::from(size))
            .ok_or("its program headers lie nowhere")?;
        executable
            .read_exact_at(&mut entry, entry_offset)
            .map_err(|error| format!("its program headers: {error}"))?;
        let u64_at = |index: usize| {
            u64::from_le_bytes(entry[index..index + 8].try_into().expect("eight bytes"))
        };
        if u32::from_le_bytes(entry[..4].try_into().expect("four bytes")) != 3 {
            continue; // not PT_INTERP
        }
        let mut name = vec![0u8; u64_at(32).min(4096) as usize];
        executable
            .read_exact_at(&mut name, u64_at(8))
            .map_err(|error| format!("its dynamic linker: {error}"))?;
        let name = String::from_utf8_lossy(&name)
            .trim_end_matches('\0')
            .to_string();
        return match name.contains("ld-linux") {
            true => Ok(()),
            false => Err(format!(
                "its dynamic linker is {name}, not the GNU C library's"
            )),
        };
    }
    Err("statically linked: nothing can be preloaded".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn write_program(content: &[u8], mode: u32) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        (dir, path)
    }

    fn elf_bytes(interpreter: Option<&[u8]>) -> Vec<u8> {
        let mut bytes = vec![0u8; 64 + 56];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18] = 62;
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = 1;
        bytes[64] = if interpreter.is_some() { 3 } else { 1 };
        let name = interpreter.unwrap_or_default();
        bytes[64 + 8..64 + 16].copy_from_slice(&(120u64).to_le_bytes());
        bytes[64 + 32..64 + 40].copy_from_slice(&(name.len() as u64).to_le_bytes());
        bytes.extend_from_slice(name);
        bytes
    }

    fn refusal_text(content: &[u8], mode: u32) -> Option<String> {
        let (_dir, path) = write_program(content, mode);
        find_refusal(&path)
            .unwrap()
            .map(|reason| reason.replace(&path.display().to_string(), "P"))
    }

    /// Are static, foreign and set-user-id programs refused with the reason, and ordinary ones not?
    #[test]
    fn programs_that_cannot_be_preloaded_are_refused_with_reason() {
        assert_eq!(
            refusal_text(&elf_bytes(Some(b"/lib64/ld-linux-x86-64.so.2\0")), 0o755),
            None
        );
        assert_eq!(
            refusal_text(&elf_bytes(None), 0o755).unwrap(),
            "P: statically linked: nothing can be preloaded"
        );
        assert!(
            refusal_text(&elf_bytes(Some(b"/lib/ld-musl-x86_64.so.1\0")), 0o755)
                .unwrap()
                .contains("ld-musl")
        );
        assert!(
            refusal_text(&elf_bytes(Some(b"/lib64/ld-linux-x86-64.so.2\0")), 0o4755)
                .unwrap()
                .contains("set-user-id")
        );
        assert!(
            refusal_text(b"hello", 0o755)
                .unwrap()
                .contains("neither an ELF")
        );
        assert!(
            refusal_text(&elf_bytes(None)[..60], 0o755).is_some(),
            "cut off"
        );
    }

    /// Does a script count as its interpreter, also through env, and does a cycle of scripts end?
    #[test]
    fn a_script_counts_as_its_interpreter() {
        assert_eq!(
            refusal_text(b"#!/bin/sh\necho\n", 0o755),
            find_refusal(Path::new("/bin/sh")).unwrap()
        );
        assert_eq!(
            refusal_text(b"#!/usr/bin/env sh\n", 0o755),
            find_refusal(Path::new("/bin/sh")).unwrap()
        );
        let with_options = b"#!/usr/bin/env -u DISPLAY -i LANG=C sh\n";
        assert_eq!(
            refusal_text(with_options, 0o755),
            find_refusal(Path::new("/bin/sh")).unwrap()
        );
        assert!(
            refusal_text(b"#!/usr/bin/env no-such-program-here\n", 0o755)
                .unwrap()
                .contains("not found")
        );
        let (_dir, path) = write_program(b"", 0o755);
        std::fs::write(&path, format!("#!{}\n", path.display())).unwrap();
        assert!(find_refusal(&path).unwrap().unwrap().contains("too deep"));
    }
}
