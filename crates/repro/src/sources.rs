//! Digests of the sources that can change a stored value, by the module whose code makes it (`build.rs` computes them).

use std::sync::LazyLock;

use crate::recordings::hex_digest;

/// Modules of this crate, each with the digest of all code that it reaches.
const DIGESTS: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/sources.rs"));

/// Digest of the built-in machines. Stored runs name their machines, and descriptions are no sources of a module.
pub(crate) static MACHINES_DIGEST: LazyLock<String> = LazyLock::new(|| {
    let texts: Vec<&str> = cachemate_spec::machine_names()
        .into_iter()
        .filter_map(cachemate_spec::built_in_machine_text)
        .collect();
    hex_digest(texts.concat().as_bytes())
});

/// The digest of a module, given by its name, its path, or the path of a function in it.
pub(crate) fn digest_of(module: &str) -> &'static str {
    let name = module
        .trim_start_matches("cachemate_repro::")
        .split("::")
        .next()
        .unwrap_or_default();
    let digest = DIGESTS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, digest)| *digest);
    digest.unwrap_or_else(|| {
        unreachable!("checked by the test that names every caller: no module '{name}'")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does every module have a digest, and do those of runs without a policy differ from those of runs under one?
    #[test]
    fn every_module_has_a_digest() {
        assert!(
            DIGESTS.len() > 20 && DIGESTS.iter().all(|(_, digest)| digest.len() == 32),
            "{DIGESTS:?}"
        );
        assert_ne!(
            digest_of("cachemate_repro::run_request"),
            digest_of("steered")
        );
        assert_eq!(digest_of("cachemate_repro::tc::setup"), digest_of("tc"));
    }
}
