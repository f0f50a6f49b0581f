//! Manual pages, generated from the definition of the command line.

use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;

use crate::files::write_file;

/// Writes cachemate.1, one page per command, and cachemate.toml.5 to a directory.
pub fn write_pages(dir: &Path, force: bool) -> anyhow::Result<()> {
    let mut command = super::Cli::command();
    command.build();
    std::fs::create_dir_all(dir)
        .with_context(|| format!("{}: cannot be created", dir.display()))?;

    let subcommands = command.get_subcommands();
    for sub in subcommands.filter(|sub| sub.get_name() != "help" && !sub.is_hide_set()) {
        let name = format!("cachemate-{}", sub.get_name());
        let page = render_manual_page(sub.clone().display_name(&name))?;
        write_file(&dir.join(format!("{name}.1")), &page, force)?;
    }
    write_file(&dir.join("cachemate.1"), &main_page()?, force)?;
    write_file(
        &dir.join("cachemate.toml.5"),
        config_page().as_bytes(),
        force,
    )
}

/// The manual page of the whole command.
pub fn main_page() -> anyhow::Result<Vec<u8>> {
    let mut command = super::Cli::command();
    command.build();
    render_manual_page(command)
}

/// Documentation page with a table of every configuration key.
const LIVE_PAGE: &str = include_str!("../../../../docs/live.md");
const TABLE_HEAD: &str = "| key | meaning | default |";

/// A configuration with the entries that most hosts need.
const EXAMPLE: &str = "mode = \"observe\"

[[rules]]
service = \"redis\"
max_slowdown = \"5%\"

[[rules]]
kind = \"unit\"
";

/// Generated from the table of its keys, so that it cannot lag behind the page.
fn config_page() -> String {
    let mut text =
        ".TH cachemate.toml 5\n.SH NAME\ncachemate.toml \\- configuration of the cachemate daemon\n.SH KEYS\n"
            .to_string();
    let rows = LIVE_PAGE
        .lines()
        .skip_while(|line| *line != TABLE_HEAD)
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    for row in rows {
        let cells: Vec<String> = row
            .trim_matches('|')
            .split('|')
            .map(|cell| plain_text(cell.trim()))
            .collect();
        let [key, meaning, default] = cells.as_slice() else {
            continue;
        };
        let default_text = if default.is_empty() {
            String::new()
        } else {
            format!(" Default: {default}.")
        };
        text += &format!(".TP\n\\fB{key}\\fR\n{meaning}.{default_text}\n");
    }
    text += &format!(".SH EXAMPLE\n.nf\n{}.fi\n", plain_text(EXAMPLE));
    text + ".SH SEE ALSO\n.BR cachemate (1),\n.BR cachemate-manage (1)\n"
}

/// Converts Markdown to plain text for roff, without code marks and links.
fn plain_text(cell: &str) -> String {
    let mut text = String::new();
    let mut rest_text = cell;
    while let Some((before, after_bracket)) = rest_text.split_once('[') {
        text += before;
        let link = after_bracket
            .split_once("](")
            .filter(|(label, _)| !label.contains(['[', ']']));
        match link.and_then(|(label, target)| Some((label, target.split_once(')')?.1))) {
            Some((label, after)) => {
                text += label;
                rest_text = after;
            }
            // A table of the configuration, such as [[rules]].
            None => {
                text.push('[');
                rest_text = after_bracket;
            }
        }
    }
    (text + rest_text)
        .replace('`', "")
        .replace('\\', "\\e")
        .replace('-', "\\-")
}

fn render_manual_page(command: clap::Command) -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    clap_mangen::Man::new(command)
        .render(&mut text)
        .context("cannot render the manual page")?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the manual page of the configuration contain every key of the table, without Markdown marks?
    #[test]
    fn the_manual_page_contains_every_configuration_key() {
        let page = config_page();
        for key in [
            "mode",
            "metrics_textfile",
            "max_slowdown",
            "min_rate",
            "[[cpusets]]",
        ] {
            assert!(page.contains(key), "{key} in\n{page}");
        }
        assert!(
            page.matches(".TP").count() > 15 && !page.contains('`') && !page.contains("]("),
            "{page}"
        );
        assert_eq!(
            plain_text("the [policy](index.md#policies) of `[[rules]]`"),
            "the policy of [[rules]]"
        );
        assert_eq!(
            plain_text("`[[rules]]` of [services](services.md)"),
            "[[rules]] of services"
        );
        assert!(
            page.contains("\\fB[[rules]] command") && !page.contains("Default: ."),
            "{page}"
        );
        cachemate_spec::parse_manage_config("example", EXAMPLE, &|_| None).unwrap();
    }
}
