//! A driver of a source of random numbers that does what bytes say: anything. For the fuzz target and for the tests, which run it on
//! seeded noise.

use super::Rng;
use crate::hostile::{Choices, STEPS, chain, moved, registers, scribble};
use crate::testing::{Driver, WRITE, memory};
use std::time::{Duration, Instant};

/// Guard against hangs, as `vmferry_testkit::PATIENCE`: feature `hostile` has no development
/// dependencies.
const SOON: Duration = Duration::from_secs(180);

/// Does to it what `bytes` say.
///
/// # Panics
/// If the device panics, or saved state is not loaded.
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

/// What a driver does first.
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
            // Its timer may ring at this very moment, on its own thread, which has the ring for as long as that takes.
            assert!(guest.device.quiesce(Instant::now() + SOON), "it has nothing under way");
            moved(guest, choices);
            guest.work();
        }
        6 => start(guest, choices),
        _ => {
            // A buffer that makes sense.
            let (gpa, len) = (choices.address(), choices.length());
            guest.descriptor(0, 0, (gpa, len, WRITE, 0));
            chain(guest, choices, 0);
            guest.notify(0);
        }
    }
}

#[cfg(test)]
mod tests {
    /// Noise for some seconds. (The fuzz target finds more, as it sees what it reaches.)
    #[test]
    fn noise_neither_panics_nor_is_refused_its_state() {
        crate::hostile::tests::noise(2000, super::drive);
    }
}
