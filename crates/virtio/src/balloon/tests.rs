//! Tests of the balloon through its transport.

use super::extension::MapError;
use super::*;
use crate::mmio::LoadError;
use crate::testing::{Call, Guest, SIZE, WRITE, layout};
use virtio_bindings::virtio_mmio as register;
use vm_memory::{Bytes, GuestAddress};
use vmferry_core::{PageSet, RegionId};
use vmferry_guest_abi::balloon::{DEFLATE, INFLATE, RANGES_QUEUE, report_entry};

const INFLATES: u16 = 0;
const DEFLATES: u16 = 1;
const STATS: u16 = 2;
const HINTS: u16 = 3;
const REPORTS: u16 = 4;
/// Feature bits of the specification.
const ALL: [u32; 5] = [1, 2, 3, 4, 5];
const OWN: [u32; 3] = [96, 97, 98];

fn guest() -> Guest {
    Guest::ready(&[ALL.to_vec(), OWN.to_vec()].concat(), &[0, 1, 2, 3, 4, RANGES_QUEUE])
}

fn numbers(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

fn ranges(what: u32, count: u32, ranges: &[(u64, u64)]) -> Vec<u8> {
    let words = ranges.iter().flat_map(|(gpa, len)| [gpa.to_le_bytes(), len.to_le_bytes()].concat());
    [what.to_le_bytes(), count.to_le_bytes()].concat().into_iter().chain(words).collect()
}

fn set_target(guest: &Guest, pages: u32) {
    guest.control.set_target(pages);
    guest.set(register::VIRTIO_MMIO_INTERRUPT_ACK, 3);
}

#[test]
fn pages_of_one_buffer_are_dropped_as_runs() {
    let mut guest = guest();
    guest.memory.write_slice(&[9; 0x2000], GuestAddress(0x2_8000)).unwrap();
    let part = guest.bytes(&numbers(&[42, 41, 40, 50, 41, 129, 128]));
    guest.send(INFLATES, &[part]);
    assert_eq!(guest.calls(), [Call::Drop(Why::Inflated, vec![(0, 40..43), (0, 50..51), (1, 0..2)])]);
    assert_eq!(guest.memory.read_obj::<u8>(GuestAddress(0x2_8000)).unwrap(), 0);
    assert_eq!(guest.used(INFLATES), 1);
    let figures = guest.control.figures();
    assert_eq!((figures.inflated_pages, figures.dropped_pages), (6, 6));

    let part = guest.bytes(&numbers(&[40, 41]));
    guest.send(DEFLATES, &[part]);
    assert_eq!((guest.calls(), guest.used(DEFLATES)), (vec![], 1));
    assert_eq!(guest.control.figures().deflated_pages, 2);
}

#[test]
fn malformed_page_numbers_are_counted_and_given_back() {
    let mut guest = guest();
    let part = guest.bytes(&numbers(&[64, 127, 160, u32::MAX, 5]));
    guest.send(INFLATES, &[part]);
    assert_eq!(guest.calls(), [Call::Drop(Why::Inflated, vec![(0, 5..6)])]);
    assert_eq!(guest.control.figures().outside, 4);
    for (part, what) in [
        ((0x1_4000, 6, 0), "half a page number"),
        ((0x1_4000, 4, WRITE), "writable by the device"),
        ((0x5_0000, 4, 0), "not in memory"),
        ((0x3_f000, 0x2000, 0), "across the end of a region"),
        ((0x1_4000, 0x10_0000, 0), "too many"),
        ((u64::MAX - 1, 4, 0), "at the end of all addresses"),
    ] {
        let before = (guest.control.figures().malformed, guest.used(INFLATES));
        guest.send(INFLATES, &[part]);
        let after = (guest.control.figures().malformed, guest.used(INFLATES));
        assert_eq!(after, (before.0 + 1, before.1 + 1), "{what}");
        assert_eq!(guest.calls(), [], "{what}");
    }
    assert!(!guest.needs_reset());
}

#[test]
fn ranges_are_dropped_on_inflate_and_read_as_zeros_on_deflate() {
    let mut guest = guest();
    let bytes = ranges(INFLATE, 3, &[(0x2_0000, 0x4000), (0x2_2000, 0x3000), (0x8_0000, 0x1000)]);
    // Two parts, split in the middle of a range.
    let (gpa, len, _) = guest.bytes(&bytes);
    guest.send(RANGES_QUEUE, &[(gpa, 13, 0), (gpa + 13, len - 13, 0)]);
    assert_eq!(guest.calls(), [Call::Drop(Why::Inflated, vec![(0, 32..37), (1, 0..1)])]);
    let part = guest.bytes(&ranges(DEFLATE, 1, &[(0x2_0000, 0x2000)]));
    guest.send(RANGES_QUEUE, &[part]);
    assert_eq!(guest.calls(), [Call::Zeros(vec![(0, 32..34)])]);
    assert_eq!(guest.used(RANGES_QUEUE), 2);

    for (bytes, what) in [
        (ranges(3, 1, &[(0x2_0000, 0x1000)]), "neither inflate nor deflate"),
        (ranges(INFLATE, 0, &[]), "no range"),
        (ranges(INFLATE, 2, &[(0x2_0000, 0x1000)]), "fewer than announced"),
        (ranges(INFLATE, 1, &[(0x2_0000, 0x1000), (0x2_1000, 0x1000)]), "more than announced"),
        (ranges(INFLATE, u32::MAX, &[(0x2_0000, 0x1000)]), "far fewer than announced"),
        (vec![1, 0, 0], "less than a header"),
        ([ranges(INFLATE, 1, &[(0x2_0000, 0x1000)]), vec![0]].concat(), "a byte too many"),
    ] {
        let before = guest.control.figures().malformed;
        let part = guest.bytes(&bytes);
        guest.send(RANGES_QUEUE, &[part]);
        assert_eq!((guest.calls(), guest.control.figures().malformed), (vec![], before + 1), "{what}");
    }
    let bad = ranges(
        INFLATE,
        5,
        &[
            (0x2_0001, 0x1000),
            (0x2_0000, 0),
            (0x3_f000, 0x2000),
            (u64::MAX - 0xfff, 0x1000),
            (0, u64::MAX - 0xfff),
        ],
    );
    let part = guest.bytes(&bad);
    guest.send(RANGES_QUEUE, &[part]);
    let figures = guest.control.figures();
    assert_eq!((guest.calls(), figures.unaligned, figures.outside), (vec![], 2, 3));
    assert_eq!(guest.used(RANGES_QUEUE), 10);
}

#[test]
fn queue_for_ranges_is_ignored_without_its_feature() {
    let mut guest = Guest::ready(&ALL, &[0, 1, 2, 3, 4, RANGES_QUEUE]);
    let part = guest.bytes(&ranges(INFLATE, 1, &[(0x2_0000, 0x1000)]));
    guest.send(RANGES_QUEUE, &[part]);
    assert_eq!((guest.calls(), guest.used(RANGES_QUEUE)), (vec![], 0));
}

#[test]
fn reports_are_dropped_unless_the_guest_relies_on_its_poison() {
    for (poison, negotiated, dropped) in [(0, true, true), (0xaa, true, false), (0xaa, false, true)] {
        let mut guest = Guest::new();
        let bits: Vec<u32> = [32].into_iter().chain(ALL).filter(|bit| negotiated || *bit != 4).collect();
        assert!(guest.negotiate(&bits));
        guest.set(register::VIRTIO_MMIO_CONFIG + 12, poison);
        guest.queue(REPORTS);
        guest.ok();
        guest.send(REPORTS, &[(0x1_8000, 0x4000, WRITE), (0x8_0000, 0x2_0000, WRITE)]);
        let want = Call::Drop(Why::Reported, vec![(0, 24..28), (1, 0..32)]);
        assert_eq!(guest.calls(), if dropped { vec![want] } else { vec![] }, "{poison} {negotiated}");
        assert_eq!(guest.control.figures().poisoned_pages, if dropped { 0 } else { 36 });
        assert_eq!(guest.used(REPORTS), 1);
    }
}

#[test]
fn reports_are_kept_while_reporting_is_off() {
    let mut guest = guest();
    let drops = |guest: &mut Guest| {
        guest.send(REPORTS, &[(0x1_8000, 0x4000, WRITE)]);
        let bytes = report_entry(0x2_0000, 2).to_le_bytes();
        guest.memory.write_slice(&bytes, GuestAddress(0x1_4000)).unwrap();
        guest.control.report(&guest.memory, 0x14);
        guest.calls().len()
    };
    assert!(guest.control.reporting());
    assert_eq!(drops(&mut guest), 2);
    guest.control.set_reporting(false);
    assert_eq!((drops(&mut guest), guest.used(REPORTS)), (0, 2), "the driver gets its buffer back at once");
    let figures = guest.control.figures();
    assert_eq!((figures.reported_pages, figures.ignored_pages, figures.dropped_pages), (16, 8, 8));
    // Pages that the guest puts into its balloon are dropped all the same.
    let part = guest.bytes(&numbers(&[42]));
    guest.send(INFLATES, &[part]);
    assert_eq!(guest.calls(), [Call::Drop(Why::Inflated, vec![(0, 42..43)])]);
    // The setting is the operator's. Neither a reset by the driver nor a migration changes it.
    let there = guest.moved();
    assert!(!there.control.reporting(), "reporting is on after a migration");
    there.set(register::VIRTIO_MMIO_STATUS, 0);
    assert!(!there.control.reporting(), "reporting is on after a reset");
    guest.control.set_reporting(true);
    assert_eq!(drops(&mut guest), 2);
    assert!(guest.moved().control.reporting());
}

#[test]
fn additions_do_not_change_the_serialized_state() {
    let mut saved = guest().device.save();
    let bytes = postcard::to_stdvec(&saved).unwrap();
    saved.device.additions.reporting_off = true;
    assert_eq!(postcard::to_stdvec(&saved).unwrap(), bytes);
}

#[test]
fn malformed_reports_drop_nothing_outside_memory() {
    let mut guest = guest();
    guest.send(REPORTS, &[(0x1_8000, 0x1000, 0)]);
    assert_eq!((guest.calls(), guest.control.figures().malformed), (vec![], 1));
    guest.send(
        REPORTS,
        &[
            (0x1_8800, 0x1000, WRITE),
            (0x3_f000, 0x2000, WRITE),
            (0x1_9000, 0, WRITE),
            (0x3_f000, 0x1000, WRITE),
        ],
    );
    let figures = guest.control.figures();
    assert_eq!((figures.unaligned, figures.outside), (2, 1));
    assert_eq!(guest.calls(), [Call::Drop(Why::Reported, vec![(0, 63..64)])]);
    guest.host.refuse.store(true, std::sync::atomic::Ordering::Relaxed);
    guest.send(REPORTS, &[(0x1_8000, 0x1000, WRITE)]);
    assert_eq!((guest.control.figures().host_errors, guest.used(REPORTS)), (1, 3));
}

#[test]
fn guest_that_reports_its_rings_as_free_needs_a_reset() {
    let mut guest = guest();
    guest.send(REPORTS, &[(0, 0x2_0000, WRITE)]);
    assert_eq!(guest.calls(), [Call::Drop(Why::Reported, vec![(0, 0..32)])]);
    // The driver's index now reads as 0 while the device expects 1. This means 65535 buffers, which
    // no ring has.
    assert!(guest.needs_reset());
}

#[test]
fn queues_are_found_in_every_numbering_scheme() {
    // (features, queue of reports for a driver that counts the accepted features)
    for (bits, counted) in
        [(vec![5], 2), (vec![1, 5], 3), (vec![3, 5], 3), (vec![1, 3, 5], 4), (vec![3, 4, 5, 96], 3)]
    {
        for index in [counted, REPORTS] {
            let others: Vec<u16> = if index == counted {
                (2..counted).collect()
            } else {
                [(1, STATS), (3, HINTS)]
                    .iter()
                    .filter(|(bit, _)| bits.contains(bit))
                    .map(|(_, q)| *q)
                    .collect()
            };
            let mut guest = Guest::ready(&bits, &[vec![0, 1], others, vec![index]].concat());
            guest.send(index, &[(0x1_8000, 0x1000, WRITE)]);
            assert_eq!(guest.calls(), [Call::Drop(Why::Reported, vec![(0, 24..25)])], "{bits:?} at {index}");
        }
    }
}

/// Sends the driver's announcement of the command that it answers.
fn command(guest: &mut Guest, command: u32) {
    let part = guest.bytes(&command.to_le_bytes());
    guest.send(HINTS, &[part]);
}

#[test]
fn only_hints_for_the_current_command_are_accepted() {
    let mut guest = guest();
    assert_eq!(guest.config(8), 0);
    guest.control.done();
    guest.control.stop();
    assert_eq!(guest.config(8), 0, "there is no request");
    let hint = |guest: &mut Guest, page: u64| guest.send(HINTS, &[(page << 12, 0x2000, WRITE)]);
    hint(&mut guest, 24);
    assert_eq!((guest.calls(), guest.control.figures().stale_hints), (vec![], 1), "before any command");

    let first = guest.control.request_hints().unwrap();
    assert_eq!((first, guest.config(8)), (2, 2));
    command(&mut guest, first);
    hint(&mut guest, 24);
    assert_eq!(guest.calls(), [Call::Hint(2, vec![(0, 24..26)])]);
    let second = guest.control.request_hints().unwrap();
    hint(&mut guest, 26);
    command(&mut guest, first);
    hint(&mut guest, 28);
    assert_eq!((guest.calls(), guest.control.figures().stale_hints), (vec![], 4), "late");
    command(&mut guest, second);
    hint(&mut guest, 30);
    command(&mut guest, 0);
    assert_eq!(guest.calls(), [Call::Hint(3, vec![(0, 30..32)]), Call::End(3)]);
    hint(&mut guest, 32);
    command(&mut guest, 1);
    assert_eq!(guest.calls(), [], "after its own end");

    guest.control.stop();
    assert_eq!(guest.config(8), 0);
    guest.control.done();
    assert_eq!(guest.config(8), 1);
    let generation = guest.get(register::VIRTIO_MMIO_CONFIG_GENERATION);
    guest.control.done();
    assert_eq!(
        guest.get(register::VIRTIO_MMIO_CONFIG_GENERATION),
        generation,
        "a second end changes the configuration"
    );
    assert_eq!(guest.control.request_hints(), Ok(4), "an ID is used twice");
    assert_eq!(guest.used(HINTS), 11);
}

#[test]
fn command_and_hints_may_be_one_buffer() {
    let mut guest = guest();
    let id = guest.control.request_hints().unwrap();
    let part = guest.bytes(&id.to_le_bytes());
    guest.send(HINTS, &[part, (0x1_8000, 0x1000, WRITE), (0x1_9000, 0x1000, WRITE)]);
    assert_eq!(guest.calls(), [Call::Hint(2, vec![(0, 24..26)])]);
    let part = guest.bytes(&[0; 5]);
    guest.send(HINTS, &[(0x1_a000, 0x1000, WRITE), part, (0x1_b000, 0x1000, WRITE)]);
    assert_eq!(guest.calls(), [Call::Hint(2, vec![(0, 26..27)])], "hints up to the malformed part");
    assert_eq!(guest.control.figures().malformed, 1);
    guest.send(HINTS, &[(0x3_f000, 0x2000, WRITE), (0x1_8001, 0x1000, WRITE), (0x5_0000, 4, 0)]);
    let figures = guest.control.figures();
    assert_eq!((figures.outside, figures.unaligned, figures.malformed), (1, 1, 2));
    let without = Guest::ready(&[1], &[0]);
    assert_eq!(without.control.request_hints(), Err(HintError::NoDriver));
}

#[test]
fn statistics_are_kept_until_new_ones_are_wanted() {
    let mut guest = guest();
    let entry = |tag: u16, value: u64| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat();
    let part = guest.bytes(&[entry(4, 700), entry(5, 1000)].concat());
    guest.send(STATS, &[part]);
    assert_eq!((guest.used(STATS), guest.control.stats().get("free")), (0, Some(700)));
    assert_eq!(guest.interrupts(), 0);
    assert_eq!(guest.control.want_stats(), Some(STATS));
    guest.device.notify(&guest.memory, STATS);
    assert_eq!((guest.used(STATS), guest.interrupts()), (1, 1));
    guest.device.notify(&guest.memory, STATS);
    assert_eq!(guest.used(STATS), 1, "no buffer to give back");
    let part = guest.bytes(&entry(4, 600));
    guest.send(STATS, &[part]);
    assert_eq!((guest.control.stats().get("free"), guest.control.stats().get("total")), (Some(600), None));
    // A second buffer breaks the rules: the first is given back.
    guest.send(STATS, &[(0x1_4000, 7, 0)]);
    assert_eq!((guest.used(STATS), guest.control.figures().malformed), (2, 1));
    assert_eq!(guest.control.stats().get("free"), Some(600));

    let saved = guest.device.save();
    assert_eq!(saved.device.held, Some(2));
    let there = guest.moved();
    assert_eq!(there.control.stats().get("free"), Some(600));
    assert_eq!(there.control.want_stats(), Some(STATS));
    there.device.notify(&there.memory, STATS);
    assert_eq!(there.used(STATS), 3);
    assert_eq!(Guest::ready(&[3], &[0]).control.want_stats(), None);
}

#[test]
fn driver_cannot_change_the_target() {
    let guest = guest();
    set_target(&guest, 20);
    assert_eq!((guest.config(0), guest.interrupts()), (20, 1));
    guest.control.set_target(20);
    assert_eq!(guest.interrupts(), 1, "no change");
    guest.control.set_target(u32::MAX);
    assert_eq!(guest.config(0), 96, "limited to the guest's pages");
    for (offset, value) in [(0, 1), (4, 15), (8, 7), (12, 9)] {
        guest.set(register::VIRTIO_MMIO_CONFIG + offset, value);
    }
    assert_eq!([0, 4, 8, 12].map(|at| guest.config(at)), [96, 15, 0, 9]);
    guest.set(register::VIRTIO_MMIO_STATUS, 0);
    assert_eq!([0, 4, 8, 12].map(|at| guest.config(at)), [96, 0, 0, 0], "only the target survives a reset");
}

#[test]
fn pages_that_a_guest_takes_back_differ_from_those_that_the_host_returns() {
    let mut guest = guest();
    let actual = register::VIRTIO_MMIO_CONFIG + 4;
    assert_eq!(guest.control.unmet_for(), None, "nothing is requested");
    set_target(&guest, 2);
    assert!(guest.control.unmet_for().is_some());
    let part = guest.bytes(&numbers(&[10, 11, 12]));
    guest.send(INFLATES, &[part]);
    guest.set(actual, 3);
    assert_eq!(guest.control.unmet_for(), None, "the balloon is large enough");

    let deflate = |guest: &mut Guest, page: u32, size: u32| {
        let part = guest.bytes(&numbers(&[page]));
        guest.send(DEFLATES, &[part]);
        guest.set(actual, size);
        let figures = guest.control.figures();
        (figures.deflated_pages, figures.taken_back_pages)
    };
    assert_eq!(deflate(&mut guest, 10, 2), (1, 0), "the host requested a smaller balloon");
    assert_eq!(deflate(&mut guest, 11, 1), (2, 1), "the guest is short of memory");
    let part = guest.bytes(&ranges(DEFLATE, 1, &[(0xc000, 0x1000)]));
    guest.send(RANGES_QUEUE, &[part]);
    assert_eq!(guest.control.figures().taken_back_pages, 2, "by ranges as well");
    assert!(guest.control.unmet_for().is_some(), "the balloon is smaller than requested again");
    guest.set(register::VIRTIO_MMIO_STATUS, 0);
    assert_eq!(guest.control.unmet_for(), None, "no driver is ready");
}

#[test]
fn poison_is_known_only_if_the_driver_accepted_it() {
    for (bits, poison) in [(vec![4, 5], Some(7)), (vec![5], None)] {
        let guest = Guest::ready(&bits, &[REPORTS]);
        guest.set(register::VIRTIO_MMIO_CONFIG + 12, 7);
        assert_eq!(guest.control.poison(), poison);
    }
}

#[test]
fn list_of_blocks_is_reported_by_hypercall() {
    let guest = guest();
    let entries = [
        report_entry(0x2_0000, 2),
        0,
        report_entry(0x2_4000, 0),
        report_entry(0x3_c000, 3),
        report_entry(0x8_0000, 4),
        13,
        report_entry(0x8_8000, 10),
    ];
    let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    guest.memory.write_slice(&bytes, GuestAddress(0x1_4000)).unwrap();
    guest.control.report(&guest.memory, 0x14);
    // The third entry has an invalid order, and the last one ends outside memory.
    assert_eq!(guest.calls(), [Call::Drop(Why::Reported, vec![(0, 32..37), (1, 0..16)])]);
    let figures = guest.control.figures();
    assert_eq!((figures.malformed, figures.reports), (3, 1));
    for page in [64, u32::MAX] {
        guest.control.report(&guest.memory, page);
    }
    assert_eq!((guest.calls(), guest.control.figures().malformed), (vec![], 5));
    let without = Guest::ready(&ALL, &[0]);
    without.memory.write_slice(&bytes, GuestAddress(0x1_4000)).unwrap();
    without.control.report(&without.memory, 0x14);
    assert_eq!(without.calls(), []);
}

fn publish(guest: &Guest, gpa: u64, pages: u64) {
    guest.device.write(&guest.memory, 0x140, &pages.to_le_bytes());
    let [low, high] = [gpa & u64::from(u32::MAX), gpa >> 32].map(|half| u32::try_from(half).unwrap());
    guest.set(0x148, low);
    guest.set(0x14c, high);
}

#[test]
fn map_of_the_guest_is_read_across_holes() {
    let guest = guest();
    let mut free = PageSet::empty(&layout());
    assert_eq!(guest.control.read_map(&guest.memory, &mut free), Err(MapError::None));
    publish(&guest, 0x1_4000, 86);
    // 30 pages, a hole of 10, 24 pages, a hole, 32 pages. Bits 29, 30, 53, 54 and 85 are set, and
    // one after the end.
    let mut bits = [0u8; 16];
    for bit in [29usize, 30, 53, 54, 85, 86] {
        bits[bit / 8] |= 1 << (bit % 8);
    }
    guest.memory.write_slice(&bits, GuestAddress(0x1_4000)).unwrap();
    assert_eq!(guest.control.read_map(&guest.memory, &mut free), Ok(5));
    let pages = |region| free.region(RegionId(region)).unwrap().bits().collect::<Vec<_>>();
    assert_eq!((pages(0), pages(1)), (vec![29, 40, 63], vec![0, 31]));

    for (gpa, pages) in [
        (0x1_4000, 85),
        (0x1_4000, 96),
        (0x1_4008, 86),
        (0x4_0000, 86),
        (u64::MAX - 0xfff, 86),
        (0x1_4000, u64::MAX),
    ] {
        publish(&guest, gpa, pages);
        let read = guest.control.read_map(&guest.memory, &mut free);
        assert_eq!(read, Err(MapError::Misfit { gpa, pages }), "{gpa:#x} {pages}");
    }
    publish(&guest, 0x1_4000, 86);
    guest.set(register::VIRTIO_MMIO_CONFIG + 12, 1);
    assert_eq!(guest.control.read_map(&guest.memory, &mut free), Err(MapError::Poison));
    let there = guest.moved();
    assert_eq!(there.control.map(), guest.control.map());
    publish(&guest, 0, 86);
    assert_eq!(guest.control.map(), None, "withdrawn");
    let without = Guest::ready(&ALL, &[0]);
    publish(&without, 0x1_4000, 86);
    assert_eq!(without.control.map(), None, "without the feature");
}

#[test]
fn map_address_that_is_half_written_is_not_used_after_a_migration() {
    let in_use = |guest: &Guest| guest.control.map().map(|map| (map.gpa, map.pages));
    let halves = |gpa: u64| [gpa & u64::from(u32::MAX), gpa >> 32].map(|half| u32::try_from(half).unwrap());
    let [low, high] = halves(0x1_0000_5000);
    for first in [None, Some((0x1_4000, 86))] {
        let guest = guest();
        if let Some((gpa, pages)) = first {
            publish(&guest, gpa, pages);
        }
        guest.device.write(&guest.memory, 0x140, &96u64.to_le_bytes());
        let there = guest.moved();
        assert_eq!(in_use(&there), first, "a number of pages without an address is used");
        there.set(0x148, low);
        assert_eq!(in_use(&there), first, "the source uses half of an address");
        // The guest moves twice between its two writes.
        let there = there.moved().moved();
        assert_eq!(in_use(&there), first, "half of an address is used");
        there.set(0x14c, high);
        assert_eq!(in_use(&there), Some((0x1_0000_5000, 96)));
        assert_eq!(there.device.save().device.additions, BalloonAdditions::default());
        assert_eq!(in_use(&there.moved()), Some((0x1_0000_5000, 96)));
        // A withdrawn map stays withdrawn.
        publish(&there, 0, 86);
        there.set(0x148, low);
        assert_eq!(in_use(&there.moved()), None);
    }
}

#[test]
fn map_fits_only_if_it_can_be_read() {
    let guest = guest();
    assert_eq!(guest.control.check_map(&guest.memory), Err(MapError::None));
    let fits = |gpa, pages| {
        publish(&guest, gpa, pages);
        guest.control.check_map(&guest.memory)
    };
    assert_eq!(fits(0x1_4000, 86), Ok(()));
    for (gpa, pages) in [(0x1_4000, 85), (0x1_4008, 86), (0x4_0000, 86), (u64::MAX - 0xfff, 86)] {
        assert_eq!(fits(gpa, pages), Err(MapError::Misfit { gpa, pages }), "{gpa:#x} {pages}");
    }
    publish(&guest, 0x1_4000, 86);
    guest.set(register::VIRTIO_MMIO_CONFIG + 12, 1);
    assert_eq!(guest.control.check_map(&guest.memory), Err(MapError::Poison));
}

#[test]
fn map_published_before_driver_is_ready_migrates() {
    let mut guest = Guest::new();
    assert!(guest.negotiate(&[32, 97]));
    publish(&guest, 0x1_4000, 86);
    let there = guest.moved();
    assert_eq!(there.control.map(), None, "the driver is not ready");
    there.ok();
    assert_eq!(there.control.map().map(|map| (map.gpa, map.pages)), Some((0x1_4000, 86)));
}

#[test]
fn device_without_the_extension_is_that_of_the_specification() {
    let mut guest = Guest::with_extension(false);
    let bank = |guest: &Guest, bank| {
        guest.set(register::VIRTIO_MMIO_DEVICE_FEATURES_SEL, bank);
        guest.get(register::VIRTIO_MMIO_DEVICE_FEATURES)
    };
    assert_eq!([2, 3].map(|n| bank(&guest, n)), [0, 0]);
    for bit in OWN {
        assert!(!guest.negotiate(&[32, bit]), "bit {bit} is not offered");
    }
    guest.set(register::VIRTIO_MMIO_QUEUE_SEL, RANGES_QUEUE.into());
    assert_eq!(guest.get(register::VIRTIO_MMIO_QUEUE_NUM_MAX), 0);
    guest.start(&ALL, &[0, 1, 2, 3, 4]);
    publish(&guest, 0x1_4000, 86);
    assert_eq!((guest.config(0x40), guest.config(0x48), guest.control.map()), (0, 0, None));
    guest.memory.write_slice(&report_entry(0x2_0000, 2).to_le_bytes(), GuestAddress(0x1_4000)).unwrap();
    guest.control.report(&guest.memory, 0x14);
    assert_eq!(guest.calls(), []);
    guest.send(REPORTS, &[(0x1_8000, 0x1000, WRITE)]);
    assert_eq!(guest.calls(), [Call::Drop(Why::Reported, vec![(0, 24..25)])]);
}

#[test]
fn state_with_the_extension_is_refused_by_a_device_without_it() {
    let load = |from: &Guest| {
        let there = Guest::with_extension(false);
        there.device.load(&there.memory, &from.device.save()).map_err(|error| error.to_string())
    };
    let guest = Guest::ready(&ALL, &[0, 1, 2, 3, 4]);
    assert_eq!(load(&guest), Ok(()), "a driver of the specification does not use the extension");
    guest.set(0x148, 0x5000);
    assert!(load(&guest).unwrap_err().contains("this balloon has no extension"));
    publish(&guest, 0x1_4000, 86);
    assert!(load(&guest).unwrap_err().contains("this balloon has no extension"));
    for bit in OWN {
        let guest = Guest::ready(&[bit], &[0, 1]);
        assert!(load(&guest).unwrap_err().contains("features"), "bit {bit}");
    }
    let guest = Guest::ready(&ALL, &[0, RANGES_QUEUE]);
    assert_eq!(load(&guest), Err(LoadError::Queues.to_string()));
}

#[test]
fn request_for_hints_ends_with_a_migration() {
    let mut guest = guest();
    let id = guest.control.request_hints().unwrap();
    command(&mut guest, id);
    guest.set(register::VIRTIO_MMIO_INTERRUPT_ACK, 3);
    let there = guest.moved();
    assert_eq!((there.config(8), there.interrupts()), (1, 0));
    there.device.resumed(crate::device::Resume::Moved).expect("a balloon needs nothing");
    assert_eq!((there.interrupts(), there.get(register::VIRTIO_MMIO_INTERRUPT_STATUS)), (1, 2));
    assert_eq!(there.control.request_hints(), Ok(id + 1), "an earlier ID is used again");
    // If the guest stays on the source after all, it continues its answer.
    guest.send(HINTS, &[(0x1_8000, 0x1000, WRITE)]);
    assert_eq!(guest.calls(), [Call::Hint(id, vec![(0, 24..25)])]);
}

#[test]
fn a_full_ring_is_served_with_one_interrupt() {
    let mut guest = guest();
    for n in 0..u64::from(SIZE) {
        guest.offer(REPORTS, &[(0x1_8000 + 0x1000 * n, 0x1000, WRITE)]);
    }
    guest.notify(REPORTS);
    assert_eq!((guest.used(REPORTS), guest.interrupts()), (SIZE, 1));
}
