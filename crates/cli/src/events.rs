//! `--events`: a line for each look at a migration, written on a thread of its own: whoever does not read them keeps nobody from looking on,
//! nor a Ctrl-C from being heard.

use crate::output;
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::VecDeque;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Lines that wait for their reader: some seconds of looking.
const MOST: usize = 256;

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<String>,
    ended: bool,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: String) {
        let mut state = self.lock();
        if state.lines.len() >= MOST {
            // Of what a slow reader misses, the newest is the least.
            state.lines.pop_back();
        }
        state.lines.push_back(line);
        self.changed.notify_one();
    }

    /// The next line; `None` once there is none any more.
    fn next(&self) -> Option<String> {
        let mut state = self.lock();
        loop {
            if let Some(line) = state.lines.pop_front() {
                return Some(line);
            }
            if state.ended {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Where the lines go.
#[derive(Debug)]
pub(crate) struct Events {
    shared: Arc<Shared>,
    writer: JoinHandle<()>,
}

impl Events {
    /// To a file, or standard output for `-`.
    pub(crate) fn to(path: &Path) -> Result<Self> {
        let out = output::open(path)?;
        Self::start(out).context("no thread for --events")
    }

    fn start(mut out: Box<dyn Write + Send>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let write = move || {
            while let Some(line) = own.next() {
                // A reader that has gone does not stop a migration.
                let _ = writeln!(out, "{line}");
            }
        };
        let writer = std::thread::Builder::new().name("events".into()).spawn(write)?;
        Ok(Self { shared, writer })
    }

    /// A look. Never waits; of a reader that is too slow some are kept back, and the last never is.
    pub(crate) fn tell(&self, status: &Value) {
        self.shared.push(status.to_string());
    }

    /// Waits until all is written.
    pub(crate) fn finish(self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_one();
        // Its panic was printed when it happened.
        let _ = self.writer.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::io;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Writes once it may.
    struct Slow(Receiver<()>, Sender<u8>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            bytes.iter().for_each(|byte| self.1.send(*byte).unwrap());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_stalls_keeps_nobody_and_reads_the_last() {
        let ((go, wait), (written, all)) = (channel(), channel());
        let events = Events::start(Box::new(Slow(wait, written))).unwrap();
        let last = 10 * MOST;
        (0..=last).for_each(|look| events.tell(&json!(look)));
        // It may write whatever it wants now.
        drop(go);
        events.finish();
        let text = String::from_utf8(all.iter().collect()).unwrap();
        let looks: Vec<usize> = text.lines().map(|line| line.parse().unwrap()).collect();
        assert!(looks.is_sorted() && looks[0] == 0 && looks.last() == Some(&last), "{looks:?}");
        assert!((MOST..MOST + 3).contains(&looks.len()), "{}", looks.len());
    }
}
