//! A guest that walks through its memory, round and round, while passes walk through it too: what a pass leaves depends on where the
//! two meet, which nobody knows before. So each run on paper begins somewhere else.

use super::curve::{Class, Kernel};
use super::rng::Rng;

/// Parts of the walk that are told apart.
const PARTS: usize = 256;

/// What of the walk is dirty.
#[derive(Debug, Clone)]
pub(crate) struct Ring {
    dirty: [bool; PARTS],
    /// Where the guest is, in parts.
    at: f64,
    pages: f64,
}

impl Ring {
    /// Of a class that is a walk; none of another. Nothing is dirty.
    pub(crate) fn of(class: &Class, rng: &mut Rng) -> Option<Self> {
        let at = rng.unit() * PARTS as f64;
        matches!(class.kernel, Kernel::Cyclic(_)).then_some(Self {
            dirty: [false; PARTS],
            at,
            pages: class.pages,
        })
    }

    /// A pass of `window` seconds goes over what is dirty, and protects it as it goes, each part `lead` before its turn; or, if
    /// there are `places`, over everything, the walk's parts at these shares of the pass. Returns how many pages are dirty then.
    pub(crate) fn pass(
        &mut self,
        kernel: Kernel,
        window: f64,
        lead: f64,
        places: Option<&Vec<(f64, f64, f64)>>,
    ) -> f64 {
        let often = match kernel {
            Kernel::Random(often) | Kernel::Cyclic(often) => often.max(1e-9),
        };
        let speed = often * PARTS as f64;
        let count = self.dirty.iter().filter(|dirty| **dirty).count().max(1) as f64;
        let (mut done, mut left) = (0.0, [false; PARTS]);
        for (part, left) in left.iter_mut().enumerate() {
            let since = match places {
                Some(places) => turn(places, (part as f64 + 0.5) / PARTS as f64) * window - lead,
                None if self.dirty[part] => {
                    done += 1.0;
                    (done - 0.5) / count * window - lead
                }
                None => 0.0,
            };
            let since = since.max(0.0);
            // When the guest comes by for the first time after that.
            let first = (part as f64 - self.at).rem_euclid(PARTS as f64) / speed;
            let rounds = ((since - first) * often).ceil().max(0.0);
            *left = first + rounds / often <= window;
        }
        self.dirty = left;
        self.at = (self.at + speed * window).rem_euclid(PARTS as f64);
        let dirty = self.dirty.iter().filter(|dirty| **dirty).count() as f64;
        dirty / PARTS as f64 * self.pages
    }
}

/// When in a pass, as a share of it, what lies at `share` of the walk has its turn.
fn turn(places: &[(f64, f64, f64)], share: f64) -> f64 {
    let mut before = 0.0;
    for (own, from, to) in places {
        if before + own >= share {
            return from + (to - from) * (share - before) / own.max(1e-9);
        }
        before += own;
    }
    1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(at: f64) -> Ring {
        Ring { dirty: [false; PARTS], at, pages: 25_600.0 }
    }

    #[test]
    fn a_walk_leaves_what_it_came_by() {
        // A quarter of a round a second.
        let mut ring = ring(10.0);
        assert!((ring.pass(Kernel::Cyclic(0.25), 1.0, 0.0, None) - 6400.0).abs() <= 200.0);
        // All of what was dirty is sent, and the next quarter is dirty.
        assert!((ring.pass(Kernel::Cyclic(0.25), 1.0, 0.0, None) - 6400.0).abs() <= 200.0);
        assert!(ring.dirty[75..137].iter().all(|dirty| *dirty) && !ring.dirty[20]);
        // Two rounds within a pass: only what was sent after the guest came by is clean.
        let left = ring.pass(Kernel::Cyclic(2.0), 1.0, 1.0, None);
        assert!((left - 25_600.0).abs() < 1.0, "{left}");
    }

    #[test]
    fn where_it_begins_counts_where_both_walk_alike() {
        let after = |at: f64| {
            let mut ring = Ring { dirty: [true; PARTS], ..ring(at) };
            ring.pass(Kernel::Cyclic(1.0), 0.9, 0.0, None)
        };
        // Right behind the pass, everything is written after it was sent; right before it, hardly anything.
        let all: Vec<f64> = (0..16).map(|step| after(f64::from(step) * 16.0)).collect();
        let (least, most) = all.iter().fold((f64::MAX, 0.0f64), |(a, b), v| (a.min(*v), b.max(*v)));
        assert!(least < 10_000.0 && most > 14_000.0, "{all:?}");
    }

    #[test]
    fn places_say_when() {
        let places = [(0.5, 0.0, 0.1), (0.5, 0.6, 1.0)];
        assert!((turn(&places, 0.25) - 0.05).abs() < 1e-9 && (turn(&places, 0.75) - 0.8).abs() < 1e-9);
    }
}
