//! Tests of the network interface through its transport.

use super::testing::{ALL, MAC, NetGuest, as_got, frame, lock};
use super::*;
use crate::testing::{SIZE, WRITE};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use virtio_bindings::virtio_mmio as register;
use virtio_bindings::virtio_net as net;
use vm_memory::{Bytes, GuestAddress};

const BUFFERS: u64 = 0x2_8000;
const FRAMES: u64 = 0x8_0000;

fn guest() -> NetGuest {
    NetGuest::ready(&ALL)
}

fn without(bits: &[u32]) -> NetGuest {
    NetGuest::ready(&ALL.into_iter().filter(|bit| !bits.contains(bit)).collect::<Vec<_>>())
}

/// Adds `count` receive buffers of `len` bytes, from number `first` on.
fn post(guest: &mut NetGuest, first: u64, count: u64, len: u32) {
    for n in first..first + count {
        guest.offer(RX, &[(BUFFERS + n * u64::from(len), len)]);
    }
}

/// Returns the status from the configuration.
fn status(guest: &NetGuest) -> u32 {
    guest.driver.config(6) & 0xffff
}

fn come(guest: &NetGuest, frames: impl IntoIterator<Item = Vec<u8>>) {
    lock(&guest.wire().coming).extend(frames);
}

#[test]
fn guest_sees_address_link_and_packet_size() {
    let guest = guest();
    let mut bytes = [0; 12];
    for (at, byte) in (0u64..).zip(&mut bytes) {
        guest.driver.device.read(0x100 + at, std::slice::from_mut(byte));
    }
    assert_eq!(bytes[..6], MAC);
    assert_eq!(bytes[6..], [1, 0, 1, 0, 220, 5]);
    let offloads = Offloads { csum: true, tso4: true, tso6: true, ecn: true };
    assert_eq!(*lock(&guest.wire().offloads), offloads);
    let plain = without(&[net::VIRTIO_NET_F_GUEST_CSUM]);
    assert_eq!(*lock(&plain.wire().offloads), Offloads::default(), "segments have no checksums either");
    guest.driver.set(register::VIRTIO_MMIO_STATUS, 0);
    assert_eq!(*lock(&guest.wire().offloads), Offloads::default());
    assert!(!guest.control.driver());
}

#[test]
fn only_addresses_of_a_single_interface_are_valid() {
    assert_eq!("52:54:00:12:34:56".parse::<Mac>().unwrap().bytes(), MAC);
    assert_eq!("52:54:00:AB:cd:0f".parse::<Mac>().unwrap().to_string(), "52:54:00:ab:cd:0f");
    for bad in [
        "",
        "52:54:00:12:34",
        "52:54:00:12:34:56:78",
        "52-54-00-12-34-56",
        "5:54:00:12:34:56",
        "+5:54:00:12:34:56",
        "53:54:00:12:34:56",
        "00:00:00:00:00:00",
        "ff:ff:ff:ff:ff:ff",
        "52:54:00:12:34:5g",
    ] {
        assert!(
            bad.parse::<Mac>().unwrap_err().to_string().starts_with(&format!("'{bad}' is not a MAC")),
            "{bad}"
        );
    }
    for random in [[0; 6], [0xff; 6], [1, 2, 3, 4, 5, 6]] {
        let mac = Mac::local(random);
        assert_eq!((mac.bytes()[0] & 3, Mac::new(mac.bytes())), (2, Ok(mac)));
    }
}

#[test]
fn frame_is_sent_from_the_drivers_buffers() {
    let mut guest = guest();
    let sent = frame(1, 100);
    guest.driver.memory.write_slice(&sent[..40], GuestAddress(FRAMES)).unwrap();
    // Crosses a page boundary, with an empty part before.
    guest.driver.memory.write_slice(&sent[40..], GuestAddress(FRAMES + 0xff0)).unwrap();
    guest.offer(TX, &[(FRAMES, 40), (FRAMES, 0), (FRAMES + 0xff0, 72)]);
    let kicks = guest.wire().kicks.load(Ordering::Relaxed);
    guest.driver.notify(TX);
    assert_eq!(guest.wire().kicks.load(Ordering::Relaxed), kicks + 1, "the thread is woken");
    assert_eq!(
        (lock(&guest.wire().sent).len(), guest.driver.used(TX)),
        (0, 0),
        "a notification only wakes the thread"
    );
    assert_eq!(guest.transmit(), TxStep::Done);
    assert_eq!(*lock(&guest.wire().sent), [sent]);
    assert_eq!((guest.next_used(TX), guest.driver.interrupts()), (Some((0, 0)), 1));
    let figures = guest.control.figures();
    assert_eq!((figures.tx_frames, figures.tx_bytes), (1, 100));
}

#[test]
fn invalid_frame_is_counted_and_given_back() {
    let mut guest = guest();
    let longest = u32::try_from(FRAME_MAX).unwrap();
    for (parts, what) in [
        (vec![(FRAMES, 12)], "a header only"),
        (vec![(FRAMES, 25)], "less than an Ethernet header"),
        (vec![(FRAMES, 0)], "nothing"),
        (vec![(0x5_0000, 60)], "in a hole"),
        (vec![(FRAMES, 60), (u64::MAX - 10, 60)], "at the end of all addresses"),
        (vec![(0x3_f000, 0x2000)], "across the end of memory"),
        (vec![(0, longest + 1)], "too long"),
        (vec![(0, u32::MAX)], "far too long"),
    ] {
        let before = guest.control.figures().tx_malformed;
        guest.offer(TX, &parts);
        assert_eq!(guest.transmit(), TxStep::Done, "{what}");
        assert!(guest.next_used(TX).is_some(), "{what}");
        assert_eq!(guest.control.figures().tx_malformed, before + 1, "{what}");
    }
    guest.driver.offer(TX, &[(FRAMES, 60, WRITE)]);
    assert_eq!((guest.transmit(), guest.control.figures().tx_malformed), (TxStep::Done, 9));
    assert!(lock(&guest.wire().sent).is_empty() && !guest.driver.needs_reset());
    // The longest possible frame.
    guest.offer(TX, &[(0, longest)]);
    assert_eq!((guest.transmit(), lock(&guest.wire().sent)[0].len()), (TxStep::Done, FRAME_MAX));
}

#[test]
fn frames_wait_in_order_while_the_host_has_no_room() {
    for sheltered in [false, true] {
        let mut guest = guest();
        guest.sheltered = sheltered;
        *lock(&guest.wire().room) = Some(2);
        let frames: Vec<_> = (0..5).map(|n| frame(n, 60)).collect();
        for (n, bytes) in (0..).zip(&frames) {
            guest.driver.memory.write_slice(bytes, GuestAddress(FRAMES + 0x100 * n)).unwrap();
            guest.offer(TX, &[(FRAMES + 0x100 * n, 72)]);
        }
        assert_eq!((guest.transmit(), guest.driver.used(TX)), (TxStep::Busy, 2));
        assert_eq!((guest.transmit(), guest.driver.used(TX)), (TxStep::Busy, 2));
        *lock(&guest.wire().room) = None;
        assert_eq!((guest.transmit(), guest.driver.used(TX)), (TxStep::Done, 5));
        assert_eq!(*lock(&guest.wire().sent), frames);
        assert_eq!(guest.control.figures().tx_busy, 2);
    }
}

#[test]
fn guest_sees_that_the_link_is_down() {
    let mut guest = guest();
    guest.wire().gone.store(true, Ordering::Relaxed);
    guest.offer(TX, &[(FRAMES, 60)]);
    post(&mut guest, 0, 4, 0x1000);
    assert_eq!((guest.transmit(), guest.receive()), (TxStep::Gone, RxStep::Gone));
    assert_eq!(guest.driver.used(TX), 1, "frames are lost, but buffers are given back");
    let before = guest.driver.interrupts();
    guest.control.unplugged();
    guest.control.unplugged();
    assert_eq!((status(&guest) & 1, guest.driver.interrupts()), (0, before + 1));
}

#[test]
fn frame_arrives_in_one_or_several_buffers() {
    for sheltered in [false, true] {
        let mut guest = guest();
        guest.sheltered = sheltered;
        // With only 14 KiB of room all frames are copied, because a frame of 64 KiB would not fit.
        post(&mut guest, 0, 14, 1024);
        come(&guest, [frame(1, 60), frame(2, 1012), frame(3, 1013), frame(4, 4000)]);
        assert_eq!(guest.receive(), RxStep::Dry);
        let expected = [(1, 60, 1), (2, 1012, 1), (3, 1013, 2), (4, 4000, 4)];
        for (number, len, buffers) in expected {
            assert_eq!(guest.got(), Some(as_got(frame(number, len), buffers)), "{number}");
        }
        assert_eq!((guest.got(), guest.driver.interrupts(), guest.driver.used(RX)), (None, 1, 8));
        let figures = guest.control.figures();
        assert_eq!((figures.rx_frames, figures.rx_bytes, figures.rx_copied), (4, 6085, 4));
    }
    // With room for any frame, the port writes straight into the buffers.
    let mut guest = guest();
    post(&mut guest, 0, 1, 0x1_0000);
    guest.offer(RX, &[(FRAMES, 100), (FRAMES + 0x100, 0x1000)]);
    come(&guest, [frame(1, 60)]);
    assert_eq!(guest.receive(), RxStep::Dry);
    assert_eq!(guest.control.figures().rx_copied, 0);
    assert_eq!(guest.got(), Some(as_got(frame(1, 60), 1)));
}

#[test]
fn long_frame_is_received_directly_into_many_buffers() {
    let mut guest = guest();
    for n in 0..16 {
        // Buffers may overlap, which only concerns the driver. They are as large as memory allows.
        guest.offer(RX, &[(0x1_8000 + 0x2000 * (n % 8), 0x2000)]);
    }
    let long = frame(7, 20_000);
    come(&guest, [long.clone(), frame(8, 100)]);
    assert_eq!((guest.receive(), guest.control.figures().rx_copied), (RxStep::Dry, 0));
    assert_eq!(guest.got(), Some(as_got(long, 3)));
    assert_eq!(guest.got(), Some(as_got(frame(8, 100), 1)));
}

#[test]
fn driver_without_mergeable_buffers_gets_each_frame_in_one_buffer() {
    let mut guest = without(&[net::VIRTIO_NET_F_MRG_RXBUF]);
    // Such drivers give the header a part of its own.
    for n in 0..4 {
        guest.offer(RX, &[(BUFFERS + 0x1000 * n, 12), (BUFFERS + 0x1000 * n + 0x100, 1514)]);
    }
    come(&guest, [frame(1, 60), frame(2, 1515), frame(3, 1514)]);
    assert_eq!(guest.receive(), RxStep::Dry);
    assert_eq!(guest.got(), Some(as_got(frame(1, 60), 1)));
    assert_eq!(guest.got(), Some(as_got(frame(3, 1514), 1)));
    assert_eq!((guest.got(), guest.control.figures().rx_too_long), (None, 1));
}

#[test]
fn frames_wait_at_the_tap_without_room() {
    let mut guest = guest();
    come(&guest, [frame(1, 60), frame(2, 3000)]);
    assert_eq!(guest.receive(), RxStep::Full(None));
    assert_eq!(lock(&guest.wire().coming).len(), 2);
    post(&mut guest, 0, 3, 1024);
    let RxStep::Full(Some(_)) = guest.receive() else { panic!("the second does not fit into two") };
    assert_eq!(guest.got(), Some(as_got(frame(1, 60), 1)));
    assert_eq!(guest.got(), None);
    post(&mut guest, 3, 1, 1024);
    assert_eq!(guest.receive(), RxStep::Full(None));
    assert_eq!(guest.got(), Some(as_got(frame(2, 3000), 3)));
    assert_eq!(guest.control.figures().rx_given_up, 0);
}

#[test]
fn frame_that_never_fits_is_dropped() {
    let mut guest = guest();
    post(&mut guest, 0, 2, 512);
    come(&guest, [frame(1, 9000), frame(2, 60)]);
    let RxStep::Full(Some(at)) = guest.receive() else { panic!("there is no room") };
    // Sleeps until the time at which the device drops the frame. A busy host wakes this thread
    // later, which changes nothing.
    std::thread::sleep(at.saturating_duration_since(Instant::now()));
    assert_eq!((guest.receive(), guest.control.figures().rx_given_up), (RxStep::Dry, 1));
    assert_eq!(guest.got(), Some(as_got(frame(2, 60), 1)));
}

#[test]
fn malformed_receive_buffers_are_given_back_unused() {
    let mut guest = guest();
    post(&mut guest, 0, 2, 1024);
    guest.driver.offer(RX, &[(BUFFERS, 1024, 0)]);
    assert_eq!(guest.receive(), RxStep::Full(None));
    assert_eq!(
        [guest.next_used(RX), guest.next_used(RX), guest.next_used(RX)],
        [0, 1, 2].map(|n| Some((n, 0)))
    );
    for (parts, what) in [
        (vec![(BUFFERS, 11)], "no room for a header"),
        (vec![(0x5_0000, 1024)], "in a hole"),
        (vec![(BUFFERS, 1024), (0x3_f000, 0x2000)], "partly outside"),
        (vec![(u64::MAX, 1024)], "nowhere"),
    ] {
        guest.offer(RX, &parts);
        assert_eq!(guest.receive(), RxStep::Full(None), "{what}");
        assert!(matches!(guest.next_used(RX), Some((_, 0))), "{what}");
    }
    assert_eq!(guest.control.figures().rx_malformed, 5);
    post(&mut guest, 0, 1, 1024);
    come(&guest, [frame(1, 60)]);
    assert_eq!((guest.receive(), guest.got()), (RxStep::Full(None), Some(as_got(frame(1, 60), 1))));
}

#[test]
fn endless_chain_stops_the_device() {
    for queue in [RX, TX] {
        let mut guest = guest();
        guest.driver.descriptor(queue, 0, (FRAMES, 60, 1 | if queue == RX { WRITE } else { 0 }, 0));
        guest.driver.offer_chain(queue, 0);
        // A chain of more than 2^32 bytes counts as endless as well.
        if queue == TX {
            guest.driver.descriptor(queue, 0, (FRAMES, u32::MAX, 1, 1));
            guest.driver.descriptor(queue, 1, (FRAMES, u32::MAX, 0, 0));
        }
        let _ = (guest.receive(), guest.transmit());
        assert!(guest.driver.needs_reset());
        assert_eq!((guest.receive(), guest.transmit()), (RxStep::Off, TxStep::Off));
        assert_eq!(guest.control.figures().broken, 1);
        guest.driver.start(&ALL, &[RX, TX, 2]);
        assert_eq!((guest.receive(), guest.transmit()), (RxStep::Full(None), TxStep::Done));
    }
}

#[test]
fn frames_with_unsupported_offloads_are_dropped() {
    let header = |flags: u8, gso: u32| {
        let mut frame = frame(1, 60);
        (frame[0], frame[1]) = (flags, u8::try_from(gso).unwrap());
        frame
    };
    let (tcp4, tcp6) = (net::VIRTIO_NET_HDR_GSO_TCPV4, net::VIRTIO_NET_HDR_GSO_TCPV6);
    let ecn = net::VIRTIO_NET_HDR_GSO_ECN;
    for (missing, frames, kept) in [
        (vec![], vec![header(1, tcp4), header(1, tcp6 | ecn), header(2, 0), header(0, 0)], 4),
        (vec![net::VIRTIO_NET_F_GUEST_TSO4], vec![header(1, tcp4), header(1, tcp6)], 1),
        (vec![net::VIRTIO_NET_F_GUEST_ECN], vec![header(1, tcp4 | ecn), header(1, tcp4)], 1),
        (vec![net::VIRTIO_NET_F_GUEST_CSUM], vec![header(1, 0), header(1, tcp4), header(2, 0)], 1),
        (vec![], vec![header(1, net::VIRTIO_NET_HDR_GSO_UDP), header(0, 0x7f)], 0),
    ] {
        for sheltered in [false, true] {
            let mut guest = without(&missing);
            guest.sheltered = sheltered;
            // Room for any frame.
            (0..SIZE).for_each(|_| guest.offer(RX, &[(0x2_0000, 0x2_0000)]));
            come(&guest, frames.clone());
            assert_eq!(guest.receive(), RxStep::Dry);
            let figures = guest.control.figures();
            let lost = frames.len() as u64 - kept;
            assert_eq!((figures.rx_frames, figures.rx_unwanted), (kept, lost), "{missing:?}");
            assert_eq!(figures.rx_copied, if sheltered { kept } else { 0 });
        }
    }
    let mut guest = without(&[net::VIRTIO_NET_F_GUEST_CSUM]);
    post(&mut guest, 0, 1, 2048);
    come(&guest, [header(2, 0)]);
    let _ = guest.receive();
    assert_eq!(guest.got().unwrap()[0], 0, "a driver without checksum offload gets no flags");
}

#[test]
fn frames_from_before_the_driver_was_ready_are_dropped() {
    let mut guest = NetGuest::new();
    come(&guest, [frame(1, 60)]);
    assert_eq!(guest.receive(), RxStep::Off);
    guest.driver.start(&ALL, &[RX, TX, 2]);
    post(&mut guest, 0, 1, 2048);
    assert_eq!((guest.receive(), guest.got()), (RxStep::Dry, None));
    // Buffers of one driver are not given to the next.
    guest.driver.start(&ALL, &[RX, TX, 2]);
    come(&guest, [frame(2, 60)]);
    assert_eq!((guest.receive(), guest.driver.used(RX)), (RxStep::Full(None), 0));
}

#[test]
fn control_queue_supports_one_command() {
    let mut guest = guest();
    let send = |guest: &mut NetGuest, parts: &[(u64, u32, u16)], head: &[u8]| {
        guest.driver.memory.write_slice(head, GuestAddress(FRAMES)).unwrap();
        guest.driver.memory.write_obj(0xeeu8, GuestAddress(FRAMES + 0x100)).unwrap();
        guest.driver.send(2, parts);
        let answer: u8 = guest.driver.memory.read_obj(GuestAddress(FRAMES + 0x100)).unwrap();
        (guest.next_used(2).expect("given back").1, answer)
    };
    let whole = [(FRAMES, 2, 0), (FRAMES + 0x100, 1, WRITE)];
    let cut = [(FRAMES, 1, 0), (FRAMES, 0, 0), (FRAMES + 1, 1, 0), (FRAMES + 0x100, 1, WRITE)];
    for parts in [&whole[..], &cut[..]] {
        assert_eq!(send(&mut guest, parts, &[3, 0]), (1, 0));
    }
    // MAC filters, queue pairs, and an announcement command that does not exist.
    for head in [[1, 0], [4, 0], [3, 1], [0xff, 0xff]] {
        assert_eq!(send(&mut guest, &whole, &head), (1, 1), "{head:?}");
    }
    let figures = guest.control.figures();
    assert_eq!((figures.commands, figures.commands_malformed, figures.announce_done), (6, 0, 2));
    for (parts, what) in [
        (&[(FRAMES, 2, 0)][..], "no room for the answer"),
        (&[(FRAMES, 1, 0), (FRAMES + 0x100, 1, WRITE)][..], "half a command"),
        (&[(FRAMES + 0x100, 1, WRITE), (FRAMES, 2, 0)][..], "the answer first"),
        (&[(0x5_0000, 2, 0), (FRAMES + 0x100, 1, WRITE)][..], "in a hole"),
        (&[(FRAMES, 2, 0), (0x5_0000, 1, WRITE)][..], "the answer in a hole"),
    ] {
        assert_eq!(send(&mut guest, parts, &[3, 0]), (0, 0xee), "{what}");
    }
    assert_eq!(guest.control.figures().commands_malformed, 5);
    let mut deaf = without(&[net::VIRTIO_NET_F_GUEST_ANNOUNCE]);
    assert_eq!(send(&mut deaf, &whole, &[3, 0]), (1, 1), "not without the feature");
}

#[test]
fn migrated_guest_is_announced_repeatedly() {
    let guest = guest();
    assert_eq!((guest.announcer.announce(Instant::now()), status(&guest) & 2), (None, 0));
    let mut there = guest.moved();
    assert_eq!((status(&there), there.driver.get(register::VIRTIO_MMIO_INTERRUPT_STATUS)), (3, 2));
    let mut now = Instant::now();
    let mut pauses = Vec::new();
    let begin = now;
    while let Some(next) = there.announcer.announce(now) {
        assert_eq!(there.announcer.announce(now), Some(next), "not before its time");
        pauses.push((next - now).as_millis());
        now = next;
        // The driver executes the command.
        there.driver.memory.write_slice(&[3, 0], GuestAddress(FRAMES)).unwrap();
        there.driver.send(2, &[(FRAMES, 2, 0), (FRAMES + 0x100, 1, WRITE)]);
        assert_eq!(status(&there) & 2, 0, "the driver has confirmed the announcement");
    }
    assert!(now - begin > Duration::from_secs(1) && pauses.is_sorted(), "{pauses:?}");
    let expected = announcement(there.control.mac());
    let sent = lock(&there.wire().sent).clone();
    assert!(sent.len() == pauses.len() + 1 && sent.iter().all(|frame| *frame == expected), "{sent:?}");
    let figures = there.control.figures();
    assert_eq!((figures.announce_asked, figures.announce_done), (6, 5));
    // A guest that was only paused has not moved. It may still answer the last request.
    there.driver.device.resumed(crate::device::Resume::Again).unwrap();
    assert_eq!(there.announcer.announce(Instant::now()), None);
    // A guest without the feature is announced by the VMM all the same.
    let there = without(&[net::VIRTIO_NET_F_GUEST_ANNOUNCE]).moved();
    assert_eq!(status(&there), 1);
    assert!(there.announcer.announce(Instant::now()).is_some());
    assert_eq!(*lock(&there.wire().sent), [expected]);
    there.driver.set(register::VIRTIO_MMIO_STATUS, 0);
}

#[test]
fn copy_with_new_address_is_not_announced_and_its_driver_is_told() {
    let mac = Mac::new([0x52, 0x54, 0, 9, 9, 9]).unwrap();
    let there = guest().loaded();
    let generation = there.driver.get(register::VIRTIO_MMIO_CONFIG_GENERATION);
    there.control.renew_mac(mac);
    there.driver.device.resumed(crate::device::Resume::Moved).unwrap();
    assert_eq!((there.control.mac(), there.driver.device.save().device.mac), (mac, mac.bytes()));
    assert_eq!(there.driver.config(0).to_le_bytes(), [0x52, 0x54, 0, 9]);
    assert_ne!(there.driver.get(register::VIRTIO_MMIO_CONFIG_GENERATION), generation);
    // The interrupt says that the configuration has changed. The status does not ask for an
    // announcement.
    assert_eq!((status(&there), there.driver.get(register::VIRTIO_MMIO_INTERRUPT_STATUS)), (1, 2));
    assert_eq!(there.announcer.announce(Instant::now()), None);
    assert_eq!(*lock(&there.wire().sent), [[0u8; 0]; 0]);
    // When the copy itself migrates, it is announced.
    let third = there.moved();
    assert!(third.announcer.announce(Instant::now()).is_some());
    assert_eq!(*lock(&third.wire().sent), [announcement(mac)]);
    third.driver.set(register::VIRTIO_MMIO_STATUS, 0);
}

#[test]
fn guest_migrates_with_its_address_and_buffers() {
    let mut guest = guest();
    post(&mut guest, 0, 6, 1024);
    come(&guest, [frame(1, 60), frame(2, 2000)]);
    assert_eq!(guest.receive(), RxStep::Dry);
    come(&guest, [frame(3, 60)]);
    *lock(&guest.wire().room) = Some(0);
    guest.driver.memory.write_slice(&frame(9, 60), GuestAddress(FRAMES)).unwrap();
    guest.offer(TX, &[(FRAMES, 72)]);
    assert_eq!(guest.transmit(), TxStep::Busy);
    let mut there = guest.moved();
    assert_eq!(there.driver.device.save().device.mac, MAC);
    assert!(lock(&there.wire().offloads).tso6);
    assert_eq!((there.receive(), there.transmit()), (RxStep::Dry, TxStep::Done));
    for (number, len, buffers) in [(1, 60, 1), (2, 2000, 2), (3, 60, 1)] {
        assert_eq!(there.got(), Some(as_got(frame(number, len), buffers)), "{number}");
    }
    assert_eq!((there.got(), there.next_used(TX)), (None, Some((0, 0))));
    assert_eq!(*lock(&there.wire().sent), [frame(9, 60)]);
}

#[test]
fn nothing_begins_while_the_guest_does_not_run() {
    let mut guest = guest();
    post(&mut guest, 0, 4, 1024);
    guest.offer(TX, &[(FRAMES, 72)]);
    come(&guest, [frame(1, 60)]);
    guest.control.halt();
    let _ = (guest.receive(), guest.transmit());
    assert_eq!((guest.driver.used(RX), guest.driver.used(TX)), (0, 0));
    let mut there = guest.moved();
    assert_eq!((there.receive(), there.transmit()), (RxStep::Dry, TxStep::Done));
    assert_eq!((there.driver.used(RX), there.driver.used(TX)), (1, 1));
}

#[test]
fn invalid_saved_state_is_refused() {
    let guest = guest();
    let saved = guest.driver.device.save();
    for (mac, mtu, what) in
        [([1, 2, 3, 4, 5, 6], 1500, "not a MAC"), ([0; 6], 1500, "not a MAC"), (MAC, 67, "67 bytes")]
    {
        let mut bad = saved.clone();
        (bad.device.mac, bad.device.mtu) = (mac, mtu);
        let error = NetGuest::halted().driver.device.load(&guest.driver.memory, &bad).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
}

#[test]
fn flood_of_frames_causes_one_interrupt_per_portion() {
    let mut guest = guest();
    post(&mut guest, 0, u64::from(SIZE), 2048);
    come(&guest, (0..u32::from(SIZE)).map(|n| frame(n, 1000)));
    assert_eq!(
        (guest.receive(), guest.driver.used(RX), guest.driver.interrupts()),
        (RxStep::Full(None), SIZE, 1)
    );
}
