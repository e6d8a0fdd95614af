//! Faults of a run, and their times.

use super::link::Cargo;
use super::world::{BULK, Item, TO_SOURCE, TO_TARGET, World};

/// Faults of a run.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// True if there are no faults: the migration must succeed.
    pub(super) fault_free: bool,
    /// Failures of local steps, per mille.
    pub(super) step_fails: u64,
    /// Attempts at which the guest's I/O is not quiesced, per mille.
    pub(super) busy: u64,
    /// Pages that are damaged on the link, per mille.
    pub(super) damage: u64,
    /// Number of control messages until the link is cut.
    pub(super) cut_after: Option<u64>,
    /// Number of times that a link is cut again after it was reopened.
    pub(super) cuts_left: u64,
    /// Bandwidth of each stream in bytes per microsecond, if it is limited.
    pub(super) rate: Option<u64>,
    /// Number of stalls so far, and below, of stalls that exceeded a timeout.
    pub(super) stalls: u64,
    pub(super) outlasted: u64,
}

impl World {
    pub(super) fn choose_faults(&mut self) {
        if self.rng.per_mille(200) {
            let time = self.some_time();
            self.at(time, Item::SwitchNow);
        }
        if self.rng.per_mille(400) {
            // A page takes from 10 microseconds to a millisecond.
            self.faults.rate = Some([4, 12, 40, 120, 400][self.rng.index(5)]);
        }
        if self.rng.per_mille(150) {
            self.faults.fault_free = true;
            return;
        }
        if self.has_arbiter() {
            self.arbiter.choose_faults(&mut self.rng);
        }
        if self.rng.per_mille(300) {
            self.faults.step_fails = 1 + self.rng.below(60);
        }
        if self.rng.per_mille(200) {
            self.faults.busy = [50, 300, 900][self.rng.index(3)];
        }
        if self.rng.per_mille(300) {
            self.faults.damage = 1 + self.rng.below(150);
        }
        self.faults.cuts_left = self.rng.below(4);
        match self.rng.below(4) {
            0 => self.faults.cut_after = Some(self.rng.below(30)),
            1 => {
                let time = self.some_time();
                self.at(time, Item::Cut);
            }
            _ => {}
        }
        let unlucky = [
            (Item::Cancel, 100),
            (Item::StopTarget, 80),
            (Item::CutChannel, 150),
            (Item::CutChannel, 150),
            (Item::Stall, 150),
            (Item::Stall, 100),
            (Item::CrashSource, 50),
            (Item::CrashTarget, 50),
        ];
        for (item, often) in unlucky {
            if self.rng.per_mille(often) {
                let time = self.some_time();
                self.at(time, item);
            }
        }
    }

    /// Schedules faults at the beginning of the postcopy, because faults that are possible later
    /// should often happen soon.
    pub(super) fn postcopy_begins(&mut self) {
        let ills = [
            (Item::Cut, 250),
            (Item::CutChannel, 150),
            (Item::Stall, 100),
            (Item::CrashSource, 30),
            (Item::CrashTarget, 15),
        ];
        for (item, often) in ills {
            if !self.faults.fault_free && self.rng.per_mille(often) {
                let soon = 1 + self.rng.below(12_000);
                self.at(soon, item);
            }
        }
    }

    /// Schedules, in some runs, the stop or the death of a target that has just claimed its guest.
    pub(super) fn target_claims(&mut self) {
        for (item, often) in [(Item::StopTarget, 60), (Item::CrashTarget, 30)] {
            if !self.faults.fault_free && self.rng.per_mille(often) {
                let soon = 1 + self.rng.below(2_000);
                self.at(soon, item);
            }
        }
    }

    /// Returns a random time at any scale: during setup, during passes, or late.
    fn some_time(&mut self) -> u64 {
        let scale = [300, 3000, 10_000, 30_000, 100_000][self.rng.index(5)];
        self.rng.below(scale)
    }

    /// Cuts the network for a while. Source and target notice it independently: at once by a reset,
    /// or late by a timeout.
    pub(super) fn cut(&mut self) {
        if !self.net_up {
            return;
        }
        self.net_up = false;
        let (first, links) = (self.alive_from, self.wires.len() / self.streams.count());
        self.alive_from = links;
        for link in first..links {
            self.cut_link(link);
        }
        let longest = [1000, 100_000, 5_000_000, 60_000_000][self.rng.index(4)];
        let down = 1 + self.rng.below(longest);
        self.at(down, Item::Mend);
    }

    fn cut_link(&mut self, link: usize) {
        let wires = link * self.streams.count()..(link + 1) * self.streams.count();
        let mut arrived = self.now;
        for at in wires {
            self.wires[at].cut(&mut self.rng);
            self.slow_down(at, 100, 8_000_000);
            arrived = arrived.max(self.wires[at].under_way.back().map_or(0, |(time, _)| *time));
        }
        for lost in [Item::SourceLost(link), Item::TargetLost(link)] {
            let delay =
                if self.rng.per_mille(500) { self.rng.below(2000) } else { self.rng.below(10_000_000) };
            // Cargo that still arrives at the target was there before it noticed the end.
            let delay = match lost {
                Item::TargetLost(_) => delay.max(arrived - self.now),
                _ => delay,
            };
            self.at(delay, lost);
        }
    }

    /// Delays cargo that is on its way: a commit may be read long after its sender has given it up.
    pub(super) fn slow_down(&mut self, wire: usize, per_mille: u64, most: u64) {
        if self.rng.per_mille(per_mille) {
            let delay = self.rng.below(most);
            let late = self.wires[wire].delay(delay);
            late.into_iter().for_each(|time| self.at(time - self.now, Item::Arrive(wire)));
        }
    }

    /// Stalls one channel or all channels for a while. A receiver that waits for longer than its
    /// timeout gives up a working link.
    pub(super) fn stall(&mut self) {
        let link = if self.rng.per_mille(500) { self.source.link } else { self.target.link };
        let count = self.streams.count();
        let longest = [3_000, 100_000, 5_000_000, 60_000_000][self.rng.index(4)];
        let (by, only) =
            (1 + self.rng.below(longest), self.rng.per_mille(500).then(|| self.rng.index(count)));
        for stream in (0..count).filter(|stream| only.is_none_or(|only| only == *stream)) {
            let wire = link * count + stream;
            let late = self.wires[wire].delay(by);
            late.into_iter().for_each(|time| self.at(time - self.now, Item::Arrive(wire)));
        }
        self.faults.stalls += 1;
        // True for a silent control channel (in both directions, because the source's pings get no
        // answer), or for pages that do not arrive while the guest runs without all of its memory.
        let silence = u64::try_from(self.source.settings.peer_timeout.as_micros()).expect("short");
        let stalls = |stream| only.is_none_or(|only| only == stream);
        let patience = if stalls(TO_TARGET) { silence } else { 3 * silence };
        let waits = stalls(TO_TARGET) || (self.target.in_postcopy && only.is_some_and(|only| only >= BULK));
        if waits && by > patience {
            self.faults.outlasted += 1;
            self.at(patience, Item::TargetLost(link));
        }
        if (stalls(TO_SOURCE) || stalls(TO_TARGET)) && by > silence {
            self.faults.outlasted += 1;
            self.at(silence, Item::SourceLost(link));
        }
    }

    /// Cuts one channel: its reader notices it, and so does a writer at its next write.
    pub(super) fn cut_channel(&mut self) {
        let some = self.rng.index(self.streams.bulk + self.streams.urgent);
        let mut streams = vec![BULK + some];
        if let Some(urgent) = some.checked_sub(self.streams.bulk) {
            streams.push(self.streams.requests(urgent));
        }
        for stream in streams {
            let link = if self.streams.of_target(stream) { self.target.link } else { self.source.link };
            let wire = link * self.streams.count() + stream;
            self.wires[wire].cut(&mut self.rng);
            self.transmit(stream, Cargo::Eof);
        }
        self.source.dead[some] = true;
    }
}
