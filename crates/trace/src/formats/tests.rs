use std::io::Read;

use proptest::prelude::*;

use crate::*;

fn read_all(reader: &mut dyn TraceReader) -> Result<Vec<AccessRecord>, TraceError> {
    let (mut records, mut batch) = (Vec::new(), Vec::new());
    while reader.read_batch(&mut batch)? {
        assert!(!batch.is_empty(), "an empty batch before the end");
        records.extend_from_slice(&batch);
    }
    Ok(records)
}

fn boxed_input(bytes: &[u8]) -> Box<dyn Read + Send> {
    Box::new(std::io::Cursor::new(bytes.to_vec()))
}

fn read(
    bytes: &[u8],
    name: &str,
    format: Option<Format>,
) -> Result<(Vec<AccessRecord>, Option<TraceTotals>), TraceError> {
    let mut reader = open_input(boxed_input(bytes), name, format)?;
    let records = read_all(reader.as_mut())?;
    Ok((records, reader.totals().cloned()))
}

fn record(address: u64, gap: u64, size: u16, store: bool) -> AccessRecord {
    AccessRecord {
        address,
        gap,
        thread: 0,
        size,
        store,
        ..AccessRecord::default()
    }
}

const LACKEY: &[u8] = b"==12== Lackey\nI  04001000,3\nI  04001003,5\n L 1ffe80,8\n S 1ffe88,4\nI  04001008,2\n M 0421747c,20\nI  0400,1\n";

/// Do lackey's lines become accesses, with the instructions between them, and a modify as one store?
#[test]
fn lackey_lines_become_records() {
    let (records, totals) = read(LACKEY, "x", None).unwrap();
    let expected = [
        record(0x1ffe80, 2, 8, false),
        record(0x1ffe88, 0, 4, true),
        record(0x421747c, 1, 20, true),
    ];
    assert_eq!(records, expected);
    let totals = totals.unwrap();
    assert_eq!(
        (totals.program_accesses, totals.instructions),
        (Some(3), Some(4))
    );
}

/// Do both of Dinero's notations become accesses, and are the instructions of a trace without any unknown?
#[test]
fn din_lines_become_records() {
    let (records, totals) =
        read(b"2 400\n0 1000\n1 1008 4\n# note\nr 0x2000 8\n", "x", None).unwrap();
    let expected = [
        record(0x1000, 1, 0, false),
        record(0x1008, 0, 4, true),
        record(0x2000, 0, 8, false),
    ];
    assert_eq!(records, expected);
    assert_eq!(totals.unwrap().instructions, Some(1));
    assert_eq!(
        read(b"r 1000\n", "x", None)
            .unwrap()
            .1
            .unwrap()
            .instructions,
        None
    );
}

/// Are the binary formats decoded according to their definitions?
#[test]
fn binary_entries_become_records() {
    let raw: Vec<u8> = [64u64, u64::MAX]
        .iter()
        .flat_map(|address| address.to_le_bytes())
        .collect();
    let (records, totals) = read(&raw, "t.u64", None).unwrap();
    assert_eq!(
        records,
        [record(64, 0, 0, false), record(u64::MAX, 0, 0, false)]
    );
    assert_eq!(totals.unwrap().instructions, None);

    let mut champsim = vec![0u8; 128];
    champsim[64 + 16..64 + 24].copy_from_slice(&0x5000u64.to_le_bytes());
    champsim[64 + 32..64 + 40].copy_from_slice(&0x6000u64.to_le_bytes());
    let (records, totals) = read(&champsim, "t", Some(Format::ChampSim)).unwrap();
    assert_eq!(
        records,
        [record(0x5000, 2, 0, true), record(0x6000, 0, 0, false)]
    );
    assert_eq!(totals.unwrap().instructions, Some(2));

    let mut oracle = vec![0u8; 24];
    oracle[4..12].copy_from_slice(&9u64.to_le_bytes());
    let (records, _) = read(&oracle, "t.oracleGeneral", None).unwrap();
    assert_eq!(records, [record(9 << 6, 0, 0, false)]);
}

/// Are objects of different sizes rejected with their place, unless the user asks to ignore sizes?
#[test]
fn objects_of_different_sizes_are_rejected_unless_ignored() {
    let request_bytes = |object: u64, bytes: u32| {
        let mut entry = [0u8; 24];
        entry[4..12].copy_from_slice(&object.to_le_bytes());
        entry[12..16].copy_from_slice(&bytes.to_le_bytes());
        entry
    };
    let same = [request_bytes(1, 512), request_bytes(2, 512)].concat();
    assert_eq!(read(&same, "t.oracleGeneral", None).unwrap().0.len(), 2);

    let mixed = [
        request_bytes(1, 512),
        request_bytes(2, 512),
        request_bytes(3, 100),
    ]
    .concat();
    let refused = read(&mixed, "t.oracleGeneral", None)
        .unwrap_err()
        .to_string();
    assert!(
        refused
            .starts_with("t.oracleGeneral: byte 48: found an object of 100 bytes after one of 512"),
        "{refused}"
    );
    assert!(refused.contains("oracle-general-unit"), "{refused}");
    assert_eq!(
        read(&mixed, "t", Some(Format::OracleGeneralUnit))
            .unwrap()
            .0
            .len(),
        3
    );
}

/// Is a zstd-compressed trace decompressed while it is read, and its format determined from the content?
#[test]
fn a_compressed_trace_is_decompressed_while_it_is_read() {
    let packed = zstd::bulk::compress(LACKEY, 1).unwrap();
    assert_eq!(read(&packed, "x", None).unwrap().0.len(), 3);
}

/// Are accesses, sizes, stores and instructions read from comma-separated values and from DynamoRIO's view, and are
/// headers and markers skipped?
#[test]
fn tables_and_views_are_read() {
    let csv = b"address,size,kind\n# a comment\n0x10,8,r\n64,,i\n32,4,write\n";
    let (records, totals) = read(csv, "t.csv", None).unwrap();
    let accesses: Vec<(u64, u16, bool)> = records
        .iter()
        .map(|record| (record.address, record.size, record.store))
        .collect();
    assert_eq!(
        (accesses, totals.unwrap().instructions),
        (vec![(16, 8, false), (32, 4, true)], Some(1))
    );
    let view = b"Output format:\n 1 0: 7 <marker: version 6>\n 2 1: 7 ifetch 4 byte(s) @ 0x400 non-branch\n \
                 3 1: 7 write 8 byte(s) @ 0x00001000 by PC 0x400\n";
    let (records, totals) = read(view, "t.txt", None).unwrap();
    assert_eq!(
        (records[0].address, records[0].size, records[0].store),
        (0x1000, 8, true)
    );
    assert_eq!((records.len(), totals.unwrap().instructions), (1, Some(1)));
    let wrong = read(b"0x10,8,x\n", "in", Some(Format::Csv))
        .unwrap_err()
        .to_string();
    assert_eq!(
        wrong,
        "in: line 1: found '0x10,8,x', expected an address (decimal, or hexadecimal after 0x), and optionally a size up \
         to 65535 and r, w or i, separated by commas"
    );
}

/// Do the values of a table stay the same in every dialect: a byte-order mark, quotes, semicolons, tabs, other names and
/// orders of columns, capital letters?
#[test]
fn dialects_of_a_table_give_the_same_records() {
    let expected = vec![record(0x1000, 0, 8, false), record(0x2040, 0, 4, true)];
    for table in [
        "address,size,kind\n0x1000,8,r\n0x2040,4,w\n",
        "\u{feff}address,size,kind\r\n0x1000,8,r\r\n0x2040,4,w\r\n",
        "\"address\",\"size\",\"kind\"\n\"0x1000\",\"8\",\"r\"\n\"0x2040\",\"4\",\"w\"\n",
        "address;size;kind\n0x1000;8;READ\n0x2040;4;Store\n",
        "address\tsize\tkind\n0X1000\t8\tLoad\n8256\t4\tW\n",
        "addr,size,rw\n0x1000,8,r\n0x2040,4,w\n",
        "time,op,size,ADDR\n1,read,8,4096\n2,write,4,0x2040\n",
        "0x1000,8\n0x2040,4,w\n",
    ] {
        assert_eq!(
            read(table.as_bytes(), "t.csv", None).unwrap().0,
            expected,
            "{table}"
        );
    }
}

/// Is a table refused whose columns may mean something else?
#[test]
fn ambiguous_tables_are_refused_with_the_remedy() {
    let refusal = |table: &str| {
        read(table.as_bytes(), "t.csv", None)
            .unwrap_err()
            .to_string()
    };
    assert!(refusal("17,4096\n18,4160\n").contains("expected a header such as address,size"));
    assert!(refusal("time,id\n1,7\n").contains("expected a header with a column 'address'"));
    assert!(refusal("address\n7f00\n").contains("hexadecimal after 0x"));
    assert!(refusal("address,size\n0x7f00,65536\n").contains("a size up to 65535"));
    assert_eq!(
        refusal(""),
        "t.csv: byte 0: found nothing, expected a trace"
    );
}

/// Is a line of a table refused in which a separator stands within quotes, so that values would move to other columns?
#[test]
fn a_separator_within_quotes_is_refused() {
    for line in [
        "\"a,0x40\",0x80",
        "\"a,64,b\",0x80",
        "\",64,\",0x80",
        "\"say \"\"a\"\",64,\"\",0x80",
    ] {
        let table = format!("name,address\n\"a b\",0x40\n{line}\n");
        let refusal = read(table.as_bytes(), "t.csv", None).unwrap_err();
        assert!(refusal.to_string().contains("line 3: "), "{refusal}");
    }
}

/// Does a fetch count as an instruction, whether its row has an address or not?
#[test]
fn fetches_without_an_address_are_instructions() {
    let table = b"address,size,kind\n,,i\n0x400,,i\n0x40,8,r\n,8,r\n";
    let (records, totals) = read(table, "t.csv", None).unwrap();
    assert_eq!(records, [record(0x40, 2, 8, false)]);
    assert_eq!(totals.unwrap().instructions, Some(2));
}

/// Does a converted text say that its instructions are unknown if it has none, and otherwise that they are known?
#[test]
fn a_converted_text_knows_instructions_only_if_it_has_any() {
    for (text, instructions_known) in [("0 400\n0 440\n", false), ("2 10\n0 400\n", true)] {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut reader = open_input(boxed_input(text.as_bytes()), "x", Some(Format::Din)).unwrap();
        convert(reader.as_mut(), file.reopen().unwrap(), "x", 1, |_| {}).unwrap();
        let header = CmtReader::open(file.path()).unwrap().header().clone();
        assert_eq!(header.instructions_known, instructions_known, "{text}");
    }
}

/// Are the threads of DynamoRIO's view told apart, is an instruction that is fetched once counted once, and is the view
/// of 2022 without binaries read?
#[test]
fn views_keep_threads_and_count_fetched_instructions() {
    let view = "           1           0:     71 <marker: version 4>\n\
        2 1: 71 ifetch 2 byte(s) @ 0x400 f3 a4 rep movsb\n\
        3 1: 71 read 1 byte(s) @ 0x1000 by PC 0x400\n\
        4 1: 71 ifetch 2 byte(s) @ 0x400 non-fetched instruction\n\
        5 1: 71 read 1 byte(s) @ 0x1001 by PC 0x400\n\
        6 2: 99 ifetch 4 byte(s) @ 0x500 non-branch\n\
        7 2: 99 write 8 byte(s) @ 0x2000 by PC 0x500\n\
        8 3: 71 ifetch 4 byte(s) @ 0x404 non-branch\n\
        View tool results:\n              3 : total instructions\n";
    let (records, totals) = read(view.as_bytes(), "v", None).unwrap();
    let on_thread = |thread, record| AccessRecord { thread, ..record };
    let expected = [
        record(0x1000, 1, 1, false),
        record(0x1001, 0, 1, false),
        on_thread(1, record(0x2000, 1, 8, true)),
    ];
    assert_eq!(records, expected);
    let totals = totals.unwrap();
    assert_eq!(totals.instructions, Some(3));
    let threads: Vec<_> = totals
        .threads
        .iter()
        .map(|thread| (thread.os_thread, thread.records, thread.instructions))
        .collect();
    assert_eq!(threads, [(Some(71), 2, Some(2)), (Some(99), 1, Some(1))]);

    let old_view = "Output format:\n<record#>: T<tid> <record details>\n-----\n\
        1: T35   0x7f7fe453152a  non-branch 3 byte(s)\n\
        2: T35   0x7f7fe453152f  e8 ac 0d 00 00  call   $0x00007f7fe45322e0\n\
        3: T35   write 8 byte(s) @ 0x7ffe0 by PC 0x7f7fe453152f\n";
    let (records, totals) = read(old_view.as_bytes(), "v", None).unwrap();
    assert_eq!(records, [record(0x7ffe0, 2, 8, true)]);
    assert_eq!(totals.unwrap().instructions, Some(2));
}

/// Is a foreign binary trace read by the name before `.bin`, and refused if its records are not those of its name?
#[test]
fn binary_traces_are_not_guessed() {
    let oracle_bytes = [5u8; 72];
    for name in [
        "c.oracleGeneral.bin",
        "c.oracleGeneral.RAW",
        "c.oracleGeneral.bin.zst",
    ] {
        assert_eq!(
            read(&oracle_bytes, name, None).unwrap().0.len(),
            3,
            "{name}"
        );
    }
    for name in ["c.bin", "c.raw", "c.trace.BIN", "c"] {
        let refusal = read(&oracle_bytes, name, None).unwrap_err().to_string();
        assert!(
            refusal.contains("expected a known format; name one of"),
            "{refusal}"
        );
    }
    let champsim_refusal = |bytes: &[u8]| read(bytes, "c.champsim", None).unwrap_err().to_string();
    assert!(champsim_refusal(&oracle_bytes[..64]).contains("byte 8: found branch flags 5 and 5"));
    let mut archive = vec![0u8; 512];
    archive[257..262].copy_from_slice(b"ustar");
    assert!(champsim_refusal(&archive).contains("found a tar archive"));
    let table = b"address,size,kind\n0x1000,8,r\n0x2040,4,w\n0x2040,4,w\n";
    let refusal = read(table, "c", Some(Format::U64)).unwrap_err().to_string();
    assert!(
        refusal.contains("found text ('address,size,kin')"),
        "{refusal}"
    );
}

/// Are the superblocks of lackey skipped, and small decimal numbers not taken for Dinero's hexadecimal ones?
#[test]
fn superblocks_are_skipped_and_decimals_are_not_guessed_as_dinero() {
    let superblocks = b"==1== Lackey\nSB 0401ab70\nI  0401ab70,3\n L 1ffe80,8\n";
    let (records, totals) = read(superblocks, "x", None).unwrap();
    assert_eq!(records, [record(0x1ffe80, 1, 8, false)]);
    assert_eq!(totals.unwrap().instructions, Some(1));
    assert_eq!(
        read(b"\xef\xbb\xbf0 1000\n0 200f\n", "x", None)
            .unwrap()
            .0
            .len(),
        2
    );

    let ramulator = b"0 20734016\n1 20846400\n0 20734208\n";
    let refusal = read(ramulator, "x", None).unwrap_err().to_string();
    assert!(refusal.contains("expected a known format"), "{refusal}");
}

/// Does the error for every invalid input give its place, the value found and the value expected?
#[test]
fn invalid_inputs_give_place_found_and_expected_values() {
    let read_error =
        |bytes: &[u8], format| read(bytes, "in", Some(format)).unwrap_err().to_string();
    assert_eq!(
        read_error(b"I  04,3\n X 12,8\n", Format::Lackey),
        "in: line 2: found ' X 12,8', expected I, L, S or M, a hexadecimal address, a comma and a size"
    );
    assert_eq!(
        read_error(b"0 10\n0 zz\n", Format::Din),
        "in: line 2: found '0 zz', expected a label (0, 1, 2, r, w or i) and a hexadecimal address"
    );
    assert_eq!(
        read_error(&[0; 12], Format::U64),
        "in: byte 8: found 4 bytes before the end, expected entries of 8 bytes"
    );
    assert!(
        read_error(&[b'L'; 9000], Format::Lackey)
            .ends_with("...', expected a line of at most 4096 bytes")
    );
    assert!(
        read_error(b"CMTRACE\0", Format::Cmt)
            .starts_with("in: byte 0: found the end of the file after 8 bytes")
    );
    let unknown = read(b"hello world\n", "notes.txt", None)
        .unwrap_err()
        .to_string();
    assert_eq!(
        unknown,
        "notes.txt: byte 0: found 'hello world\\n', expected a known format; name one of cmt, lackey, din, csv, drmemtrace, \
         u64, champsim, oracle-general, oracle-general-unit with --format"
    );
    let absent = open("/no/such/file.cmt", None).err().unwrap().to_string();
    assert!(
        absent.starts_with("/no/such/file.cmt: cannot open: "),
        "{absent}"
    );
    let misspelt = "lakey".parse::<Format>().unwrap_err().to_string();
    assert!(
        misspelt.starts_with("no format is named 'lakey' (did you mean 'lackey'?)"),
        "{misspelt}"
    );
}

/// Are all records before a damaged position returned before its error, in every foreign format?
#[test]
fn records_before_damage_are_returned_before_its_error() {
    for (format, mut bytes) in sample_files().into_iter().skip(1) {
        let intact_records = read(&bytes, "in", Some(format)).unwrap().0.len();
        let damage: &[u8] = match format {
            Format::DrMemTrace => b"3 1: 7 read 8 byte(s) @ here\n",
            _ => b"no\tline",
        };
        bytes.extend_from_slice(damage);

        let counts = count_until_damage(&bytes, format);
        assert_eq!(counts, (true, intact_records), "{format:?}");
    }
}

/// Whether the input ends in an error, and the number of records before it.
fn count_until_damage(bytes: &[u8], format: Format) -> (bool, usize) {
    let mut reader = open_input(boxed_input(bytes), "in", Some(format)).unwrap();
    let (mut batch, mut record_count) = (Vec::new(), 0);
    loop {
        match reader.read_batch(&mut batch) {
            Ok(true) => record_count += batch.len(),
            end => return (end.is_err(), record_count),
        }
    }
}

/// Does a binary trace give the records of all entries before a damaged one and none behind it, wherever in a batch that is?
#[test]
fn entries_before_a_damaged_one_are_returned() {
    for (format, entry_bytes, damaged_byte) in
        [(Format::ChampSim, 64, 8), (Format::OracleGeneral, 24, 12)]
    {
        for damaged_entry in [1, 100, 1 << 14] {
            let mut bytes = vec![1; entry_bytes * (damaged_entry + 50)];
            let records = count_until_damage(&bytes[..entry_bytes * damaged_entry], format);
            bytes[entry_bytes * damaged_entry + damaged_byte] = 7;
            assert_eq!(
                count_until_damage(&bytes, format),
                (true, records.1),
                "{format:?} {damaged_entry}"
            );
        }
    }
}

/// Does a file of any format that is opened near a record give its records from the stated one on, which is that very
/// record if all have one size?
#[test]
fn a_file_opened_near_a_record_gives_its_records_from_there_on() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    for (format, mut bytes) in sample_files() {
        let has_one_size = [
            Format::U64,
            Format::OracleGeneral,
            Format::OracleGeneralUnit,
        ];
        let has_one_size = has_one_size.contains(&format);
        if has_one_size {
            bytes = many_requests();
        }
        std::fs::write(path, &bytes).unwrap();
        let records = read_all(open(path, Some(format)).unwrap().as_mut()).unwrap();
        for record in [0, 1, records.len() / 2, records.len() - 1, records.len()] {
            let (first, mut reader) = open_near(path, Some(format), record as u64).unwrap();
            let rest = read_all(reader.as_mut()).unwrap();
            assert_eq!(rest, records[first as usize..], "{format:?} {record}");
            let known = open(path, Some(format)).unwrap().totals().cloned();
            if has_one_size {
                assert_eq!(first, record as u64);
                assert_eq!(known.unwrap().records, records.len() as u64);
            }
        }
    }
}

/// Is a zstd file of many frames, of which some have no content, read from any record as the plain file, and is one refused
/// of which a frame states another length than it has?
#[test]
fn a_file_of_many_frames_is_read_from_any_record() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    let bytes = many_requests();
    let expected = read(&bytes, "in", Some(Format::U64)).unwrap().0;
    let frame = |part: &[u8]| zstd::bulk::compress(part, 1).unwrap();
    let skippable = [0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 7, 7, 7];
    let mut packed: Vec<u8> = bytes.chunks(70_001).flat_map(frame).collect();
    packed.extend(skippable.into_iter().chain(frame(&[])));
    for record in [
        0,
        1,
        8_750,
        8_751,
        100_000,
        expected.len() - 1,
        expected.len(),
    ] {
        std::fs::write(path, &packed).unwrap();
        let (first, mut reader) = open_near(path, Some(Format::U64), record as u64).unwrap();
        assert_eq!(first, record as u64);
        assert!(
            read_all(reader.as_mut()).unwrap() == expected[record..],
            "{record}"
        );
    }

    // The first frame states 70,001 bytes in the four that follow its descriptor.
    let stated = 70_001u32.to_le_bytes();
    assert_eq!(packed[5..9], stated);
    packed[5] -= 8;
    std::fs::write(path, &packed).unwrap();
    let refusal = open_near(path, Some(Format::U64), 0)
        .and_then(|(_, mut reader)| read_all(reader.as_mut()))
        .unwrap_err();
    assert!(refusal.to_string().contains("cannot read"), "{refusal}");
}

/// Is the object of another size refused with its place wherever the reader began, and is a file that ends within a record
/// one that must be read from its first record?
#[test]
fn damage_is_found_wherever_a_reader_begins() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    let mut bytes = many_requests();
    let last = bytes.len() - 24;
    bytes[last + 12] = 1;
    std::fs::write(path, &bytes).unwrap();
    let refusal = |record: u64| {
        let (_, mut reader) = open_near(path, Some(Format::OracleGeneral), record).unwrap();
        read_all(reader.as_mut()).unwrap_err().to_string()
    };
    assert!(refusal(0).contains(&format!("byte {last}: found an object of 513 bytes")));
    assert_eq!(refusal(30_000), refusal(0));

    std::fs::write(path, &bytes[..last + 5]).unwrap();
    let (first, mut reader) = open_near(path, Some(Format::U64), 100).unwrap();
    assert!(first == 0 && reader.totals().is_none());
    let refusal = read_all(reader.as_mut()).unwrap_err().to_string();
    assert!(refusal.contains(&format!("byte {last}: found 5 bytes before the end")));
}

/// Requests of some batches, for objects of one size.
fn many_requests() -> Vec<u8> {
    let request = |number: u64| [number, (512 << 32) | (number % 9), number];
    let words = (0..50_000).flat_map(request);
    words.flat_map(u64::to_le_bytes).collect()
}

/// Does a conversion keep records, header and totals?
#[test]
fn a_conversion_keeps_records_header_and_totals() {
    let mut out = Vec::new();
    let mut reader = open_input(boxed_input(LACKEY), "x", None).unwrap();
    let converted = convert(reader.as_mut(), &mut out, "out.cmt", 1, |_| {}).unwrap();
    assert_eq!(converted.bytes, out.len() as u64);
    let mut back = CmtReader::new(&out[..], "out.cmt").unwrap();
    assert_eq!(back.header(), reader.header());
    assert_eq!(
        read_all(&mut back).unwrap(),
        read(LACKEY, "x", None).unwrap().0
    );
    assert_eq!(
        (
            back.totals().unwrap().instructions,
            back.totals().unwrap().records
        ),
        (Some(4), 3)
    );
}

/// A small file of every format, to be damaged.
fn sample_files() -> Vec<(Format, Vec<u8>)> {
    let mut cmt = Vec::new();
    convert(
        open_input(boxed_input(LACKEY), "x", None).unwrap().as_mut(),
        &mut cmt,
        "x",
        1,
        |_| {},
    )
    .unwrap();

    vec![
        (Format::Cmt, cmt),
        (Format::Lackey, LACKEY.to_vec()),
        (Format::Din, b"2 400\n0 1000\n1 1008 4\n".to_vec()),
        (
            Format::Csv,
            b"address,size,kind\n0x10,8,r\n32,4,w\n".to_vec(),
        ),
        (
            Format::DrMemTrace,
            b"1 1: 7 ifetch 4 byte(s) @ 0x400\n2 1: 7 read 8 byte(s) @ 0x1000 by PC 0x400\n"
                .to_vec(),
        ),
        (Format::U64, vec![7; 40]),
        (Format::ChampSim, vec![1; 128]),
        (Format::OracleGeneral, vec![5; 72]),
        (Format::OracleGeneralUnit, vec![5; 72]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { rng_seed: proptest::test_runner::RngSeed::Fixed(2), ..ProptestConfig::with_cases(400) })]

    /// Can any change to any input of any format, read under any name, make a reader panic or loop?
    #[test]
    fn damaged_inputs_never_panic(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        named in any::<bool>(),
    ) {
        let mut samples = sample_files();
        let (format, mut bytes) = samples.swap_remove(which.index(samples.len()));
        for (at, value) in changes {
            let index = at.index(bytes.len());
            bytes[index] = value;
        }
        bytes.truncate(cut.index(bytes.len()) + 1);
        read(&bytes, "in", named.then_some(format)).ok();
        if let Ok(mut reader) = CmtReader::new(&bytes[..], "in") {
            reader.salvage();
            prop_assert!(read_all(&mut reader).is_ok());
        }

        ProfileFile::parse(&bytes, "in").ok();
        if let Ok(mut log) = RunLogReader::new(boxed_input(&bytes), "in") {
            while let Ok(Some(_)) = log.next_record() {}
        }
    }
}
