//! Simulation of a guest that repeatedly writes sequentially through its memory, while passes send
//! the same memory in order.
//!
//! The number of pages that a pass leaves dirty depends on where the pass and the guest meet, which
//! is not known in advance. Therefore the guest begins each simulated migration at another
//! position.

use super::curve::{Class, Kernel};
use super::rng::Rng;

/// Number of parts into which the memory that the guest writes in one round is divided.
const PARTS: usize = 256;

/// Dirty parts of the memory that the guest writes in one round.
#[derive(Debug, Clone)]
pub(crate) struct Ring {
    dirty: [bool; PARTS],
    /// Position at which the guest writes, in parts.
    at: f64,
    pages: f64,
}

impl Ring {
    /// Returns the state without dirty parts for a class that is written sequentially, or `None`
    /// for another class.
    pub(crate) fn of(class: &Class, rng: &mut Rng) -> Option<Self> {
        let at = rng.unit() * PARTS as f64;
        matches!(class.kernel, Kernel::Cyclic(_)).then_some(Self {
            dirty: [false; PARTS],
            at,
            pages: class.pages,
        })
    }

    /// Simulates a pass of `window` seconds, and returns the number of pages that are dirty
    /// afterwards.
    ///
    /// The pass sends the dirty parts in order, and protects each part `lead` seconds before it
    /// sends the part. If `parts` is `Some`, the pass sends all parts, at these shares of the pass.
    pub(crate) fn pass(
        &mut self,
        kernel: Kernel,
        window: f64,
        lead: f64,
        parts: Option<&Vec<(f64, f64, f64)>>,
    ) -> f64 {
        let often = match kernel {
            Kernel::Random(often) | Kernel::Cyclic(often) => often.max(1e-9),
        };
        let speed = often * PARTS as f64;
        let count = self.dirty.iter().filter(|dirty| **dirty).count().max(1) as f64;
        let (mut done, mut left) = (0.0, [false; PARTS]);
        for (part, left) in left.iter_mut().enumerate() {
            let since = match parts {
                Some(parts) => turn(parts, (part as f64 + 0.5) / PARTS as f64) * window - lead,
                None if self.dirty[part] => {
                    done += 1.0;
                    (done - 0.5) / count * window - lead
                }
                None => 0.0,
            };
            let since = since.max(0.0);
            // Time at which the guest first writes this part during the pass. Further writes follow
            // once per round.
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

/// Returns the share of the pass at which the pass sends the page that is at `share` of the guest's
/// round.
fn turn(parts: &[(f64, f64, f64)], share: f64) -> f64 {
    let mut before = 0.0;
    for (own, from, to) in parts {
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
    fn pages_that_the_guest_passes_after_their_turn_stay_dirty() {
        // The guest makes a quarter of a round per second.
        let mut ring = ring(10.0);
        assert!((ring.pass(Kernel::Cyclic(0.25), 1.0, 0.0, None) - 6400.0).abs() <= 200.0);
        // All dirty pages are sent, and the next quarter is dirty.
        assert!((ring.pass(Kernel::Cyclic(0.25), 1.0, 0.0, None) - 6400.0).abs() <= 200.0);
        assert!(ring.dirty[75..137].iter().all(|dirty| *dirty) && !ring.dirty[20]);
        // The guest makes two rounds within a pass. Only parts that were sent after the guest
        // passed them would be clean.
        let left = ring.pass(Kernel::Cyclic(2.0), 1.0, 1.0, None);
        assert!((left - 25_600.0).abs() < 1.0, "{left}");
    }

    #[test]
    fn start_position_matters_if_pass_and_guest_are_equally_fast() {
        let after = |at: f64| {
            let mut ring = Ring { dirty: [true; PARTS], ..ring(at) };
            ring.pass(Kernel::Cyclic(1.0), 0.9, 0.0, None)
        };
        // If the guest is right behind the pass, it writes everything after it was sent. If it is
        // right before the pass, it writes hardly anything.
        let all: Vec<f64> = (0..16).map(|step| after(f64::from(step) * 16.0)).collect();
        let (least, most) = all.iter().fold((f64::MAX, 0.0f64), |(a, b), v| (a.min(*v), b.max(*v)));
        assert!(least < 10_000.0 && most > 14_000.0, "{all:?}");
    }

    #[test]
    fn turn_follows_the_parts() {
        let parts = [(0.5, 0.0, 0.1), (0.5, 0.6, 1.0)];
        assert!((turn(&parts, 0.25) - 0.05).abs() < 1e-9 && (turn(&parts, 0.75) - 0.8).abs() < 1e-9);
    }
}
