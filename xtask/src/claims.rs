//! Are the numbers on pages those of the code?
//!
//! Problem: a page that repeats a limit still states it after the code has changed. Method: a comment behind the number
//! names its source, which is evaluated and compared: `4 MiB <!-- crates/trace/src/cmt/mod.rs HEADER_JSON_LIMIT -->` a
//! constant, and `<!-- docs/results/index.md all pages: full runs met -->` a cell of a table. Properties: units of
//! size, time and share are converted; a source that is missing or no number is reported, so that a renamed constant
//! does not detach its statements.

use crate::source_tree::{Complaint, SourceFile, SourceTree};

/// Units on pages, in bytes, seconds and fractions.
const UNITS: &[(&str, f64)] = &[
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("ms", 1e-3),
    ("s", 1.0),
    ("seconds", 1.0),
    ("%", 0.01),
];
const NUMBER_WORDS: &str = "zero one two three four five six seven eight nine ten";
/// Operators of constants, from the weakest to the strongest.
const OPERATORS: [(&str, fn(f64, f64) -> f64); 3] = [
    (" << ", |left, right| left * right.exp2()),
    (" + ", |left, right| left + right),
    (" * ", |left, right| left * right),
];

/// Complaints about numbers that differ from their source, and about sources that do not exist.
pub fn check(tree: &SourceTree) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for page in tree.files.iter().filter(|file| file.has_ending("md")) {
        for (line_number, line) in page.numbered_lines() {
            for (start, mark) in line.match_indices("<!-- ") {
                let comment = line[start + mark.len()..].split_once(" -->");
                let source = comment.and_then(|(source, _)| source.split_once(' '));
                let Some((path, name)) = source.filter(|(path, _)| path.contains('/')) else {
                    continue;
                };

                if let Err(text) = check_claim(tree, line[..start].trim_end(), path, name) {
                    complaints.push(Complaint::new(&page.path, line_number, text));
                }
            }
        }
    }
    complaints
}

/// Compares the end of a text with the number or the cell that is called `name` in the file at `path`.
fn check_claim(tree: &SourceTree, shown: &str, path: &str, name: &str) -> Result<(), String> {
    let file = tree.files.iter().find(|file| file.path == path);
    let file = file.ok_or_else(|| format!("no file '{path}'"))?;

    if let Some((row, column)) = name.split_once(": ") {
        let cell = table_cell(&file.text, row, column);
        let cell = cell.ok_or_else(|| format!("{path}: no cell '{name}'"))?;
        if !shown.ends_with(cell) {
            return Err(format!("expected '{cell}', {name}"));
        }
        return Ok(());
    }

    let found = shown_number(shown).ok_or_else(|| format!("no number before {name}"))?;
    let declared = declared_number(tree, file, name);
    let declared = declared.ok_or_else(|| format!("{path}: no number '{name}'"))?;
    let expected = declared * if name.ends_with("_NS") { 1e-9 } else { 1.0 };
    if (found / expected - 1.0).abs() > 1e-9 {
        return Err(format!("found {found}, expected {expected}, {name}"));
    }
    Ok(())
}

/// The cell of the row that begins with `row`, or with a link of that text.
fn table_cell<'a>(page: &'a str, row: &str, column: &str) -> Option<&'a str> {
    let link = format!("[{row}](");
    let mut index = None;
    for line in page.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        index = cells.iter().position(|cell| *cell == column).or(index);
        if cells.len() > 1 && (cells[1] == row || cells[1].starts_with(&link)) {
            return cells.get(index?).copied();
        }
    }
    None
}

/// The number at the end of a text: `64 MiB`, `2 097 172`, `10,000`, `five windows`.
fn shown_number(text: &str) -> Option<f64> {
    let mut words: Vec<&str> = text.split_whitespace().collect();
    let last = *words.last()?;
    let unit = UNITS.iter().find(|(name, _)| *name == last);
    if unit.is_some() || parse_number(last).is_none() {
        words.pop();
    }

    let mut number = words.pop()?.to_string();
    while number.len().is_multiple_of(3)
        && is_digits(&number)
        && is_digits(words.last().unwrap_or(&"|"))
    {
        number.insert_str(0, words.pop()?);
    }
    Some(parse_number(&number)? * unit.map_or(1.0, |(_, scale)| *scale))
}

fn is_digits(word: &str) -> bool {
    word.bytes().all(|byte| byte.is_ascii_digit())
}

fn parse_number(word: &str) -> Option<f64> {
    let word = word.trim_start_matches('(').replace([',', '_'], "");
    let spelled = NUMBER_WORDS.split(' ').position(|name| name == word);
    spelled.map(|number| number as f64).or(word.parse().ok())
}

/// The value of a constant; its expression may use constants of the file and of its folder's `mod.rs`.
fn declared_number(tree: &SourceTree, file: &SourceFile, name: &str) -> Option<f64> {
    let (_, declaration) = file.text.split_once(&format!("const {name}: "))?;
    let (_, expression) = declaration.split_once(';')?.0.split_once('=')?;
    let seconds = expression.replace("Duration::from_secs(", "(");
    let numbers = seconds.replace("Duration::from_millis(", "1e-3 * (");

    evaluate(&numbers, &|other| {
        let module = format!("{}/mod.rs", file.path.rsplit_once('/')?.0);
        let parent = tree.files.iter().find(|near| near.path == module);
        let here = declared_number(tree, file, other);
        here.or_else(|| declared_number(tree, parent?, other))
    })
}

/// The value of an expression of literals, operators, parentheses and constants, which `constant` returns.
fn evaluate(expression: &str, constant: &dyn Fn(&str) -> Option<f64>) -> Option<f64> {
    if let Some((before, rest)) = expression.rsplit_once('(') {
        let (inner, after) = rest.split_once(')')?;
        let value = evaluate(inner, constant)?;
        return evaluate(&format!("{before}{value}{after}"), constant);
    }
    for (operator, apply) in OPERATORS {
        if let Some((left, right)) = expression.rsplit_once(operator) {
            return Some(apply(evaluate(left, constant)?, evaluate(right, constant)?));
        }
    }
    let operand = expression.trim();
    parse_number(operand).or_else(|| constant(operand))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_tree::tests::{complaint_lines, tree_of};

    const CODE: &str = "pub const MAX_BYTES: usize = HEAD + RECORDS * (4 + 8);\nconst HEAD: usize = 20;\n\
        const WAIT: Duration = Duration::from_millis(1_500);\nconst PAUSE_NS: u64 = 3_000_000_000;\n\
        const SHARE: f64 = 0.01;\nconst NAME: &str = \"x\";\n";
    const TABLE: &str =
        "| page | met |\n|---|---|\n| [auto](auto.md) | 3 of 4 |\n| all | 7 of 9 |\n";

    fn complaints_on(page: &str) -> Vec<String> {
        let module = "pub const RECORDS: usize = 1 << 16;\n";
        let code = [("a/b.rs", CODE), ("a/mod.rs", module)];
        let pages = [("docs/index.md", TABLE), ("page.md", page)];
        complaint_lines(check(&tree_of(&[code, pages].concat())))
    }

    /// Are equal numbers accepted in each unit and spelling, and comments that name no source ignored?
    #[test]
    fn equal_numbers_are_accepted_in_each_unit_and_spelling() {
        let page = "at most 786 452 <!-- a/b.rs MAX_BYTES --> bytes, 64 KiB <!-- a/mod.rs RECORDS -->\n\
            65,536 <!-- a/mod.rs RECORDS -->, 1.5 s <!-- a/b.rs WAIT -->, three seconds <!-- a/b.rs PAUSE_NS -->\n\
            0.01 <!-- a/b.rs SHARE -->, 1 % <!-- a/b.rs SHARE -->, 3 000 ms <!-- a/b.rs PAUSE_NS -->\n\
            7 of 9 <!-- docs/index.md all: met -->, 3 of 4 <!-- docs/index.md auto: met --> <!-- a note -->\n";
        assert_eq!(complaints_on(page), Vec::<String>::new());
    }

    /// Are another number, unit or total, and a source that does not exist, rejected with their line?
    #[test]
    fn other_numbers_and_missing_sources_are_rejected() {
        let page = "786 451 <!-- a/b.rs MAX_BYTES -->\n1.5 ms <!-- a/b.rs WAIT -->\n\
            8 of 9 <!-- docs/index.md all: met -->\n5 <!-- a/c.rs HEAD -->\n5 <!-- a/b.rs TAIL -->\n\
            5 <!-- a/b.rs NAME -->\n7 of 9 <!-- docs/index.md all: missed -->\n<!-- a/b.rs HEAD -->\n";
        let expected = [
            "page.md:1: found 786451, expected 786452, MAX_BYTES",
            "page.md:2: found 0.0015, expected 1.5, WAIT",
            "page.md:3: expected '7 of 9', all: met",
            "page.md:4: no file 'a/c.rs'",
            "page.md:5: a/b.rs: no number 'TAIL'",
            "page.md:6: a/b.rs: no number 'NAME'",
            "page.md:7: docs/index.md: no cell 'all: missed'",
            "page.md:8: no number before HEAD",
        ];
        assert_eq!(complaints_on(page), expected);
    }
}
