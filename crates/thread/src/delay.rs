//! Time for which a thread waits for a processor.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

/// Counter of the time for which a thread was able to run, but waited for a processor.
///
/// Linux counts this time in the second field of the thread's file `schedstat`
/// (`Documentation/scheduler/sched-stats.rst`). Once the counter is open, a thread that may open no
/// files can read it, too.
#[derive(Debug)]
pub struct RunDelay {
    schedstat: File,
}

impl RunDelay {
    /// Opens the counter of the thread of this process whose Linux thread id is `thread`.
    ///
    /// # Errors
    /// If the file cannot be opened, for example because the thread has ended.
    pub fn open(thread: u32) -> io::Result<Self> {
        Ok(Self { schedstat: File::open(format!("/proc/self/task/{thread}/schedstat"))? })
    }

    /// Returns the time for which the thread has waited for a processor since its start.
    ///
    /// Returns `None` if the thread has ended, or if the kernel does not count this time.
    #[must_use]
    pub fn read(&self) -> Option<Duration> {
        let mut text = [0; 64];
        let bytes = self.schedstat.read_at(&mut text, 0).ok()?;
        run_delay(std::str::from_utf8(text.get(..bytes)?).ok()?)
    }
}

/// Returns the time in `text`, the content of `schedstat`: the second field, in nanoseconds.
fn run_delay(text: &str) -> Option<Duration> {
    text.split_ascii_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_processor_is_the_second_field() {
        assert_eq!(run_delay("535358457 218778 41\n"), Some(Duration::from_nanos(218_778)));
        assert_eq!(run_delay("535358457"), None);
        assert_eq!(run_delay("535358457 x 41"), None);
    }
}
