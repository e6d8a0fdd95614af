//! Waiting for a condition that another thread, process or guest establishes.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// Guard against hangs: longer than any condition takes on a host that is busy with other work.
///
/// On such hosts, the kernel was seen to delay grace periods of RCU by 32 s, and writes to the disk
/// by 60 s. The value is not a performance bound. A test that reaches it has failed.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Time between two checks of a condition.
const LOOK: Duration = Duration::from_millis(1);

/// Blocks until `done` returns true.
///
/// # Panics
///
/// Panics with `what` if `done` does not return true within [`PATIENCE`].
#[track_caller]
pub fn wait(what: &str, mut done: impl FnMut() -> bool) {
    wait_for(what, || done().then_some(()).ok_or("the condition is false"));
}

/// Blocks until `get` returns `Ok`, and returns its value.
///
/// # Panics
///
/// Panics with `what` and the newest `Err` if `get` does not return `Ok` within [`PATIENCE`].
#[track_caller]
pub fn wait_for<T, E: Debug>(what: &str, mut get: impl FnMut() -> Result<T, E>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match get() {
            Ok(value) => return value,
            Err(state) if Instant::now() > deadline => {
                panic!("waited {PATIENCE:?} in vain for {what}: {state:?}")
            }
            Err(_) => std::thread::sleep(LOOK),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_returns_once_the_condition_holds() {
        let mut looks = 0;
        wait("three looks", || {
            looks += 1;
            looks == 3
        });
        assert_eq!(looks, 3);
    }

    #[test]
    fn wait_for_returns_the_value() {
        let mut answers = [Err("not yet"), Ok(7)].into_iter();
        assert_eq!(wait_for("the number", || answers.next().unwrap_or(Err("no more"))), 7);
    }
}
