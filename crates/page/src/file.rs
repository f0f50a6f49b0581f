//! The page as one file, and the content security policy under which it runs.
//!
//! The modules are plain files that a browser could load individually. This module concatenates them into one script:
//! their imports refer only to each other, and no two of them define the same name (a test checks both).

use std::fmt::Write as _;
use std::io::Write as _;

use base64::Engine as _;
use cachemate_report::text::EscapedText;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};

use crate::RecordedRun;

/// JavaScript modules of the page; each follows the modules that it imports.
pub(crate) const MODULES: &[(&str, &str)] = &[
    ("text.js", include_str!("../assets/text.js")),
    ("store.js", include_str!("../assets/store.js")),
    ("boxes.js", include_str!("../assets/boxes.js")),
    ("matrix.js", include_str!("../assets/matrix.js")),
    ("charts.js", include_str!("../assets/charts.js")),
    ("parts.js", include_str!("../assets/parts.js")),
    ("services.js", include_str!("../assets/services.js")),
    ("strip.js", include_str!("../assets/strip.js")),
    ("lists.js", include_str!("../assets/lists.js")),
    ("source.js", include_str!("../assets/source.js")),
    ("main.js", include_str!("../assets/main.js")),
];

const BODY_HTML: &str = include_str!("../assets/body.html");
/// uPlot 1.6.32, MIT; its license is beside it, and in the page.
const CHART_SCRIPT: &str = include_str!("../assets/uPlot.iife.min.js");
const CHARTS_LICENSE: &str = include_str!("../assets/uPlot.LICENSE");
const CHARTS_STYLE: &str = include_str!("../assets/uPlot.min.css");

/// Name of the header that contains [`content_policy`].
pub const POLICY_HEADER: &str = "content-security-policy";

fn page_style() -> String {
    [
        cachemate_report::figure::STYLE,
        CHARTS_STYLE,
        include_str!("../assets/page.css"),
    ]
    .concat()
}

/// All modules joined without `import` and `export`, so no name may occur in two of them.
fn page_script() -> String {
    let mut combined_script = String::new();
    for (name, text) in MODULES {
        let _ = writeln!(combined_script, "// {name}");
        for line in text.lines().filter(|line| !line.starts_with("import ")) {
            combined_script.push_str(line.strip_prefix("export ").unwrap_or(line));
            combined_script.push('\n');
        }
    }
    combined_script
}

/// All scripts of the page. The classic script comes first, because it defines uPlot's global name.
fn scripts() -> [String; 2] {
    [
        format!("/*! uPlot 1.6.32\n{CHARTS_LICENSE}*/\n{CHART_SCRIPT}"),
        page_script(),
    ]
}

fn hash_source(text: &str) -> String {
    format!(
        "'sha256-{}'",
        base64::engine::general_purpose::STANDARD.encode(Sha256::digest(text))
    )
}

/// The content security policy: the page loads only its own scripts and style, identified by their hashes, and connects
/// only to its origin.
pub fn content_policy() -> String {
    let scripts = scripts().map(|script| hash_source(&script)).join(" ");
    format!(
        "default-src 'none'; script-src {scripts}; style-src {}; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        hash_source(&page_style())
    )
}

/// Renders the page: with a recording inside, or without one for a live run.
///
/// # Errors
/// The recording contains a number that JSON cannot represent.
pub fn page_html(recording: Option<&RecordedRun>) -> serde_json::Result<String> {
    // The page contains the policy as well, because a page that is opened as a file has no headers (frame-ancestors
    // works only in headers).
    let policy = content_policy()
        .replace("; frame-ancestors 'none'", "")
        .replace('&', "&amp;")
        .replace('"', "&quot;");
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<meta name=\"referrer\" content=\"no-referrer\">\n\
         <title>cachemate</title>\n<link rel=\"icon\" href=\"data:,\">\n<style>{}</style>\n</head>\n<body>\n{BODY_HTML}",
        page_style()
    );
    if let Some(run) = recording {
        let (head, windows) = (embed_json(&run.head)?, pack_json(&run.snapshots)?);
        let _ = writeln!(
            page,
            "<script type=\"application/json\" id=\"head\">{head}</script>"
        );
        let _ = writeln!(
            page,
            "<script type=\"text/plain\" id=\"windows\">{windows}</script>"
        );
    }
    let [charts, module_script] = scripts();
    let _ = writeln!(
        page,
        "<script>{charts}</script>\n<script type=\"module\">{module_script}</script>"
    );
    page.push_str("</body>\n</html>\n");
    Ok(page)
}

/// Serializes a value as JSON that is safe inside the page.
pub(crate) fn embed_json(value: &impl serde::Serialize) -> serde_json::Result<EscapedText> {
    Ok(EscapedText::embedded_json(&serde_json::to_string(value)?))
}

/// Serializes a value as compressed JSON in Base64 text. Windows repeat each other, and an hour of them has tens of
/// megabytes.
fn pack_json(value: &impl serde::Serialize) -> serde_json::Result<String> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(6));
    encoder
        .write_all(embed_json(value)?.as_str().as_bytes())
        .map_err(serde_json::Error::io)?;
    Ok(base64::engine::general_purpose::STANDARD
        .encode(encoder.finish().map_err(serde_json::Error::io)?))
}
