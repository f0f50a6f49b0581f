//! Finds the functions that decide a message.
//!
//! Problem: a message is often written far from its condition, in the attribute of an error, in a `Display`, or in a
//! helper that builds a sentence; a search for its text then ends at the wrong place. Method: strings of at least
//! three words are read from the sources, each with its function. If a variant stands for the message, the functions
//! that construct the variant decide it; if the function returns text, its callers do. Property: the answer is derived
//! from the code as rustfmt formats it. A line matches a message by the template's fixed parts.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use crate::source_tree::{self, RustLine, SourceFile, SourceTree};
use crate::tidy::is_test_file;

/// Minimum number of words of a message; shorter strings are names, units and parts of a line.
const MIN_WORDS: usize = 3;
/// Calls whose strings are no messages: invariants, and help that `--help` prints in place.
const SILENT_CALLS: [&str; 6] = [
    ".expect(",
    "unreachable!(",
    "assert",
    "#[arg",
    "#[command",
    "help(",
];
/// Maximum number of callers that decide about a helper's text; a helper with more decides by itself.
const MAX_CALLERS: usize = 2;
/// Maximum number of functions that are printed for a message.
const MAX_DECIDERS: usize = 12;
/// Maximum number of functions that set a field for them to decide the messages that depend on it.
const MAX_SETTERS: usize = 3;
/// Number of helpers between a message and the function that decides it.
const MAX_HELPERS: usize = 4;
/// Minimum number of letters in which a line and a template agree.
const MIN_LETTERS: usize = 8;
/// Maximum number of messages that are printed.
const MAX_MATCHES: usize = 10;

/// A function, or the type that a derived `Display` belongs to.
#[derive(Clone, Debug, Default)]
struct FunctionSite {
    /// Its name after that of its type.
    shown_name: String,
    name: String,
    file: String,
    returns_text: bool,
}

/// A message with its function, and the variants and constants that stand for it.
#[derive(Debug)]
struct MessageSite {
    text: String,
    function: usize,
    variants: Vec<String>,
    /// Fields that its line and the conditions around it read, the innermost first.
    fields: Vec<String>,
}

/// The messages of all crates, and what their functions construct, call and set.
#[derive(Default)]
struct MessageIndex {
    functions: Vec<FunctionSite>,
    messages: Vec<MessageSite>,
    /// Functions that construct a variant, by `Type::Variant`, and those that call a name.
    constructors: BTreeMap<String, BTreeSet<usize>>,
    callers: BTreeMap<String, BTreeSet<usize>>,
    /// Functions that set a field.
    setters: BTreeMap<String, BTreeSet<usize>>,
}

/// Prints the messages that a line could be, the most literal first, each with the functions that decide it.
///
/// # Errors
/// A file cannot be read, or no message matches.
pub fn print(root: &Path, line: &str) -> Result<(), String> {
    let tree = source_tree::read(root).map_err(|error| format!("messages: {error}"))?;
    match render_matches(&tree, line) {
        text if text.is_empty() => Err(format!(
            "messages: found '{line}', expected a message, or three words of one"
        )),
        text => {
            print!("{text}");
            Ok(())
        }
    }
}

fn render_matches(tree: &SourceTree, line: &str) -> String {
    let mut index = MessageIndex::default();
    for file in tree.files.iter().filter(|file| is_product(file)) {
        FileReader::new(file, &mut index).read();
    }
    let mut matches: Vec<(usize, &MessageSite)> = index
        .messages
        .iter()
        .filter_map(|message| Some((matched_letters(&message.text, line)?, message)))
        .collect();
    matches.sort_by_key(|(letters, _)| std::cmp::Reverse(*letters));
    let mut text = String::new();
    for (_, message) in matches.into_iter().take(MAX_MATCHES) {
        let _ = writeln!(
            text,
            "{}\n    text in     {}",
            message.text.trim(),
            index.describe(message.function)
        );
        for decider in index.deciders(message) {
            let _ = writeln!(text, "    decided in  {}", index.describe(decider));
        }
    }
    text
}

/// Returns the number of letters in which a line agrees with a message's template: those of the fixed parts that follow
/// each other in the line, or of the whole line if it is a part of the template. `None` if fewer than half of either's
/// letters agree.
fn matched_letters(template: &str, line: &str) -> Option<usize> {
    let letters = |text: &str| text.chars().filter(|c| c.is_alphabetic()).count();
    if template.contains(line) {
        return Some(letters(line));
    }
    let template = template.replace("{{", "{").replace("}}", "}");
    let fixed_parts = template
        .split('{')
        .map(|part| part.split_once('}').map_or(part, |(_, rest)| rest).trim());
    let (mut all, mut matched, mut remaining_line) = (0, 0, line);
    for part in fixed_parts {
        all += letters(part);
        // A line may end within a part.
        let begun_part = || {
            remaining_line
                .char_indices()
                .map(|(at, _)| &remaining_line[at..])
                .find(|end| part.starts_with(end))
        };
        if let Some((_, rest)) = remaining_line.split_once(part) {
            matched += letters(part);
            remaining_line = rest;
        } else if let Some(begun_part) = begun_part() {
            (matched, remaining_line) = (matched + letters(begun_part), "");
        }
    }
    (matched >= MIN_LETTERS && 2 * matched >= all.min(letters(line))).then_some(matched)
}

fn is_product(file: &SourceFile) -> bool {
    let is_in_crate = file
        .path
        .strip_prefix("crates/")
        .is_some_and(|path| path.contains("/src/"));
    is_in_crate
        && file.has_ending("rs")
        && !file.path.ends_with("page.rs")
        && !is_test_file(Path::new(&file.path))
}

impl MessageIndex {
    /// Returns the functions that decide about a message, unless its own function does.
    fn deciders(&self, message: &MessageSite) -> BTreeSet<usize> {
        let constructors: BTreeSet<usize> = message
            .variants
            .iter()
            .filter_map(|variant| self.constructors.get(variant))
            .flatten()
            .copied()
            .collect();
        let setters = self.setters_of(message);
        let mut deciders = match (constructors.is_empty(), setters.is_empty()) {
            (false, _) => constructors,
            (true, false) => return setters,
            (true, true) => BTreeSet::from([message.function]),
        };
        for _ in 0..MAX_HELPERS {
            let is_helper = |site: &usize| self.functions[*site].returns_text;
            let replacements = deciders.iter().map(|site| {
                if is_helper(site) {
                    self.callers_of(*site)
                } else {
                    BTreeSet::from([*site])
                }
            });
            let next: BTreeSet<usize> = replacements.flatten().collect();
            if next.is_empty() || next.len() > MAX_CALLERS.max(deciders.len()) {
                break;
            }
            deciders = next;
        }
        deciders.remove(&message.function);
        if deciders.len() > MAX_DECIDERS {
            BTreeSet::new()
        } else {
            deciders
        }
    }

    /// Returns the functions that set the field which a text depends on, if that can be told from its name.
    fn setters_of(&self, message: &MessageSite) -> BTreeSet<usize> {
        let setters = message
            .fields
            .iter()
            .filter_map(|field| self.setters.get(field));
        let mut few_setters = setters
            .filter(|setters| setters.len() <= MAX_SETTERS && !setters.contains(&message.function));
        let returns_text = self.functions[message.function].returns_text;
        few_setters
            .next()
            .filter(|_| returns_text)
            .cloned()
            .unwrap_or_default()
    }

    /// Returns the callers of a function, as far as its name identifies it: within its file, its crate, or at all.
    fn callers_of(&self, called: usize) -> BTreeSet<usize> {
        let FunctionSite { name, file, .. } = &self.functions[called];
        let crate_of = |file: &str| file.split("/src/").next().map(str::to_string);
        let is_near = |scope: u8, site: &FunctionSite| match scope {
            0 => true,
            1 => crate_of(&site.file) == crate_of(file),
            _ => site.file == *file,
        };
        let count_in = |scope| {
            self.functions
                .iter()
                .filter(|site| site.name == *name && is_near(scope, site))
                .count()
        };
        let Some(scope) = (0..3).find(|scope| count_in(*scope) == 1) else {
            return BTreeSet::new();
        };
        let callers = self.callers.get(name).into_iter().flatten().copied();
        callers
            .filter(|caller| *caller != called && is_near(scope, &self.functions[*caller]))
            .collect()
    }

    /// Returns a function's name and file.
    fn describe(&self, site: usize) -> String {
        let FunctionSite {
            shown_name, file, ..
        } = &self.functions[site];
        format!("{shown_name} ({file})")
    }
}

/// A block that encloses a line: its indentation, and the function or type that it belongs to.
struct EnclosingBlock {
    indent: usize,
    function: Option<usize>,
    type_name: Option<String>,
}

/// Reads one file into the index.
struct FileReader<'a> {
    file: &'a SourceFile,
    lines: &'a [RustLine],
    index: &'a mut MessageIndex,
    blocks: Vec<EnclosingBlock>,
    /// Number of lines up to the body of the last function.
    header_end: usize,
}

impl<'a> FileReader<'a> {
    fn new(file: &'a SourceFile, index: &'a mut MessageIndex) -> Self {
        let lines = file.rust_lines();
        let is_test_module =
            |pair: &[RustLine]| pair[0].code == "#[cfg(test)]" && pair[1].code.ends_with('{');
        let end = lines
            .windows(2)
            .position(is_test_module)
            .unwrap_or(lines.len());
        FileReader {
            file,
            lines: &lines[..end],
            index,
            blocks: Vec::new(),
            header_end: 0,
        }
    }

    fn read(mut self) {
        let (mut open_text, mut first_line) = (String::new(), 0);
        for line_index in 0..self.lines.len() {
            let line = &self.lines[line_index];
            let code = line.code.trim();
            let indent = indent_of(line);
            // Within a string, the code of a line says nothing about blocks.
            if open_text.is_empty() {
                if code.starts_with('}') {
                    self.blocks.retain(|block| block.indent < indent);
                }
                self.open_block(line_index, code, indent);
            }
            let function = self.blocks.iter().rev().find_map(|block| block.function);
            if let Some(function) = function.filter(|_| line_index >= self.header_end) {
                self.record_uses(line_index, function);
            }
            for part in line.strings.split_inclusive('\n') {
                if open_text.is_empty() {
                    first_line = line_index;
                }
                open_text.push_str(if open_text.is_empty() {
                    part
                } else {
                    part.trim_start()
                });
                if open_text.ends_with('\\') {
                    open_text.pop();
                } else if open_text.ends_with('\n') {
                    let text = std::mem::take(&mut open_text);
                    self.record_message(first_line, function, text.trim());
                }
            }
        }
    }

    /// Opens the block of a function, an `impl` or an enum that begins on this line.
    fn open_block(&mut self, line_index: usize, code: &str, indent: usize) {
        let is_modifier = |word: &&str| {
            word.starts_with("pub")
                || matches!(
                    *word,
                    "const" | "unsafe" | "async" | "extern" | "\"\"" | "crate)"
                )
        };
        let mut words = code.split_whitespace().skip_while(is_modifier);
        let keyword = words.next().unwrap_or_default();
        let owner = self
            .blocks
            .iter()
            .rev()
            .find_map(|block| block.type_name.clone());
        if keyword == "fn" {
            let name = identifier(words.next().unwrap_or_default()).to_string();
            let shown_name = owner
                .clone()
                .map_or(name.clone(), |owner| format!("{owner}::{name}"));
            let ends_header = |line: &&RustLine| line.code.ends_with(['{', ';', '}']);
            let end = self.lines[line_index..]
                .iter()
                .position(|line| ends_header(&line))
                .unwrap_or(0);
            let header: String = self.lines[line_index..=line_index + end]
                .iter()
                .map(|line| line.code.as_str())
                .collect();
            let result = header.rsplit_once("->").map_or("", |(_, result)| result);
            let is_text = ["String", "str", "Reason", "fmt::Result", "Markup"]
                .iter()
                .any(|text| result.contains(text));
            // A function that explains adds its reasons to a list.
            let returns_text =
                (is_text && !result.contains("Result<")) || name.starts_with("explain");
            let site = FunctionSite {
                shown_name,
                name,
                file: self.file.path.clone(),
                returns_text,
            };
            self.index.functions.push(site);
            self.header_end = if end == 0 {
                line_index
            } else {
                line_index + end + 1
            };
            let function = Some(self.index.functions.len() - 1);
            self.blocks.push(EnclosingBlock {
                indent,
                function,
                type_name: owner,
            });
        } else if matches!(keyword, "enum" | "struct" | "trait") || code.starts_with("impl") {
            let implementor = code.rsplit_once(" for ").map_or_else(
                || {
                    code.strip_prefix("impl")
                        .map_or_else(|| words.next().unwrap_or_default(), skip_generics)
                },
                |(_, implementor)| implementor,
            );
            let type_name =
                Some(identifier(implementor.rsplit("::").next().unwrap_or_default()).to_string());
            if code.ends_with('{') {
                self.blocks.push(EnclosingBlock {
                    indent,
                    function: None,
                    type_name,
                });
            }
        }
    }

    /// Records the names that the line calls, the fields that it sets, and the variants that it constructs.
    fn record_uses(&mut self, line_index: usize, function: usize) {
        let code = &self.lines[line_index].code;
        let is_name_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let mut position = 0;
        while let Some(start) = code[position..]
            .find(|c: char| c.is_alphabetic() || c == '_')
            .map(|at| position + at)
        {
            let end = code[start..]
                .find(|c| !is_name_part(c))
                .map_or(code.len(), |length| start + length);
            let (path, rest) = (&code[start..end], &code[end..]);
            position = end.max(start + 1);
            let mut parts = path.trim_end_matches("::").rsplit("::");
            let (name, owner) = (parts.next().unwrap_or_default(), parts.next());
            if name.starts_with(char::is_uppercase) {
                if !self.is_pattern(line_index, end) && code[..start].trim_end() != "fn" {
                    let owner = owner.map(|owner| self.resolve_self(owner));
                    let key = owner.map_or(name.to_string(), |owner| format!("{owner}::{name}"));
                    self.index
                        .constructors
                        .entry(key)
                        .or_default()
                        .insert(function);
                }
            } else if is_set(&code[..start], rest) {
                self.index
                    .setters
                    .entry(name.to_string())
                    .or_default()
                    .insert(function);
            } else if (rest.starts_with('(') || rest.starts_with([')', ',']))
                && !code[..start].trim_end().ends_with("fn")
            {
                self.index
                    .callers
                    .entry(name.to_string())
                    .or_default()
                    .insert(function);
            }
        }
    }

    fn resolve_self(&self, owner: &str) -> String {
        let current_type = self
            .blocks
            .iter()
            .rev()
            .find_map(|block| block.type_name.clone());
        if owner == "Self" {
            current_type.unwrap_or_default()
        } else {
            owner.to_string()
        }
    }

    /// Returns whether the name that ends here is matched rather than constructed.
    fn is_pattern(&self, line_index: usize, end: usize) -> bool {
        let code = &self.lines[line_index].code;
        let (before, after) = code.split_at(end);
        let is_compared =
            before.contains("matches!(") || before.contains("== ") || before.contains("!= ");
        let is_destructured = [
            "if let ",
            "while let ",
            "let Some(",
            "let Ok(",
            "else if let ",
        ];
        let is_bound =
            is_destructured.iter().any(|word| before.contains(word)) && after.contains(" = ");
        if after.contains("=>") || is_compared || is_bound || code.trim_start().starts_with("| ") {
            return true;
        }
        // The arm of a pattern that spans lines begins at the closing brace of the same indentation.
        let indent = indent_of(&self.lines[line_index]);
        let closing = self.lines[line_index + 1..].iter().find(|line| {
            let text = line.code.trim_start();
            indent_of(line) <= indent && !text.is_empty()
        });
        code.ends_with(['{', '(', '|'])
            && closing.is_some_and(|line| {
                line.code.contains("=>") || line.code.trim_start().starts_with("| ")
            })
    }

    fn record_message(&mut self, line_index: usize, function: Option<usize>, text: &str) {
        let code = &self.lines[line_index].code;
        let previous = line_index
            .checked_sub(1)
            .map_or("", |previous| self.lines[previous].code.as_str());
        let is_silent = |code: &str| SILENT_CALLS.iter().any(|call| code.contains(call));
        if !is_sentence(text) || is_silent(code) || (previous.ends_with('(') && is_silent(previous))
        {
            return;
        }
        let is_attribute = |code: &str| code.trim_start().starts_with("#[error");
        let constant = [code.as_str(), previous]
            .into_iter()
            .find_map(|code| code.split_once("const ")?.1.split_once(": &str"));
        let named_site = if is_attribute(code) || is_attribute(previous) {
            Some(self.variant_after(line_index))
        } else {
            constant.map(|(name, _)| name.to_string())
        };
        let (function, variants) = match (named_site, function) {
            (Some(shown_name), _) => {
                let file = self.file.path.clone();
                let site = FunctionSite {
                    shown_name: shown_name.clone(),
                    file,
                    ..FunctionSite::default()
                };
                self.index.functions.push(site);
                (self.index.functions.len() - 1, vec![shown_name])
            }
            (None, Some(function)) => {
                let mut variants = self.matched_variants(line_index);
                if variants.is_empty() {
                    // The `Display` of a struct speaks for every value of it.
                    let displayed_type = self.index.functions[function]
                        .shown_name
                        .strip_suffix("::fmt");
                    variants.extend(displayed_type.map(str::to_string));
                }
                (function, variants)
            }
            (None, None) => return,
        };
        let fields = self
            .enclosing_lines(line_index)
            .into_iter()
            .flat_map(|line| read_fields(&line.code))
            .collect();
        self.index.messages.push(MessageSite {
            text: text.to_string(),
            function,
            variants,
            fields,
        });
    }

    /// Returns a line and the lines of the blocks around it within its function, the innermost first.
    fn enclosing_lines(&self, line_index: usize) -> Vec<&'a RustLine> {
        let function_indent = self
            .blocks
            .iter()
            .rev()
            .find(|block| block.function.is_some())
            .map_or(usize::MAX, |block| block.indent);
        let mut lines = vec![&self.lines[line_index]];
        let mut indent = indent_of(lines[0]);
        for line in self.lines[..line_index]
            .iter()
            .rev()
            .filter(|line| !line.code.trim().is_empty())
        {
            if indent_of(line) <= function_indent {
                break;
            }
            if indent_of(line) < indent {
                indent = indent_of(line);
                lines.push(line);
            }
        }
        lines
    }

    /// Returns the variant or type to which an attribute belongs.
    fn variant_after(&self, line_index: usize) -> String {
        let declarations = self.lines[line_index + 1..]
            .iter()
            .map(|line| line.code.trim());
        let mut declarations = declarations.filter(|code| code.starts_with(char::is_alphabetic));
        let declaration = declarations.next().unwrap_or_default();
        let words = declaration
            .split_whitespace()
            .skip_while(|word| word.starts_with("pub"));
        let name = words
            .clone()
            .find(|word| !matches!(*word, "struct" | "enum"))
            .map(identifier)
            .unwrap_or_default();
        let owner = self
            .blocks
            .iter()
            .rev()
            .find_map(|block| block.type_name.clone());
        owner.map_or(name.to_string(), |owner| format!("{owner}::{name}"))
    }

    /// Returns the variants of the arm that contains a line, if the arm's pattern names any.
    fn matched_variants(&self, line_index: usize) -> Vec<String> {
        for line in self.enclosing_lines(line_index) {
            let Some((pattern, _)) = line.code.split_once("=>") else {
                continue;
            };
            let paths = pattern.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
            let variants = paths.filter_map(|path| path.rsplit_once("::"));
            return variants
                .filter(|(owner, name)| name.starts_with(char::is_uppercase) && !owner.is_empty())
                .map(|(owner, name)| {
                    format!(
                        "{}::{name}",
                        self.resolve_self(owner.rsplit("::").next().unwrap_or(owner))
                    )
                })
                .collect();
        }
        Vec::new()
    }
}

fn indent_of(line: &RustLine) -> usize {
    line.code.len() - line.code.trim_start().len()
}

/// Returns whether a name between these texts is a field that is set: assigned, filled, or given in a literal.
fn is_set(before: &str, after: &str) -> bool {
    const CHANGES: [&str; 7] = [
        " = ",
        " += ",
        ".push(",
        ".insert(",
        ".extend(",
        ".clone_from(",
        ".push_str(",
    ];
    let is_field = before.ends_with('.') && CHANGES.iter().any(|change| after.starts_with(change));
    let is_in_literal = after.starts_with(": ") && before.trim_end().ends_with(['{', ','])
        || before.trim().is_empty();
    is_field || (after.starts_with(": ") && is_in_literal)
}

/// Returns the fields that a line reads, without methods.
fn read_fields(code: &str) -> Vec<String> {
    let parts = code.split('.').skip(1);
    let is_field = |(name, part): &(&str, &str)| {
        !name.is_empty() && !part[name.len()..].starts_with(['(', ':'])
    };
    let fields = parts.map(|part| (identifier(part), part)).filter(is_field);
    fields
        .map(|(name, _)| name.to_string())
        .filter(|name| name.starts_with(char::is_lowercase))
        .collect()
}

/// Returns the identifier at the start of a text.
fn identifier(text: &str) -> &str {
    &text[..text
        .find(|c: char| !c.is_alphanumeric() && c != '_')
        .unwrap_or(text.len())]
}

/// Returns the text after a list of generic parameters at its start.
fn skip_generics(text: &str) -> &str {
    let mut depth = 0;
    for (index, c) in text.char_indices() {
        match c {
            '<' => depth += 1,
            '>' if !text[..index].ends_with('-') => depth -= 1,
            _ if depth == 0 => return text[index..].trim_start(),
            _ => {}
        }
    }
    ""
}

/// Returns whether a string is a message: at least three words, most of them of lowercase letters.
fn is_sentence(text: &str) -> bool {
    let is_word = |word: &&str| {
        let letters = word.trim_matches(|c: char| !c.is_alphanumeric());
        !letters.is_empty()
            && letters
                .chars()
                .all(|c| c.is_alphabetic() || matches!(c, '-' | '\'' | '’'))
    };
    let is_markup = text.starts_with(['<', '#', '/', '.', '@', '|'])
        || text.contains("=\\\"")
        || text.contains("</");
    !is_markup && text.split_whitespace().filter(is_word).count() >= MIN_WORDS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::tests::tree_of;

    fn found(text: &str, line: &str) -> String {
        render_matches(&tree_of(&[("crates/policy/src/a.rs", text)]), line)
            .replace(" (crates/policy/src/a.rs)", "")
    }

    /// Is a variant's message listed with the functions that construct the variant, and not with those that match it?
    #[test]
    fn the_message_of_a_variant_is_decided_where_the_variant_is_constructed() {
        let text = "pub enum ShareError {\n    #[error(\"no ways are left\")]\n    Full,\n    Empty,\n}\n\
                    impl ShareError {\n    fn text(\n        &self,\n    ) -> &str {\n        match self {\n            \
                    Self::Full => \"no\",\n            Self::Empty => {\n                \"there is no \\\n                 \
                    group\"\n            }\n        }\n    }\n}\n\
                    fn take() -> Result<(), ShareError> {\n    Err(ShareError::Full)\n}\n\
                    fn find() -> Result<(), ShareError> {\n    Err(ShareError::Empty)\n}\n\
                    fn retry() {\n    if let Err(ShareError::Full) = take() {\n        wait();\n    }\n}\n";
        let full = "no ways are left\n    text in     ShareError::Full\n    decided in  take\n";
        assert_eq!(found(text, "ways are left"), full);
        let empty = "there is no group\n    text in     ShareError::text\n    decided in  find\n";
        assert_eq!(found(text, "cachemate: there is no group"), empty);
    }

    /// Are helpers that return text followed to their caller, and status lines to the function that sets their field?
    #[test]
    fn a_text_is_decided_by_its_caller_or_by_the_setter_of_its_field() {
        let text = "fn explain(n: u32) -> Reason {\n    build(format!(\"only {n} windows were measured\"))\n}\n\
                    fn judge() {\n    push(explain(3));\n}\n\
                    fn status_text(status: &Status) -> String {\n    if status.is_overruled {\n        \
                    \"root acts on this host\".into()\n    } else {\n        String::new()\n    }\n}\n\
                    fn yield_to_root(&mut self) {\n    self.status.is_overruled = true;\n}\n\
                    fn load() {\n    read().expect(\"a file of the project\");\n}\n\
                    #[cfg(test)]\nmod tests {\n    fn f() {\n        g(\"no message of a test\");\n    }\n}\n";
        let explained =
            "only {n} windows were measured\n    text in     explain\n    decided in  judge\n";
        assert_eq!(found(text, "xz: only 12 windows were measured"), explained);
        assert_eq!(found(text, "only 12 windows were mea"), explained);
        let yielded =
            "root acts on this host\n    text in     status_text\n    decided in  yield_to_root\n";
        assert_eq!(found(text, "root acts on this host"), yielded);
        assert_eq!(found(text, "no message of a test"), "");
    }
}
