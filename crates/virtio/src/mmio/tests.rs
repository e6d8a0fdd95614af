//! Tests of the transport with the balloon as its device.

use super::*;
use crate::balloon::{BalloonSaved, feature};
use crate::testing::{AVAIL, Call, Guest, INDIRECT, NEXT, SIZE, USED, WRITE, rings};
use vm_memory::Bytes;

const REPORTS: u16 = 4;
const ALL: [u32; 5] = [1, 2, 3, 4, 5];

fn reporter() -> Guest {
    Guest::ready(&ALL, &[0, 1, 2, 3, 4])
}

#[test]
fn configuration_describes_the_device() {
    let guest = Guest::new();
    let ids = [0, 4, 8, 12].map(|at| guest.get(at));
    assert_eq!(ids, [0x7472_6976, 2, 5, VENDOR]);
    let banks: Vec<_> = (0..6)
        .map(|select| {
            guest.set(register::VIRTIO_MMIO_DEVICE_FEATURES_SEL, select);
            guest.get(register::VIRTIO_MMIO_DEVICE_FEATURES)
        })
        .collect();
    assert_eq!(banks, [0x3000_003e, 1, 0, 7, 0, 0]);
    guest.set(register::VIRTIO_MMIO_SHM_SEL, 0);
    assert_eq!(guest.get(register::VIRTIO_MMIO_SHM_LEN_LOW), u32::MAX);
    let sizes: Vec<_> = (0..20)
        .map(|index| {
            guest.set(register::VIRTIO_MMIO_QUEUE_SEL, index);
            guest.get(register::VIRTIO_MMIO_QUEUE_NUM_MAX)
        })
        .collect();
    let there: Vec<_> = (0..20).filter(|index| sizes[*index] == 256).collect();
    assert_eq!(there, [0, 1, 2, 3, 4, 16]);
    assert_eq!(sizes.iter().filter(|size| **size == 0).count(), 14);
}

#[test]
fn invalid_features_are_refused() {
    let mut guest = Guest::new();
    assert!(!guest.negotiate(&[1]), "without VERSION_1");
    assert!(!guest.negotiate(&[32, 0]), "MUST_TELL_HOST is not offered");
    assert!(!guest.negotiate(&[32, 70]), "a bank without offered features");
    guest.set(register::VIRTIO_MMIO_STATUS, 0xf);
    assert_eq!(guest.get(register::VIRTIO_MMIO_STATUS), 3, "DRIVER_OK is refused as well");
    assert!(guest.negotiate(&[32, 28, 29, 96, 97, 98]));
    // Features cannot change after the agreement.
    guest.set(register::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 0);
    guest.set(register::VIRTIO_MMIO_DRIVER_FEATURES, u32::MAX);
    guest.ok();
    assert_eq!(guest.get(register::VIRTIO_MMIO_STATUS), 0xf);
    assert_eq!(guest.control.features(), 1 << 32 | 3 << 28 | 7 << 96);
    // Single bits cannot be cleared, and a driver cannot set the device's own bits.
    guest.set(register::VIRTIO_MMIO_STATUS, 0x40 | 1);
    assert_eq!(guest.get(register::VIRTIO_MMIO_STATUS), 0xf);
    guest.set(register::VIRTIO_MMIO_STATUS, 0);
    assert_eq!((guest.get(register::VIRTIO_MMIO_STATUS), guest.control.features()), (0, 0));
}

#[test]
fn registers_need_aligned_words_and_the_configuration_takes_any_width() {
    let guest = Guest::new();
    guest.control.set_target(0x55);
    for (offset, len) in [(1u64, 4usize), (0, 2), (0, 8), (0x70, 1), (u64::MAX, 4), (0xfd, 4)] {
        let mut data = vec![0xee; len];
        guest.device.read(offset, &mut data);
        assert!(data.iter().all(|byte| *byte == 0), "{offset:#x} {len}");
        guest.device.write(&guest.memory, offset, &data);
    }
    for (offset, len, first) in
        [(0x100u64, 1usize, 0x55), (0x100, 8, 0x55), (0x101, 2, 0), (0x1f0, 8, 0), (0x100, 30, 0x55)]
    {
        let mut data = vec![0xee; len];
        guest.device.read(offset, &mut data);
        assert_eq!(data[0], first);
        assert!(data[1..].iter().all(|byte| *byte == 0));
    }
    guest.device.write(&guest.memory, 0x104, &[7, 0, 0, 0]);
    assert_eq!(guest.control.actual(), 7);
}

#[test]
fn invalid_queue_addresses_stop_the_device() {
    let good = (16, 0x2000, 0x2400, 0x2800);
    for (size, descriptors, driver, device) in [
        (0, good.1, good.2, good.3),
        (3, good.1, good.2, good.3),
        (512, good.1, good.2, good.3),
        (0x1_0010, good.1, good.2, good.3),
        (16, good.1 + 8, good.2, good.3),
        (16, good.1, good.2 + 1, good.3),
        (16, good.1, good.2, good.3 + 2),
        (16, 0x3_ff80, good.2, good.3),
        (16, good.1, 0x6_0000, good.3),
        (16, good.1, good.2, 0xffff_fff0),
    ] {
        let mut guest = Guest::new();
        assert!(guest.negotiate(&[32]));
        guest.set(register::VIRTIO_MMIO_QUEUE_SEL, 0);
        guest.set(register::VIRTIO_MMIO_QUEUE_NUM, size);
        guest.set(register::VIRTIO_MMIO_QUEUE_DESC_LOW, descriptors);
        guest.set(register::VIRTIO_MMIO_QUEUE_AVAIL_LOW, driver);
        guest.set(register::VIRTIO_MMIO_QUEUE_USED_LOW, device);
        guest.set(register::VIRTIO_MMIO_QUEUE_READY, 1);
        assert_eq!(guest.get(register::VIRTIO_MMIO_QUEUE_READY), 0);
        assert!(guest.needs_reset(), "{size} {descriptors:#x} {driver:#x} {device:#x}");
        assert_eq!(guest.control.figures().broken, 1);
        guest.ok();
        guest.notify(0);
        // A reset recovers the device.
        assert!(guest.negotiate(&[32]) && !guest.needs_reset());
        guest.queue(0);
        assert_eq!(guest.get(register::VIRTIO_MMIO_QUEUE_READY), 1);
    }
}

#[test]
fn queues_are_set_up_only_between_features_ok_and_driver_ok() {
    let mut guest = Guest::new();
    guest.queue(0);
    assert_eq!(guest.get(register::VIRTIO_MMIO_QUEUE_READY), 0, "before FEATURES_OK");
    assert!(guest.negotiate(&[32]));
    guest.queue(0);
    guest.ok();
    guest.queue(1);
    assert_eq!(guest.get(register::VIRTIO_MMIO_QUEUE_READY), 0, "after DRIVER_OK");
    guest.set(register::VIRTIO_MMIO_QUEUE_SEL, 0);
    assert_eq!(guest.get(register::VIRTIO_MMIO_QUEUE_READY), 1);
    // The addresses of a ready queue cannot be changed.
    guest.set(register::VIRTIO_MMIO_QUEUE_DESC_LOW, 0x9000);
    assert_eq!(guest.device.save().queues[0].descriptors, rings(0));
    guest.set(register::VIRTIO_MMIO_QUEUE_READY, 0);
    assert_eq!(guest.get(register::VIRTIO_MMIO_QUEUE_READY), 0);
    assert!(!guest.needs_reset());
}

#[test]
fn buffers_offered_before_driver_ok_are_served_after_it() {
    let mut guest = Guest::new();
    assert!(guest.negotiate(&[32, feature::REPORTING, 1, 3]));
    guest.queue(REPORTS);
    guest.send(REPORTS, &[(0x1_8000, 0x1000, WRITE)]);
    assert_eq!(guest.calls(), []);
    guest.ok();
    assert_eq!((guest.calls().len(), guest.used(REPORTS)), (1, 1));
}

#[test]
fn invalid_rings_stop_the_device() {
    type Harm = fn(&mut Guest);
    let harms: [(&str, Harm); 8] = [
        ("a loop", |guest| {
            guest.descriptor(REPORTS, 0, (0x1_8000, 0x1000, NEXT | WRITE, 1));
            guest.descriptor(REPORTS, 1, (0x1_9000, 0x1000, NEXT | WRITE, 0));
            guest.offer_chain(REPORTS, 0);
        }),
        ("a chain that leaves its table", |guest| {
            guest.descriptor(REPORTS, 0, (0x1_8000, 0x1000, NEXT | WRITE, SIZE));
            guest.offer_chain(REPORTS, 0);
        }),
        ("an invalid head", |guest| guest.offer_chain(REPORTS, SIZE)),
        ("an index far ahead", |guest| {
            guest.memory.write_obj(SIZE + 2, vm_memory::GuestAddress(rings(REPORTS) + AVAIL + 2)).unwrap();
        }),
        ("a table in a table", |guest| {
            guest.descriptor(REPORTS, 0, (rings(REPORTS), 256, INDIRECT, 0));
            guest.offer_chain(REPORTS, 0);
        }),
        ("a table that is not in memory", |guest| {
            guest.descriptor(REPORTS, 0, (0x5_0000, 256, INDIRECT, 0));
            guest.offer_chain(REPORTS, 0);
        }),
        ("a table with half an entry", |guest| {
            guest.descriptor(REPORTS, 0, (0x5000, 255, INDIRECT, 0));
            guest.offer_chain(REPORTS, 0);
        }),
        ("more than 4 GiB", |guest| {
            guest.descriptor(REPORTS, 0, (0x1_8000, u32::MAX, NEXT | WRITE, 1));
            guest.descriptor(REPORTS, 1, (0x1_9000, 0x1000, WRITE, 0));
            guest.offer_chain(REPORTS, 0);
        }),
    ];
    for (name, harm) in harms {
        let mut guest = reporter();
        guest.send(REPORTS, &[(0x1_8000, 0x1000, WRITE)]);
        guest.calls();
        let (before, generation) = (guest.interrupts(), guest.get(register::VIRTIO_MMIO_CONFIG_GENERATION));
        harm(&mut guest);
        guest.notify(REPORTS);
        assert!(guest.needs_reset(), "{name}");
        assert_eq!((guest.calls(), guest.used(REPORTS)), (vec![], 1), "{name}");
        assert_eq!(guest.get(register::VIRTIO_MMIO_CONFIG_GENERATION), generation + 1, "{name}");
        assert!(guest.interrupts() > before, "{name}: the driver is not notified");
        // The device has stopped.
        guest.send(0, &[(0x1_4000, 4, 0)]);
        assert_eq!(guest.used(0), 0, "{name}");
    }
}

#[test]
fn indirect_chain_may_not_be_longer_than_the_queue() {
    for (entries, fine) in [(SIZE, true), (SIZE + 1, false)] {
        let mut guest = reporter();
        for n in 0..entries {
            let more = if n + 1 < entries { NEXT } else { 0 };
            let page = 0x1_8000 + 0x2000 * u64::from(n % 8);
            let bytes = [
                &page.to_le_bytes()[..],
                &0x1000u32.to_le_bytes(),
                &(WRITE | more).to_le_bytes(),
                &(n + 1).to_le_bytes(),
            ];
            let at = vm_memory::GuestAddress(0xa000 + 16 * u64::from(n));
            guest.memory.write_slice(&bytes.concat(), at).unwrap();
        }
        guest.descriptor(REPORTS, 0, (0xa000, 16 * u32::from(entries), INDIRECT, 0));
        guest.offer_chain(REPORTS, 0);
        guest.notify(REPORTS);
        assert_eq!((guest.used(REPORTS), guest.needs_reset()), (u16::from(fine), !fine));
    }
}

#[test]
fn interrupts_follow_the_drivers_suppression() {
    let mut guest = reporter();
    guest.send(REPORTS, &[(0x1_8000, 0x1000, WRITE)]);
    assert_eq!((guest.interrupts(), guest.get(register::VIRTIO_MMIO_INTERRUPT_STATUS)), (1, 1));
    guest.control.set_target(3);
    assert_eq!((guest.interrupts(), guest.get(register::VIRTIO_MMIO_INTERRUPT_STATUS)), (2, 3));
    guest.set(register::VIRTIO_MMIO_INTERRUPT_ACK, 1);
    assert_eq!(guest.get(register::VIRTIO_MMIO_INTERRUPT_STATUS), 2);
    // NO_INTERRUPT, for drivers that poll.
    guest.memory.write_obj(1u16, vm_memory::GuestAddress(rings(REPORTS) + AVAIL)).unwrap();
    guest.send(REPORTS, &[(0x1_8000, 0x1000, WRITE)]);
    assert_eq!((guest.interrupts(), guest.used(REPORTS)), (2, 2));

    // By index: only when the second buffer has been used.
    let mut guest = Guest::ready(&[29, 1, 3, 5], &[REPORTS]);
    let used_event = rings(REPORTS) + AVAIL + 4 + 2 * u64::from(SIZE);
    guest.memory.write_obj(1u16, vm_memory::GuestAddress(used_event)).unwrap();
    guest.send(REPORTS, &[(0x1_8000, 0x1000, WRITE)]);
    assert_eq!(guest.interrupts(), 0);
    guest.send(REPORTS, &[(0x1_8000, 0x1000, WRITE)]);
    assert_eq!(guest.interrupts(), 1);
    let avail_event = rings(REPORTS) + USED + 4 + 8 * u64::from(SIZE);
    assert_eq!(guest.memory.read_obj::<u16>(vm_memory::GuestAddress(avail_event)).unwrap(), 2);
}

#[test]
fn driver_that_is_not_ready_gets_no_interrupt() {
    let guest = Guest::new();
    let before = guest.get(register::VIRTIO_MMIO_CONFIG_GENERATION);
    guest.control.set_target(3);
    assert_eq!((guest.interrupts(), guest.get(register::VIRTIO_MMIO_INTERRUPT_STATUS)), (0, 0));
    assert_eq!(guest.get(register::VIRTIO_MMIO_CONFIG_GENERATION), before + 1);
    let guest = reporter();
    guest.control.set_target(3);
    guest.set(register::VIRTIO_MMIO_STATUS, 0);
    assert_eq!(guest.get(register::VIRTIO_MMIO_INTERRUPT_STATUS), 0, "reset");
}

#[test]
fn ring_that_refills_itself_is_served_in_portions() {
    // The used ring overlaps the driver's ring, so that each buffer that is given back offers
    // another one.
    let mut guest = Guest::new();
    assert!(guest.negotiate(&[32, 1, 3, 5]));
    guest.queue(REPORTS);
    guest.set(register::VIRTIO_MMIO_QUEUE_READY, 0);
    guest.set(register::VIRTIO_MMIO_QUEUE_USED_LOW, u32::try_from(rings(REPORTS) + AVAIL).unwrap());
    guest.set(register::VIRTIO_MMIO_QUEUE_READY, 1);
    guest.descriptor(REPORTS, 0, (0x1_8000, 0x1000, WRITE, 0));
    guest.set(register::VIRTIO_MMIO_STATUS, 0xf);
    guest.memory.write_obj(16u16, vm_memory::GuestAddress(rings(REPORTS) + AVAIL + 2)).unwrap();
    for _ in 0..50 {
        let before = guest.control.figures().reports;
        guest.device.work(&guest.memory);
        assert!(guest.control.figures().reports - before <= u64::from(crate::queue::PORTION));
    }
}

#[test]
fn device_migrates_with_pending_buffers_and_interrupts() {
    let mut guest = reporter();
    guest.send(REPORTS, &[(0x1_8000, 0x1000, WRITE)]);
    // A buffer that was offered and not served, an interrupt that was not acknowledged, and a queue
    // that is partly set up.
    guest.offer(REPORTS, &[(0x1_a000, 0x1000, WRITE)]);
    guest.set(register::VIRTIO_MMIO_QUEUE_SEL, 16);
    guest.set(register::VIRTIO_MMIO_QUEUE_NUM, 8);
    let saved = guest.device.save();
    let there = guest.moved();
    assert_eq!(there.device.save(), saved);
    assert_eq!((there.calls(), there.interrupts()), (vec![], 0));
    there.device.resumed(crate::device::Resume::Moved).expect("a balloon needs nothing");
    assert_eq!(there.interrupts(), 1, "the pending interrupt is sent again");
    there.work();
    let drop = Call::Drop(crate::balloon::Why::Reported, vec![(0, 0x1a..0x1b)]);
    assert_eq!((there.calls(), there.used(REPORTS)), (vec![drop], 2));
}

#[test]
fn invalid_state_is_refused_and_changes_nothing() {
    let guest = reporter();
    let good = guest.device.save();
    type Harm = fn(&mut TransportSaved<BalloonSaved>);
    let harms: [(&str, Harm); 9] = [
        ("queues missing", |s| s.queues.truncate(3)),
        ("other queues", |s| s.queues[1].index = 9),
        ("a size", |s| s.queues[0].size = 5),
        ("an address", |s| s.queues[0].device = 0x7_0000),
        ("features", |s| s.driver_features |= 1 << 90),
        ("no version", |s| s.driver_features &= !(1 << 32)),
        ("a status", |s| s.status = 4),
        ("a bit of status", |s| s.status |= 0x100),
        ("a held buffer", |s| s.device.held = Some(SIZE)),
    ];
    for (name, harm) in harms {
        let mut bad = good.clone();
        harm(&mut bad);
        let other = Guest::new();
        let before = other.device.save();
        assert!(other.device.load(&other.memory, &bad).is_err(), "{name}");
        assert_eq!(other.device.save(), before, "{name}");
        other.device.load(&other.memory, &good).unwrap();
    }
}
