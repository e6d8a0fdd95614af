//! Tests that invalid requests are answered and change nothing.

use super::*;
use proptest::prelude::*;

#[test]
fn invalid_request_is_answered_and_changes_nothing() {
    let mut guest = DiskGuest::ready(&ALL);
    let (read, write) = (spec::VIRTIO_BLK_T_IN, spec::VIRTIO_BLK_T_OUT);
    let into = |len| (DATA, len, WRITE);
    let from = |len| (DATA, len, 0);
    type Case<'a> = (&'a str, u32, u64, Vec<(u64, u32, u16)>, u8);
    let cases: Vec<Case<'_>> = vec![
        ("an unknown type", 77, 0, vec![into(512)], UNSUPPORTED),
        ("erasing for good", spec::VIRTIO_BLK_T_SECURE_ERASE, 0, vec![from(16)], UNSUPPORTED),
        ("a SCSI command", spec::VIRTIO_BLK_T_SCSI_CMD, 0, vec![into(512)], UNSUPPORTED),
        ("zones", spec::VIRTIO_BLK_T_ZONE_REPORT, 0, vec![into(512)], UNSUPPORTED),
        ("beyond the end", read, SECTORS, vec![into(512)], IO_ERROR),
        ("across the end", write, SECTORS - 1, vec![from(1024)], IO_ERROR),
        ("beyond the last sector number", write, u64::MAX, vec![from(1024)], IO_ERROR),
        ("half a sector", read, 0, vec![into(256)], IO_ERROR),
        ("a sector and a byte", write, 0, vec![from(512), from(1)], IO_ERROR),
        ("nothing to read into", read, 0, vec![], IO_ERROR),
        ("nothing to write", write, 0, vec![], IO_ERROR),
        ("a read from readable data", read, 0, vec![from(512)], IO_ERROR),
        ("a write to writable data", write, 0, vec![into(512)], IO_ERROR),
        ("a write with readable and writable data", write, 0, vec![from(512), into(512)], IO_ERROR),
        ("no memory", write, 0, vec![(0x5_0000, 512, 0)], IO_ERROR),
        ("memory that ends", write, 0, vec![(0x3_ff00, 512, 0)], IO_ERROR),
        ("memory and then none", write, 0, vec![from(512), (u64::MAX - 511, 512, 0)], IO_ERROR),
        ("reads into memory that ends", read, 0, vec![into(512), (0x9_ff00, 512, WRITE)], IO_ERROR),
        ("the ID without room", spec::VIRTIO_BLK_T_GET_ID, 0, vec![], IO_ERROR),
        ("the ID outside memory", spec::VIRTIO_BLK_T_GET_ID, 0, vec![(1 << 40, 20, WRITE)], IO_ERROR),
    ];
    let count = cases.len() as u64;
    for (name, kind, sector, data, answer) in cases {
        let got = guest.submit(kind, sector, &data);
        let empty = data.iter().all(|(_, _, flags)| flags & WRITE == 0);
        assert_eq!(got, (answer, u32::from(empty)), "{name}");
    }
    assert_eq!(guest.disk.bytes(), content());
    let BlkFigures { io_errors, unsupported, host_errors, .. } = guest.figures();
    assert_eq!((io_errors + unsupported, host_errors), (count, 0));
    assert!(!guest.needs_reset(), "an invalid request stopped the device");
    assert_eq!(guest.submit(0, 0, &[(DATA, 512, WRITE)]).0, OK);
}

#[test]
fn invalid_headers_are_answered() {
    let mut guest = DiskGuest::ready(&ALL);
    for (name, header) in
        [("short", (HEADER, 15)), ("no memory", (0x5_0000, 16)), ("at the end", (0x3_fff8, 16))]
    {
        let parts = [(header.0, header.1, 0), (DATA, 512, WRITE), guest.answer(0)];
        assert_eq!(guest.submit_raw(&parts), (IO_ERROR, 0), "{name}");
    }
    let parts = [guest.answer(0)];
    assert_eq!(guest.submit_raw(&parts), (IO_ERROR, 1), "none at all");
}

#[test]
fn request_without_a_status_byte_is_given_back() {
    let mut guest = DiskGuest::ready(&ALL);
    let header = guest.header(0, spec::VIRTIO_BLK_T_OUT, 0);
    guest.answer(0);
    for (name, parts) in [
        ("no place for an answer", vec![header, (DATA, 512, 0)]),
        ("an empty status part", vec![header, (DATA, 512, 0), (ANSWER, 0, WRITE)]),
        ("a readable part after a writable one", vec![header, (ANSWER, 1, WRITE), (DATA, 512, 0)]),
        ("at the end of the address space", vec![header, (DATA, 512, 0), (u64::MAX, 2, WRITE)]),
    ] {
        assert_eq!(guest.submit_raw(&parts), (NONE, 0), "{name}");
    }
    // This request is done, but its status cannot be written.
    let parts = [header, (DATA, 512, 0), (0x5_0000, 1, WRITE)];
    guest.memory.write_slice(&[0; 512], GuestAddress(DATA)).unwrap();
    assert_eq!(guest.submit_raw(&parts), (NONE, 0));
    assert_eq!(guest.figures().malformed, 4);
    let mut want = content();
    want[..512].fill(0);
    assert_eq!(guest.disk.bytes(), want);
}

#[test]
fn read_only_disk_is_not_written() {
    let mut guest = DiskGuest::new(options(true), 1);
    guest.start(&[FLUSH, spec::VIRTIO_BLK_F_RO], &[0]);
    assert_eq!(guest.submit(1, 0, &[(DATA, 512, 0)]), (IO_ERROR, 1));
    let data = ranges(&guest, &[(8, 8, 0)]);
    assert_eq!(guest.submit(spec::VIRTIO_BLK_T_DISCARD, 0, &data).0, UNSUPPORTED);
    assert_eq!(guest.submit(spec::VIRTIO_BLK_T_WRITE_ZEROES, 0, &data).0, UNSUPPORTED);
    assert_eq!(guest.submit(0, 0, &[(DATA, 512, WRITE)]).0, OK);
    assert_eq!(guest.submit(4, 0, &[]).0, OK);
    assert_eq!(guest.disk.bytes(), content());
}

#[test]
fn host_error_becomes_an_error_of_the_request() {
    let mut guest = DiskGuest::ready(&ALL);
    guest.disk.fail.store(true, std::sync::atomic::Ordering::Relaxed);
    let data = ranges(&guest, &[(8, 8, 0)]);
    for (kind, data) in [
        (0, vec![(DATA, 512, WRITE)]),
        (1, vec![(DATA, 512, 0)]),
        (4, vec![]),
        (spec::VIRTIO_BLK_T_DISCARD, data.to_vec()),
        (spec::VIRTIO_BLK_T_WRITE_ZEROES, data.to_vec()),
    ] {
        assert_eq!(guest.submit(kind, 0, &data).0, IO_ERROR, "{kind}");
    }
    assert_eq!((guest.figures().host_errors, guest.figures().io_errors), (5, 5));
    guest.disk.fail.store(false, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(guest.submit(1, 0, &[(DATA, 512, 0)]).0, OK);
}

/// Request that a driver may send, valid or not.
#[derive(Debug, Clone)]
struct Wild {
    kind: u32,
    sector: u64,
    /// Position (a page of memory, or outside), length, and whether the device may write.
    data: Vec<(u8, u32, bool)>,
    fill: u8,
}

fn wild() -> impl Strategy<Value = Wild> {
    let kind = prop_oneof![4 => Just(1u32), 2 => Just(0), 1 => Just(13), 1 => Just(11), 1 => 0u32..20];
    let sector = prop_oneof![6 => 0..SECTORS, 1 => SECTORS - 2..SECTORS + 3, 1 => any::<u64>()];
    let len = prop_oneof![6 => (1u32..5).prop_map(|n| n * 512), 1 => Just(16), 2 => 0u32..2000];
    let part = (0u8..40, len, prop::bool::weighted(0.3));
    (kind, sector, prop::collection::vec(part, 0..4), any::<u8>())
        .prop_map(|(kind, sector, data, fill)| Wild { kind, sector, data, fill })
}

impl Wild {
    /// Returns the address of a position. Positions 0 to 31 are pages of memory.
    fn place(place: u8) -> u64 {
        if place < 32 {
            DATA + u64::from(place) * 0x1000 % 0x1_f000
        } else {
            0x4_0000 + u64::from(place) * 0x800
        }
    }

    /// Applies the request to `disk` by an independent model, and returns the expected status.
    fn after(&self, guest: &DiskGuest, disk: &mut [u8]) -> u8 {
        let ordered = self.data.is_sorted_by_key(|(_, _, writable)| *writable);
        let parts = self.data.iter().filter(|(_, len, _)| *len > 0);
        let total: u64 = parts.clone().map(|(_, len, _)| u64::from(*len)).sum();
        let (any_in, any_out) = (parts.clone().any(|p| p.2), parts.clone().any(|p| !p.2));
        let inside = parts.clone().all(|(place, ..)| *place < 32);
        let fits = |sector: u64, bytes: u64| {
            bytes.is_multiple_of(512)
                && u128::from(sector) * 512 + u128::from(bytes) <= u128::from(SECTORS * 512)
        };
        if !ordered {
            return NONE;
        }
        let bytes = || -> Vec<u8> {
            let bytes =
                parts.clone().flat_map(|(place, len, _)| guest.data(Self::place(*place), *len as usize));
            bytes.collect()
        };
        match self.kind {
            0 if any_in && !any_out && fits(self.sector, total) && inside => OK,
            1 if any_out && !any_in && fits(self.sector, total) && inside => {
                let at = usize::try_from(self.sector * 512).unwrap();
                let bytes = bytes();
                disk[at..at + bytes.len()].copy_from_slice(&bytes);
                OK
            }
            4 => OK,
            8 if any_in && !any_out => 99,
            11 | 13 if any_out && !any_in && inside && total.is_multiple_of(16) && total <= 256 => {
                let bytes = bytes();
                let word = |bytes: &[u8]| u64::from(u32::from_le_bytes(bytes.try_into().unwrap()));
                let ranges: Vec<_> = bytes
                    .chunks(16)
                    .map(|range| {
                        (
                            u64::from_le_bytes(range[..8].try_into().unwrap()),
                            word(&range[8..12]),
                            word(&range[12..]),
                        )
                    })
                    .collect();
                for (sector, count, flags) in &ranges {
                    if *flags > u64::from(self.kind == 13) {
                        return UNSUPPORTED;
                    }
                    if *count > 1 << 21 || !fits(*sector, count * 512) {
                        return IO_ERROR;
                    }
                }
                for (sector, count, _) in ranges.iter().filter(|_| self.kind == 13) {
                    let at = usize::try_from(sector * 512).unwrap();
                    disk[at..at + usize::try_from(count * 512).unwrap()].fill(0);
                }
                OK
            }
            0 | 1 | 8 | 11 | 13 => IO_ERROR,
            _ => UNSUPPORTED,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// For any sequence of requests, valid ones are done, and nothing else changes the disk.
    #[test]
    fn disk_content_is_the_result_of_the_valid_writes(requests in prop::collection::vec(wild(), 1..40)) {
        let mut guest = DiskGuest::ready(&ALL);
        let mut disk = content();
        for (n, wild) in requests.iter().enumerate() {
            // Sectors, or sometimes ranges that are valid.
            let fill = if wild.kind >= 11 { [wild.fill % 66, 0, 0, 0, 0, 0, 0, 0, wild.fill % 5, 0, 0, 0, wild.fill >> 7, 0, 0, 0] }
                else { [wild.fill; 16] };
            for (place, len, writable) in &wild.data {
                if *place < 32 && !writable {
                    let bytes: Vec<u8> = fill.iter().copied().cycle().take(*len as usize).collect();
                    guest.memory.write_slice(&bytes, GuestAddress(Wild::place(*place))).unwrap();
                }
            }
            let want = wild.after(&guest, &mut disk);
            let data: Vec<_> = wild.data.iter()
                .map(|(place, len, writable)| (Wild::place(*place), *len, if *writable { WRITE } else { 0 }))
                .collect();
            let (answer, _) = guest.submit(wild.kind, wild.sector, &data);
            if want != 99 {
                prop_assert_eq!(answer, want, "request {}: {:?}", n, wild);
            }
            prop_assert!(guest.disk.bytes() == disk, "request {}: {:?}", n, wild);
        }
        prop_assert!(!guest.needs_reset());
    }
}
