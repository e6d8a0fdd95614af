//! Property tests: for any order of actions of driver and network, frames arrive complete, in order
//! and once.

use super::testing::{ALL, NetGuest, as_got, frame, lock};
use super::{HEADER, RX, TX};
use crate::testing::SIZE;
use proptest::prelude::*;
use virtio_bindings::virtio_net as net;
use vm_memory::{Bytes, GuestAddress};

#[derive(Debug, Clone)]
enum Act {
    /// The driver adds a receive buffer of these parts.
    Post(Vec<u32>),
    /// A frame of this many bytes arrives.
    Come(usize),
    /// The driver sends a frame of this many bytes, split at these positions.
    Send(usize, Vec<usize>),
    Receive,
    Transmit,
    /// The host accepts this many frames.
    Room(Option<u32>),
    Shelter(bool),
    Move,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => prop::collection::vec(12u32..3000, 1..4).prop_map(Act::Post),
        3 => (14usize..6000).prop_map(Act::Come),
        3 => (14usize..3000, prop::collection::vec(1usize..3000, 0..3)).prop_map(|(len, cuts)| Act::Send(len, cuts)),
        4 => Just(Act::Receive),
        4 => Just(Act::Transmit),
        1 => prop::option::of(0u32..4).prop_map(Act::Room),
        1 => any::<bool>().prop_map(Act::Shelter),
        1 => Just(Act::Move),
    ]
}

/// Knowledge of driver and network.
#[derive(Default)]
struct Model {
    came: Vec<Vec<u8>>,
    got: Vec<Vec<u8>>,
    sent: Vec<Vec<u8>>,
    arrived: Vec<Vec<u8>>,
    /// Number of descriptors of each buffer in a queue, in order.
    in_use: [std::collections::VecDeque<usize>; 2],
    moves: usize,
    places: [u64; 2],
    /// Minimum size of a receive buffer, in bytes.
    least: u32,
}

impl Model {
    fn free(&self, queue: u16) -> usize {
        usize::from(SIZE) - self.in_use[usize::from(queue)].iter().sum::<usize>()
    }

    /// Returns an address for `len` bytes in the queue's own half of memory.
    fn at(&mut self, queue: u16) -> u64 {
        // At most 16 addresses are in use.
        let place = &mut self.places[usize::from(queue)];
        *place += 1;
        let n = *place % 24;
        if queue == RX { 0x2_0000 + 0x1000 * n } else { 0x8_0000 + 0x1000 * n }
    }

    fn post(&mut self, guest: &mut NetGuest, lens: &[u32]) {
        if self.free(RX) >= lens.len() && lens.iter().sum::<u32>() >= self.least {
            let parts: Vec<_> = lens.iter().map(|len| (self.at(RX), *len)).collect();
            guest.offer(RX, &parts);
            self.in_use[0].push_back(parts.len());
        }
    }

    fn send(&mut self, guest: &mut NetGuest, len: usize, cuts: &[usize]) {
        let bytes = frame(u32::try_from(self.sent.len()).unwrap() + 1000, len);
        // Addresses are taken only for parts that go into the queue. Otherwise the next address
        // could be in use.
        if self.free(TX) < cuts.len() + 1 {
            return;
        }
        let (mut parts, mut from) = (Vec::new(), 0);
        for cut in cuts.iter().copied().chain([usize::MAX]) {
            let here = cut.min(bytes.len() - from);
            parts.push((self.at(TX), &bytes[from..from + here]));
            from += here;
        }
        for (at, part) in &parts {
            guest.driver.memory.write_slice(part, GuestAddress(*at)).unwrap();
        }
        let parts: Vec<_> =
            parts.iter().map(|(at, part)| (*at, u32::try_from(part.len()).unwrap())).collect();
        guest.offer(TX, &parts);
        self.in_use[1].push_back(parts.len());
        self.sent.push(bytes);
    }

    /// Lets the driver process the buffers that were given back.
    fn look(&mut self, guest: &mut NetGuest) {
        while let Some(frame) = guest.got() {
            let buffers = u16::from_le_bytes([frame[10], frame[11]]);
            (0..buffers).for_each(|_| assert!(self.in_use[0].pop_front().is_some(), "none was in use"));
            self.got.push(frame);
        }
        while let Some((_, written)) = guest.next_used(TX) {
            assert_eq!(written, 0);
            self.in_use[1].pop_front().expect("one was in use");
        }
        self.arrived.append(&mut lock(&guest.wire().sent));
        self.arrived.retain(|frame| frame[HEADER..HEADER + 6] != [0xff; 6]);
    }
}

fn run(bits: &[u32], acts: Vec<Act>) -> (Model, NetGuest) {
    let least = if bits.contains(&net::VIRTIO_NET_F_MRG_RXBUF) { 12 } else { 26 };
    let (mut model, mut guest) = (Model { least, ..Model::default() }, NetGuest::ready(bits));
    for act in acts {
        match act {
            Act::Post(lens) => model.post(&mut guest, &lens),
            Act::Come(len) => {
                let frame = frame(u32::try_from(model.came.len()).unwrap(), len);
                lock(&guest.wire().coming).push_back(frame.clone());
                model.came.push(frame);
            }
            Act::Send(len, cuts) => model.send(&mut guest, len, &cuts),
            Act::Receive => drop(guest.receive()),
            Act::Transmit => drop(guest.transmit()),
            Act::Room(room) => *lock(&guest.wire().room) = room,
            Act::Shelter(sheltered) => guest.sheltered = sheltered,
            Act::Move => {
                guest = guest.moved();
                model.moves += 1;
            }
        }
        model.look(&mut guest);
    }
    // In the end there is room for everything.
    *lock(&guest.wire().room) = None;
    for _ in 0..200 {
        let _ = (guest.transmit(), guest.receive());
        model.look(&mut guest);
        while model.free(RX) > 0 {
            model.post(&mut guest, &[3000]);
        }
    }
    (model, guest)
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn frames_arrive_complete_in_order_and_once(
        acts in prop::collection::vec(act(), 1..120),
        merge: bool,
        event_idx: bool,
    ) {
        let bits: Vec<_> = ALL
            .into_iter()
            .filter(|bit| merge || *bit != net::VIRTIO_NET_F_MRG_RXBUF)
            .filter(|bit| event_idx || *bit != 29)
            .collect();
        let (model, guest) = run(&bits, acts);
        prop_assert_eq!(&model.arrived, &model.sent);
        let mut came = model.came.iter();
        for got in &model.got {
            let buffers = u16::from_le_bytes([got[10], got[11]]);
            prop_assert!(came.any(|frame| as_got(frame.clone(), buffers) == *got), "a frame that was not sent, or arrived earlier");
        }
        let figures = guest.control.figures();
        prop_assert_eq!((figures.tx_malformed, figures.rx_malformed, figures.broken), (0, 0, 0));
        if merge {
            // A frame that was held for want of room is lost on its host.
            let lost = model.came.len() - model.got.len();
            prop_assert!(lost <= model.moves, "{} frames of {} are lost", lost, model.came.len());
        }
    }
}
