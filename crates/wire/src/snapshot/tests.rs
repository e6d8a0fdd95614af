use super::*;
use crate::{MigrationId, crc};
use proptest::prelude::*;
use vmferry_core::{
    Gpa, MAX_REGIONS, MachineConfig, PAGE_SIZE, PageDigest, PageIndex, Region, RegionId, Section,
};

fn region(id: u32, gpa: u64, pages: u64) -> SnapshotRegion {
    let region = Region { id: RegionId(id), gpa: Gpa(gpa), len: pages * PAGE_SIZE };
    SnapshotRegion { region, index_sum: 77, contents: pages.min(9) }
}

fn header(regions: Vec<SnapshotRegion>) -> SnapshotHeader {
    let part = |bytes| PartSum { bytes, sum: 5 };
    SnapshotHeader {
        id: MigrationId([7; 16]),
        copy: true,
        base: None,
        machine: part(900),
        state: part(70_000),
        regions,
    }
}

fn two() -> SnapshotHeader {
    header(vec![region(3, 0, 1200), region(0, 5 << 30, 700)])
}

fn length(header: &SnapshotHeader) -> u64 {
    SnapshotMap::new(&header.layout().unwrap(), header.machine.bytes, header.state.bytes).len
}

/// Returns `bytes` with `change` and a checksum that fits.
fn forged(mut bytes: [u8; SNAPSHOT_HEADER_BYTES], at: usize, change: &[u8]) -> [u8; SNAPSHOT_HEADER_BYTES] {
    bytes[at..at + change.len()].copy_from_slice(change);
    let (body, sum) = bytes.split_at_mut(SNAPSHOT_HEADER_BYTES - 8);
    sum.copy_from_slice(&crc(body).to_le_bytes());
    bytes
}

proptest! {
    #[test]
    fn headers_decode_as_encoded(counts in prop::collection::vec(1u64..1 << 20, 1..=MAX_REGIONS), copy: bool, id: [u8; 16],
                         base in prop::option::of(("[^/\0]{1,60}", any::<[u8; 16]>())),
                         machine in 0u32..1 << 20, state in 0u32..1 << 26) {
        let entries = (0u32..).zip(&counts).map(|(id, pages)| region(id, u64::from(id) << 40, *pages)).collect();
        let mut header = header(entries);
        (header.copy, header.id.0) = (copy, id);
        header.base = base.and_then(|(name, id)| {
            Some(SnapshotBase { id: MigrationId(id), name: BaseName::new(name.as_bytes())? })
        });
        (header.machine.bytes, header.state.bytes) = (machine, state);
        let (back, map) = SnapshotHeader::decode(&header.encode().unwrap(), length(&header)).unwrap();
        prop_assert_eq!(back, header);
        // Parts lie one behind the other and do not overlap.
        let mut end = map.state + u64::from(state);
        prop_assert!(map.machine >= SNAPSHOT_HEADER_BYTES as u64 && map.state >= map.machine + u64::from(machine));
        let of = |part: fn(&RegionOffsets) -> (u64, u64)| map.regions.iter().map(part).collect::<Vec<_>>();
        for (start, bytes) in [
            of(|place| (place.index, place.index_bytes())),
            of(|place| (place.tables, place.table(place.blocks()) - place.tables)),
            of(|place| (place.data, place.content(PageIndex(place.pages)) - place.data)),
        ].concat() {
            prop_assert!(start >= end && start.is_multiple_of(4096));
            end = start + bytes;
        }
        prop_assert_eq!(end, map.len);
    }

    #[test]
    fn any_damaged_bit_of_a_header_is_found(at in 0..SNAPSHOT_HEADER_BYTES * 8) {
        let mut bytes = two().encode().unwrap();
        bytes[at / 8] ^= 1 << (at % 8);
        prop_assert!(SnapshotHeader::decode(&bytes, length(&two())).is_err());
    }

    /// The checksum is corrected, so that the fields themselves are checked.
    #[test]
    fn any_header_is_an_error_or_adds_up(at in 8usize..160, change: [u8; 8], file: u64) {
        let bytes = forged(two().encode().unwrap(), at, &change);
        if let Ok((header, map)) = SnapshotHeader::decode(&bytes, file) {
            prop_assert_eq!(map.len, file);
            prop_assert!(header.layout().is_ok());
        }
        let _ = SnapshotHeader::decode(&bytes, length(&two()));
    }

    #[test]
    fn tables_decode_as_encoded_and_any_damaged_bit_is_found(digests in prop::collection::vec(any::<Option<u64>>(), 1..=TABLE_PAGES),
                                                     at in 0..TABLE_BYTES * 8) {
        let mut table = PageTable::default();
        digests.iter().enumerate().for_each(|(page, digest)| table.set(page, digest.map(PageDigest)));
        let place = (RegionId(0), PageIndex(512), digests.len());
        let Some((mut bytes, sum)) = table.encode() else {
            prop_assert!(digests.iter().all(Option::is_none));
            return Ok(());
        };
        let back = PageTable::decode(&bytes, sum, TableKind::Complete, place, 0).unwrap();
        prop_assert_eq!(&back, &table);
        for (page, digest) in digests.iter().enumerate() {
            prop_assert_eq!(back.has_content(page), digest.is_some());
            prop_assert!(back.fits(page, digest.map(PageDigest)) && !back.fits(page, digest.map(|d| PageDigest(!d)).or(Some(PageDigest(9)))));
        }
        bytes[at / 8] ^= 1 << (at % 8);
        prop_assert!(PageTable::decode(&bytes, sum, TableKind::Complete, place, 0).is_err());
    }

    #[test]
    fn any_bytes_of_a_part_are_an_error_or_the_part(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let sum = PartSum { bytes: 0, sum: crc(&bytes) };
        let _ = decode_part::<Vec<Section>>(&bytes, sum, SnapshotPart::State, 0);
        let _ = decode_part::<MachineConfig>(&bytes, sum, SnapshotPart::Machine, 0);
    }
}

#[test]
fn a_digest_of_zero_is_content() {
    let mut table = PageTable::default();
    assert_eq!(table.encode(), None);
    table.set(4, Some(PageDigest(0)));
    assert!(table.has_content(4) && table.fits(4, Some(PageDigest(0))) && !table.fits(4, None));
    assert_eq!(table.contents(), 1);
}

#[test]
fn table_rejects_content_behind_the_end_of_its_region() {
    let mut table = PageTable::default();
    table.set(100, Some(PageDigest(5)));
    let (bytes, sum) = table.encode().unwrap();
    let place = |pages| (RegionId(0), PageIndex(0), pages);
    assert!(PageTable::decode(&bytes, sum, TableKind::Complete, place(101), 0).is_ok());
    assert!(matches!(
        PageTable::decode(&bytes, sum, TableKind::Complete, place(100), 0),
        Err(SnapshotError::Field { .. })
    ));
}

#[test]
fn table_of_an_increment_tells_pages_of_the_base_from_zeros_and_contents() {
    let kind = TableKind::Increment;
    let mut table = PageTable::new(kind);
    assert_eq!(table.encode(), None, "all pages are those of the base");
    assert!((0..TABLE_PAGES).all(|at| table.entry(at) == PageEntry::Base && !table.fits(at, None)));
    table.set(3, None);
    let (bytes, sum) = table.encode().expect("a page of zeros is not a page of the base");
    table.set(4, Some(PageDigest(u64::MAX)));
    table.set(5, Some(PageDigest(0)));
    assert_eq!((table.entry(3), table.entry(4), table.contents()), (PageEntry::Zero, PageEntry::Here, 2));
    assert!(table.fits(4, Some(PageDigest(u64::MAX))) && table.fits(5, Some(PageDigest(0))));
    let place = |pages| (RegionId(0), PageIndex(0), pages);
    let decoded = PageTable::decode(&bytes, sum, kind, place(4), 0).unwrap();
    assert_eq!((decoded.entry(3), decoded.entry(4)), (PageEntry::Zero, PageEntry::Base));
    assert!(matches!(PageTable::decode(&bytes, sum, kind, place(3), 0), Err(SnapshotError::Field { .. })));
    // In a complete file, the same word is a digest.
    let mut complete = PageTable::default();
    complete.set(4, Some(PageDigest(u64::MAX)));
    assert_eq!(complete.entry(4), PageEntry::Here);
    assert!(complete.fits(4, Some(PageDigest(u64::MAX))));
    table.copy_entry(6, &complete);
    table.copy_entry(7, &complete);
    assert_eq!((table.entry(6), table.entry(7)), (PageEntry::Zero, PageEntry::Zero));
    let mut into = PageTable::new(kind);
    into.copy_entry(4, &complete);
    assert!(into.fits(4, Some(PageDigest(u64::MAX))), "it is content, not a page of the base");
}

#[test]
fn names_of_bases_have_no_folder() {
    for bad in [&b""[..], b".", b"..", b"a/b", b"/a", b"a\0b", &[b'x'; 256]] {
        assert_eq!(BaseName::new(bad), None, "{bad:?}");
    }
    let name = BaseName::new(b"monday \xff").unwrap();
    assert_eq!((name.as_bytes(), name.to_string().as_str()), (&b"monday \xff"[..], "monday \\xff"));
    let base = SnapshotBase { id: MigrationId([3; 16]), name };
    let increment = SnapshotHeader { base: Some(base), ..two() };
    let (good, file) = (increment.encode().unwrap(), length(&increment));
    assert_eq!(SnapshotHeader::decode(&good, file).unwrap().0, increment);
    // The length of the name, and its bytes.
    for (at, change) in [(2648, &[0, 0][..]), (2648, &[0, 1]), (2650, b"/"), (2650, b"\0")] {
        let error = SnapshotHeader::decode(&forged(good, at, change), file).unwrap_err().to_string();
        assert!(error.contains("base's name"), "{at}: {error}");
    }
}

#[test]
fn a_damaged_index_is_found_and_names_its_place() {
    let index = TableIndex::new(vec![0, 5, 9]);
    let (mut bytes, sum) = index.encode();
    assert_eq!(TableIndex::decode(&bytes, sum, RegionId(1), 4096), Ok(index.clone()));
    assert_eq!((index.table(0), index.table(1), index.table(3)), (None, Some(5), None));
    bytes[9] ^= 1;
    let error = TableIndex::decode(&bytes, sum, RegionId(1), 4096).unwrap_err();
    assert_eq!(error.to_string(), "the index of region 1 at byte 0x1000 is damaged (its checksum is wrong)");
}

/// Headers of a hostile file, with a checksum that fits.
#[test]
fn invalid_headers_are_rejected_with_the_reason() {
    let (good, file) = (two().encode().unwrap(), length(&two()));
    let refused = |at, change: &[u8], file| {
        SnapshotHeader::decode(&forged(good, at, change), file).unwrap_err().to_string()
    };
    let huge = u64::MAX.to_le_bytes();
    for (at, change, words) in [
        (0, &b"QEVM"[..], "not a snapshot"),
        (8, &[2, 0][..], "version 2"),
        (10, &[0, 0][..], "regions = 0"),
        (10, &[65, 0][..], "regions = 65"),
        (10, &[3, 0][..], "whole 4 KiB pages"),
        (23, &[0x80][..], "features"),
        (40, &huge[..], "length of the file"),
        (48, &huge[..4], "machine's description"),
        (52, &huge[..4], "device state"),
        (72 + 8, &huge[..], "whole 4 KiB pages"),
        (72 + 16, &(1u64 << 60).to_le_bytes()[..], "overlaps"),
        (72 + 40 + 16, &(1u64 << 60).to_le_bytes()[..], "at most"),
        (72 + 40 + 16, &(1u64 << 45).to_le_bytes()[..], "length of the file"),
        (72 + 32, &1201u64.to_le_bytes()[..], "pages with content = 1201"),
    ] {
        let text = refused(at, change, file);
        assert!(text.contains(words), "{words}: {text}");
    }
    let empty = SnapshotHeader::decode(&[0; SNAPSHOT_HEADER_BYTES], file);
    assert_eq!(empty, Err(SnapshotError::Unfinished));
    for wrong in [0, 4096, file - 1, file + 1] {
        let error = SnapshotHeader::decode(&good, wrong).unwrap_err();
        assert_eq!(error, SnapshotError::Length { has: wrong, wants: file });
    }
}

#[test]
fn machines_and_sections_decode_as_encoded_and_oversized_ones_are_rejected() {
    let section = |bytes| Section { name: "x".into(), instance: 1, version: 2, payload: vec![5; bytes] };
    let sections = vec![section(3), section(0), section(70_000)];
    let (mut bytes, sum) = encode_state(&sections).unwrap();
    assert_eq!(decode_part::<Vec<Section>>(&bytes, sum, SnapshotPart::State, 8192), Ok(sections));
    bytes[40] ^= 4;
    let error = decode_part::<Vec<Section>>(&bytes, sum, SnapshotPart::State, 8192).unwrap_err();
    assert!(error.to_string().contains("device state at byte 0x2000 is damaged"), "{error}");
    let machine = MachineConfig {
        kind: "x".repeat(MAX_MACHINE_BYTES),
        vcpus: 1,
        regions: vec![],
        extra: vec![],
        features: vec![],
    };
    assert!(matches!(encode_machine(&machine), Err(SnapshotError::TooLarge { .. })));
}
