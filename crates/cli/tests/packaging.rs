//! The shipped unit.

use std::path::Path;
use std::process::Command;

/// Exposure of the unit by systemd's own count, in tenths; 0 is best, 100 worst.
const EXPOSURE_AT_MOST: &str = "42";

/// Does systemd count the unit's exposure as no more than is stated?
#[test]
fn the_unit_is_as_tight_as_stated() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/cachemate.service");
    let threshold = format!("--threshold={EXPOSURE_AT_MOST}");
    let ran = Command::new("systemd-analyze").args(["security", "--offline=true", &threshold]).arg(&unit).output();
    let Ok(out) = ran else {
        println!("not shown here: the unit's exposure: no systemd-analyze");
        return;
    };
    let (said, error) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    if said.is_empty() {
        println!("not shown here: the unit's exposure: {error}");
        return;
    }
    let told = said.lines().last().unwrap_or_default();
    assert!(out.status.success(), "{told}");
}
