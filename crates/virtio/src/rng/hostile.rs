//! Driver of a random number device that follows arbitrary bytes, for the fuzz target and for the
//! tests, which run it on seeded noise.

use super::Rng;
use crate::hostile::{Choices, STEPS, chain, moved, registers, scribble};
use crate::testing::{Driver, WRITE, memory};
use std::time::{Duration, Instant};

/// Time limit that guards against hangs, as `vmferry_testkit::PATIENCE` does. Feature `hostile` has
/// no development dependencies.
const SOON: Duration = Duration::from_secs(180);

/// Drives a random number device as `bytes` say.
///
/// # Panics
/// Panics if the device panics, or if saved state is not loaded.
pub fn drive(bytes: &[u8]) {
    let mut choices = Choices(bytes);
    let mut guest = Driver::new(memory(), |wiring| Rng::new(wiring).expect("a thread"));
    start(&mut guest, &mut choices);
    for _ in 0..STEPS {
        if choices.0.is_empty() {
            break;
        }
        step(&mut guest, &mut choices);
    }
}

/// Initializes the driver.
fn start(guest: &mut Driver<Rng>, choices: &mut Choices<'_>) {
    let wanted = choices.byte();
    let bits: Vec<u32> = [28, 29]
        .into_iter()
        .zip(0..)
        .filter(|(_, n)| wanted >> n & 1 == 0)
        .map(|(bit, _)| bit)
        .chain([32])
        .collect();
    guest.negotiate(&bits);
    if wanted < 240 {
        guest.queue(0);
    }
    guest.ok();
}

fn step(guest: &mut Driver<Rng>, choices: &mut Choices<'_>) {
    match choices.byte() % 8 {
        0 | 1 => {
            chain(guest, choices, 0);
            guest.notify(0);
        }
        2 => scribble(guest, choices),
        3 | 4 => registers(guest, choices),
        5 => {
            // The timer may ring at this moment on its own thread, which then holds the ring for a
            // short time.
            assert!(guest.device.quiesce(Instant::now() + SOON), "the device does not quiesce");
            moved(guest, choices);
            guest.work();
        }
        6 => start(guest, choices),
        _ => {
            // Offers a valid buffer.
            let (gpa, len) = (choices.address(), choices.length());
            guest.descriptor(0, 0, (gpa, len, WRITE, 0));
            chain(guest, choices, 0);
            guest.notify(0);
        }
    }
}

#[cfg(test)]
mod tests {
    /// Runs noise for some seconds. (The fuzz target finds more, because it sees which code it
    /// reaches.)
    #[test]
    fn noise_causes_no_panic_and_no_refused_state() {
        crate::hostile::tests::noise(2000, super::drive);
    }
}
