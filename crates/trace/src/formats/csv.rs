//! Separated values, one access a line.

use super::lines::{LineOutcome, parse_hex, parse_size};

const LINE_EXPECTED: &str = "an address (decimal, or hexadecimal after 0x), and optionally a size \
                             up to 65535 and r, w or i, separated by commas";
const QUOTES_EXPECTED: &str = "quotes only around whole values, without a separator within them";
const HEADER_EXPECTED: &str =
    "a header with a column 'address', such as address,size,kind (other columns are skipped)";
const UNNAMED_EXPECTED: &str = "a header such as address,size in the first line, because two \
                                numbers without one may also be a time and an object";

/// Positions of the columns that are read.
#[derive(Clone, Copy)]
struct CsvColumns {
    address: usize,
    size: Option<usize>,
    kind: Option<usize>,
}

/// Separated values: `address[,size[,kind]]` without a header, or columns in any order under a header that names them.
///
/// The first line decides the separator (comma, semicolon or tab). Values may stand in double quotes; `#` begins a
/// comment. Addresses are decimal or, after `0x`, hexadecimal; the kind is `r`, `w` or `i`, or a word such as `load`.
#[derive(Default)]
pub(super) struct CsvSyntax {
    /// Separator and columns, as the first line decided.
    dialect: Option<(u8, CsvColumns)>,
}

impl CsvSyntax {
    /// Parses one line, or describes a valid one.
    pub(super) fn parse(&mut self, line: &[u8]) -> Result<LineOutcome, &'static str> {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            return Ok(LineOutcome::Nothing);
        }

        let Some((separator, columns)) = self.dialect else {
            let separator = find_separator(line);
            let fields: Vec<&[u8]> = fields_of(line, separator).collect::<Result<_, _>>()?;
            let header = read_header(&fields)?;
            let columns = header.unwrap_or(CsvColumns {
                address: 0,
                size: Some(1),
                kind: Some(2),
            });
            self.dialect = Some((separator, columns));
            return match header {
                Some(_) => Ok(LineOutcome::Nothing),
                None if is_ambiguous(&fields) => Err(UNNAMED_EXPECTED),
                None => self.parse(line),
            };
        };

        let (mut address, mut size, mut kind) = (&b""[..], &b""[..], &b""[..]);
        for (index, field) in fields_of(line, separator).enumerate() {
            let field = field?;
            if index == columns.address {
                address = field;
            } else if Some(index) == columns.size {
                size = field;
            } else if Some(index) == columns.kind {
                kind = field;
            }
        }
        let is_one_of = |names: &[&str]| {
            names
                .iter()
                .any(|name| kind.eq_ignore_ascii_case(name.as_bytes()))
        };
        let is_fetch = is_one_of(&["i", "fetch", "ifetch"]);
        if address.is_empty() {
            return Ok(match is_fetch {
                true => LineOutcome::Instruction { thread: 0 },
                false => LineOutcome::Nothing,
            });
        }
        let address = parse_address(address).ok_or(LINE_EXPECTED)?;
        let size = match size {
            b"" => 0,
            size => parse_size(size).ok_or(LINE_EXPECTED)?,
        };
        if is_one_of(&["", "r", "read", "load", "l"]) {
            Ok(LineOutcome::access(address, size, false))
        } else if is_one_of(&["w", "write", "store", "s"]) {
            Ok(LineOutcome::access(address, size, true))
        } else if is_fetch {
            Ok(LineOutcome::Instruction { thread: 0 })
        } else {
            Err(LINE_EXPECTED)
        }
    }
}

/// A comma if there is none.
fn find_separator(line: &[u8]) -> u8 {
    let separator = line.iter().find(|byte| b",;\t".contains(byte));
    separator.copied().unwrap_or(b',')
}

fn fields_of(line: &[u8], separator: u8) -> impl Iterator<Item = Result<&[u8], &'static str>> {
    line.split(move |&byte| byte == separator).map(|field| {
        let field = field.trim_ascii();
        let inner = field.strip_prefix(b"\"");
        let value = inner
            .and_then(|field| field.strip_suffix(b"\""))
            .unwrap_or(field);
        match value.contains(&b'"') {
            true => Err(QUOTES_EXPECTED),
            false => Ok(value),
        }
    })
}

/// The columns that a header names; `None` if the line has an address in its first column.
fn read_header(fields: &[&[u8]]) -> Result<Option<CsvColumns>, &'static str> {
    if fields
        .first()
        .is_some_and(|field| parse_address(field).is_some())
    {
        return Ok(None);
    }

    let position_of = |names: &[&str]| {
        let is_named = |field: &&[u8]| {
            let name = String::from_utf8_lossy(field).to_ascii_lowercase();
            names.contains(&name.as_str())
        };
        fields.iter().position(is_named)
    };
    let is_header = fields
        .iter()
        .all(|field| field.first().is_some_and(|byte| !byte.is_ascii_digit()));

    let address = position_of(&["address", "addr", "vaddr", "virtual_address"]);
    match address {
        Some(address) => Ok(Some(CsvColumns {
            address,
            size: position_of(&["size", "bytes", "size_bytes", "len", "length"]),
            kind: position_of(&["kind", "type", "rw", "op", "access", "operation"]),
        })),
        None if is_header => Err(HEADER_EXPECTED),
        None => Err(LINE_EXPECTED),
    }
}

/// Whether two numbers without a header may be something else than an address and a size.
fn is_ambiguous(fields: &[&[u8]]) -> bool {
    let is_hexadecimal = fields[0].len() > 2 && fields[0][..2].eq_ignore_ascii_case(b"0x");
    let has_numeric_size = fields.get(1).is_some_and(|field| !field.is_empty());
    let has_kind = fields
        .get(2)
        .is_some_and(|field| parse_address(field).is_none());
    has_numeric_size && !is_hexadecimal && !has_kind
}

fn parse_address(field: &[u8]) -> Option<u64> {
    if field.len() > 2 && field[..2].eq_ignore_ascii_case(b"0x") {
        return parse_hex(field);
    }
    std::str::from_utf8(field).ok()?.parse().ok()
}
