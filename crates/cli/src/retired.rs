//! Retired spellings on the command line: each is rejected with the name that replaced it.

use std::ffi::OsStr;

use cachemate_core::{SpellingScope, retired_spellings, successor_of};
use clap::{ArgAction, Command};

/// Returns an error that names the successor of the first retired command or option among `args` (without the
/// program's name), or of a retired environment variable that is set; `None` if all spellings are current.
pub fn retired_refusal<A: AsRef<OsStr>>(
    cli: &Command,
    args: &[A],
    is_set: impl Fn(&'static str) -> bool,
) -> Option<String> {
    let variable_rows = retired_spellings().filter(|row| row.scope == SpellingScope::Environment);
    let variable_error = variable_rows
        .filter(|row| is_set(row.old))
        .map(|row| format!("`{}` is now `{}`", row.old, row.new));
    variable_error
        .chain(find_refused_argument(cli, args))
        .next()
}

/// Returns the first retired argument. Arguments after `--`, and those of a program that the command starts, are not
/// examined.
fn find_refused_argument<A: AsRef<OsStr>>(cli: &Command, args: &[A]) -> Option<String> {
    let (mut command, mut path) = (cli, Vec::new());
    let mut args = args.iter().map_while(|arg| arg.as_ref().to_str());
    while let Some(arg) = args.next() {
        if arg == "--" {
            return None;
        }
        let name = arg.split_once('=').map_or(arg, |(name, _)| name);
        if name.starts_with('-') && name.len() > 1 {
            let options = command
                .get_arguments()
                .chain(cli.get_arguments().filter(|option| option.is_global_set()));
            match options.into_iter().find(|option| is_spelled(option, name)) {
                Some(option) if takes_value(option) && name == arg => _ = args.next(),
                Some(_) => {}
                None => {
                    let old_spelling = format!("{} {name}", path.join(" "));
                    let new_spelling = successor_of(SpellingScope::Option, &old_spelling)?;
                    return Some(format!("`{name}` is now `{new_spelling}`"));
                }
            }
        } else if let Some(subcommand) = command.find_subcommand(arg) {
            command = subcommand;
            path.push(arg);
        } else if command.has_subcommands() {
            let old_spelling = path
                .iter()
                .copied()
                .chain([arg])
                .collect::<Vec<_>>()
                .join(" ");
            let new_spelling = successor_of(SpellingScope::Command, &old_spelling)?;
            return Some(format!(
                "`cachemate {old_spelling}` is now `cachemate {new_spelling}`"
            ));
        } else if command
            .get_positionals()
            .any(clap::Arg::is_trailing_var_arg_set)
        {
            return None;
        }
    }
    None
}

/// Returns whether `name` is the option's long or short name.
fn is_spelled(option: &clap::Arg, name: &str) -> bool {
    match name.strip_prefix("--") {
        Some(long) => option.get_long() == Some(long),
        None => option
            .get_short()
            .is_some_and(|short| name[1..].starts_with(short)),
    }
}

fn takes_value(option: &clap::Arg) -> bool {
    matches!(option.get_action(), ArgAction::Set | ArgAction::Append)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::commands::Cli;

    fn refusal_of_line(line: &str) -> Option<String> {
        retired_refusal(
            &Cli::command(),
            &line.split_whitespace().collect::<Vec<_>>(),
            |_| false,
        )
    }

    /// Does every retired command, option and variable give an error with its successor, and does that exist?
    #[test]
    fn every_retired_spelling_names_a_current_one() {
        let cli = Cli::command();
        for row in retired_spellings() {
            let refused = match row.scope {
                SpellingScope::Command | SpellingScope::Option => refusal_of_line(row.old),
                SpellingScope::Environment => {
                    retired_refusal::<&str>(&cli, &[], |name| name == row.old)
                }
                _ => continue,
            };
            let refused = refused.unwrap_or_else(|| panic!("{row:?} is accepted"));
            assert!(
                refused.ends_with(&format!("{}`", row.new)),
                "{row:?}: {refused}"
            );
            let (path, name) = match row.scope {
                SpellingScope::Command => ("", row.new),
                SpellingScope::Option => row.old.rsplit_once(' ').unwrap_or(("", row.old)),
                _ => continue,
            };
            let command = path
                .split_whitespace()
                .try_fold(&cli, |command, word| command.find_subcommand(word));
            let command = command.unwrap_or_else(|| panic!("{row:?}: no command {path}"));
            let is_current = match row.scope {
                SpellingScope::Command => command.find_subcommand(name).is_some(),
                _ => command
                    .get_arguments()
                    .any(|option| is_spelled(option, row.new)),
            };
            assert!(is_current, "{row:?}");
        }
    }

    /// Are an option's value, the arguments of a started program, and current spellings accepted?
    #[test]
    fn values_program_arguments_and_current_spellings_are_accepted() {
        assert_eq!(
            refusal_of_line("--color never color run"),
            Some("`cachemate color` is now `cachemate page-color`".to_string())
        );
        assert_eq!(
            refusal_of_line("run --seconds=3 ./a"),
            Some("`--seconds` is now `--timeout`".to_string())
        );
        for line in [
            "run --policy --seconds ./a --seconds 3",
            "run -p auto ./a --observe",
            "record -o a.cmt -- prog --max 3",
            "page-color run --colors 0 prog --hold 3",
            "plan reset",
            "manage --obsolete",
        ] {
            assert_eq!(refusal_of_line(line), None, "{line}");
        }
    }
}
