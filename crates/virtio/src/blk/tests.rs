//! Tests of the disk with a driver and a real file.

mod answers;
mod attended;
mod quiesce;

use super::request::{Limits, Op, Request};
use super::run::Job;
use super::testing::{ANSWER, DATA, DiskCall, DiskGuest, HEADER, NONE, SECTORS, content, options, until};
use super::*;
use crate::testing::{NEXT, SIZE, WRITE, rings};
use virtio_bindings::virtio_blk as spec;
use virtio_bindings::virtio_mmio as register;
use vm_memory::{Bytes, GuestAddress};

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

const FLUSH: u32 = spec::VIRTIO_BLK_F_FLUSH;
const WCE: u32 = spec::VIRTIO_BLK_F_CONFIG_WCE;
const DISCARD: u32 = spec::VIRTIO_BLK_F_DISCARD;
const ZEROES: u32 = spec::VIRTIO_BLK_F_WRITE_ZEROES;
const ALL: [u32; 4] = [FLUSH, WCE, DISCARD, ZEROES];

fn features(guest: &DiskGuest) -> u32 {
    guest.set(register::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
    guest.get(register::VIRTIO_MMIO_DEVICE_FEATURES)
}

#[test]
fn configuration_describes_the_device() {
    let guest = DiskGuest::new(options(false), 1);
    assert_eq!(guest.get(register::VIRTIO_MMIO_DEVICE_ID), 2);
    let bits = |bits: &[u32]| bits.iter().fold(3 << 28, |all, bit| all | 1 << bit);
    assert_eq!(features(&guest), bits(&[2, 6, 9, 10, 11, 13, 14]));
    // Capacity, most segments, block size, and the discard limits.
    let words = [0, 4, 12, 20, 36, 40, 44, 48, 52].map(|at| guest.config(at));
    assert_eq!(words, [64, 0, 254, 512, 1 << 21, 16, 8, 1 << 21, 16]);
    // Topology: eight blocks in a physical one, none skipped, eight at least. Then the cache, one
    // queue, and zeros that unmap.
    assert_eq!([24, 32, 56].map(|at| guest.config(at)), [0x0008_0003, 0x0001_0001, 1]);
    assert_eq!(guest.config(60), 0, "zeros after the configuration");
    let guest = DiskGuest::new(options(true), 1);
    assert_eq!(features(&guest), bits(&[2, 5, 6, 9, 10, 11]));
}

#[test]
fn sectors_are_read_and_written_in_pieces_of_any_size() {
    let mut guest = DiskGuest::ready(&ALL);
    let was = content();
    // One of the pieces is in the second region.
    let pieces = [(DATA, 100, WRITE), (0x8_0000, 400, WRITE), (DATA + 0x1000, 1036, WRITE)];
    assert_eq!(guest.submit(0, 5, &pieces), (OK, 1537));
    let read = [guest.data(DATA, 100), guest.data(0x8_0000, 400), guest.data(DATA + 0x1000, 1036)].concat();
    assert_eq!(read, was[5 * 512..8 * 512]);

    let new: Vec<u8> = (0..1024u32).map(|n| (n * 31 % 256).to_le_bytes()[0]).collect();
    guest.memory.write_slice(&new[..1000], GuestAddress(DATA)).unwrap();
    guest.memory.write_slice(&new[1000..], GuestAddress(DATA + 0x2000)).unwrap();
    let pieces = [(DATA, 1000, 0), (DATA + 0x2000, 24, 0)];
    assert_eq!(guest.submit(1, 62, &pieces), (OK, 1));
    let mut want = was;
    want[62 * 512..].copy_from_slice(&new);
    assert_eq!(guest.disk.bytes(), want);
    let BlkFigures { reads, read_bytes, writes, written_bytes, io_errors, .. } = guest.figures();
    assert_eq!([reads, read_bytes, writes, written_bytes, io_errors], [1, 1536, 1, 1024, 0]);
    assert_eq!(guest.interrupts(), 2);
}

#[test]
fn header_and_status_may_be_split_and_joined_by_the_driver() {
    let mut guest = DiskGuest::ready(&ALL);
    let was = content();
    // A header in three pieces, and data and status in one.
    let (at, _, _) = guest.header(0, spec::VIRTIO_BLK_T_IN, 9);
    guest.answer(0);
    let parts = [(at, 3, 0), (at + 3, 0, 0), (at + 3, 12, 0), (at + 15, 1, 0), (ANSWER - 512, 513, WRITE)];
    assert_eq!(guest.submit_raw(&parts), (OK, 513));
    assert_eq!(guest.data(ANSWER - 512, 512), was[9 * 512..10 * 512]);
    // Header and data in one, and a status at the end of a part.
    guest.header(0, spec::VIRTIO_BLK_T_OUT, 3);
    guest.memory.write_slice(&[0x5a; 512], GuestAddress(HEADER + 16)).unwrap();
    let parts = [(HEADER, 528, 0), guest.answer(0), (ANSWER + 9, 0, WRITE)];
    assert_eq!(guest.submit_raw(&parts), (OK, 1));
    assert_eq!(guest.disk.bytes()[3 * 512..4 * 512], [0x5a; 512]);
}

#[test]
fn id_is_cut_to_the_size_of_the_buffer() {
    let mut guest = DiskGuest::ready(&ALL);
    assert_eq!(guest.submit(8, 0, &[(DATA, 4, WRITE), (DATA + 100, 16, WRITE)]), (OK, 21));
    assert_eq!(guest.data(DATA, 4), b"disk");
    assert_eq!(guest.data(DATA + 100, 16), b"7\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(guest.submit(8, 0, &[(DATA, 3, WRITE)]), (OK, 4));
    assert_eq!(guest.submit(8, 0, &[(DATA, 64, WRITE)]), (OK, 20), "the length ends before a gap");
}

fn ranges(guest: &DiskGuest, ranges: &[(u64, u32, u32)]) -> [(u64, u32, u16); 1] {
    let bytes: Vec<u8> = ranges
        .iter()
        .flat_map(|(sector, count, flags)| {
            [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
        })
        .collect();
    guest.memory.write_slice(&bytes, GuestAddress(DATA)).unwrap();
    [(DATA, u32::try_from(bytes.len()).unwrap(), 0)]
}

#[test]
fn ranges_are_discarded_and_filled_with_zeros() {
    let mut guest = DiskGuest::ready(&ALL);
    let (discard, zeroes) = (spec::VIRTIO_BLK_T_DISCARD, spec::VIRTIO_BLK_T_WRITE_ZEROES);
    let data = ranges(&guest, &[(8, 8, 0), (60, 4, 0)]);
    assert_eq!(guest.submit(discard, 0, &data), (OK, 1));
    assert_eq!(guest.disk.calls(), [DiskCall::Discard(4096, 4096), DiskCall::Discard(60 * 512, 2048)]);
    let data = ranges(&guest, &[(1, 2, 0), (10, 1, 1)]);
    assert_eq!(guest.submit(zeroes, 0, &data), (OK, 1));
    assert_eq!(guest.disk.calls(), [DiskCall::Zeroes(512, 1024, false), DiskCall::Zeroes(5120, 512, true)]);
    let mut want = content();
    want[512..1536].fill(0);
    want[5120..5632].fill(0);
    assert_eq!(guest.disk.bytes(), want);

    // The first range is valid, but all ranges are checked before any is processed.
    for (kind, bad, answer) in [
        (discard, (8, 8, 1), UNSUPPORTED),
        (discard, (8, 8, 2), UNSUPPORTED),
        (zeroes, (8, 8, 2), UNSUPPORTED),
        (zeroes, (8, 8, 1 << 31), UNSUPPORTED),
        (discard, (63, 2, 0), IO_ERROR),
        (zeroes, (u64::MAX, 2, 0), IO_ERROR),
        (zeroes, (0, u32::MAX, 0), IO_ERROR),
        (zeroes, (65, 0, 0), IO_ERROR),
    ] {
        let data = ranges(&guest, &[(0, 8, 0), bad]);
        assert_eq!(guest.submit(kind, 0, &data), (answer, 1), "{kind} {bad:?}");
        assert_eq!(guest.disk.calls(), [], "{kind} {bad:?}");
    }
    for len in [0, 15, 17, 16 * 17] {
        let parts = [guest.header(0, zeroes, 0), (DATA, len, 0), guest.answer(0)];
        assert_eq!(guest.submit_raw(&parts).0, IO_ERROR, "{len}");
    }
    assert_eq!(guest.disk.bytes(), want);

    let mut guest = DiskGuest::ready(&[FLUSH]);
    let data = ranges(&guest, &[(8, 8, 0)]);
    assert_eq!(guest.submit(discard, 0, &data).0, UNSUPPORTED, "not negotiated");
    assert_eq!(guest.submit(zeroes, 0, &data).0, UNSUPPORTED, "not negotiated");
}

#[test]
fn writes_wait_for_stable_storage_unless_driver_supports_flushes() {
    let cache = |guest: &DiskGuest| guest.config(32) & 0xff;
    let write = |guest: &mut DiskGuest| {
        assert_eq!(guest.submit(1, 0, &[(DATA, 512, 0)]).0, OK);
        guest.disk.calls()
    };
    assert_eq!(write(&mut DiskGuest::ready(&[])), [DiskCall::Flush], "the driver does not support flushes");
    let mut guest = DiskGuest::ready(&[FLUSH]);
    assert_eq!(write(&mut guest), []);
    assert_eq!(guest.submit(4, 0, &[]), (OK, 1));
    assert_eq!(guest.disk.calls(), [DiskCall::Flush]);
    // The driver switches the cache mode in both directions, and the choice migrates.
    let mut guest = DiskGuest::ready(&ALL);
    assert_eq!((write(&mut guest), cache(&guest)), (vec![], 1));
    guest.device.write(&guest.memory, 0x100 + 32, &[0]);
    assert_eq!((write(&mut guest), cache(&guest)), (vec![DiskCall::Flush], 0));
    let data = ranges(&guest, &[(0, 1, 0)]);
    assert_eq!(guest.submit(spec::VIRTIO_BLK_T_WRITE_ZEROES, 0, &data).0, OK);
    assert_eq!(guest.disk.calls().last(), Some(&DiskCall::Flush));
    assert!(guest.device.quiesce(std::time::Instant::now()));
    let there = guest.moved();
    assert_eq!(cache(&there), 0);
    guest.device.resumed(crate::device::Resume::Again).unwrap();
    guest.device.write(&guest.memory, 0x100 + 32, &[1]);
    assert_eq!(write(&mut guest), []);
    // A reset restores the default mode.
    guest.device.write(&guest.memory, 0x100 + 32, &[0]);
    guest.set(register::VIRTIO_MMIO_STATUS, 0);
    assert_eq!(cache(&guest), 1);
}

/// Pages are marked after the host has written them, not before, and also if the host then failed,
/// because it may have written some.
#[test]
fn pages_are_marked_after_the_host_has_written_them() {
    use vm_memory::bitmap::{AtomicBitmap, Bitmap, BitmapSlice};
    use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

    #[derive(Debug)]
    struct Unmarked(bool);
    impl Disk for Unmarked {
        fn read<B: BitmapSlice>(&self, _: u64, into: &[VolatileSlice<'_, B>]) -> io::Result<()> {
            assert!(into.iter().all(|slice| !slice.bitmap().dirty_at(0)), "marked before it was written");
            if self.0 { Ok(()) } else { Err(io::ErrorKind::Other.into()) }
        }
        fn write<B: BitmapSlice>(&self, _: u64, _: &[VolatileSlice<'_, B>]) -> io::Result<()> {
            unreachable!()
        }
        fn flush(&self) -> io::Result<()> {
            unreachable!()
        }
        fn discard(&self, _: u64, _: u64) -> io::Result<()> {
            unreachable!()
        }
        fn write_zeroes(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
            unreachable!()
        }
    }
    for fine in [true, false] {
        let memory: GuestMemoryMmap<AtomicBitmap> =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x8000)]).unwrap();
        let part = |gpa, len| crate::queue::Part { gpa, len, writable: true };
        let request = Request {
            head: 0,
            op: Op::Read,
            sector: 0,
            data: vec![part(0x1ff0, 0x20), part(0x4000, 992)],
            status: 0x6000,
            writable: 1024,
        };
        let limits = Limits { sectors: 64, read_only: false, discard: true, zeroes: true };
        let metrics = super::metrics::Metrics::default();
        let job = Job { disk: &Unmarked(fine), limits, id: [0; 20], write_through: false, metrics: &metrics };
        job.run(&request, &memory);
        let region = memory.iter().next().unwrap();
        let marked: Vec<_> = (0..8).filter(|page| region.bitmap().dirty_at(page * 0x1000)).collect();
        assert_eq!(marked, [1, 2, 4, 6], "{fine}");
    }
}
