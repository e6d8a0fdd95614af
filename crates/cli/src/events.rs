//! Option `--events`: a JSON line for each status of a migration. A thread of its own writes the
//! lines, so that a slow reader delays neither the watching thread nor the handling of Ctrl-C.

use crate::output;
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::VecDeque;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Statuses that may wait for the reader: some seconds of them.
const MOST: usize = 256;
/// Statuses that may wait at most, with those that are kept because they are the first in a state.
/// The limit also holds for a link that is lost and restored again and again.
const MOST_EVER: usize = 2 * MOST;

/// State of the migration, and its whole status as a line.
type StatusLine = (Value, String);

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<StatusLine>,
    ended: bool,
}

#[derive(Debug, Default)]
struct StatusQueue {
    state: Mutex<State>,
    changed: Condvar,
}

impl StatusQueue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, look: StatusLine) {
        let mut state = self.lock();
        let waiting = state.lines.len();
        // A slow reader misses statuses, but never the last one, and if possible not the first one
        // of each state.
        let second =
            waiting > 1 && state.lines[waiting - 1].0 == look.0 && state.lines[waiting - 2].0 == look.0;
        if waiting >= MOST && second || waiting >= MOST_EVER {
            state.lines.pop_back();
        }
        state.lines.push_back(look);
        self.changed.notify_one();
    }

    /// Returns the next line; `None` after the end.
    fn next(&self) -> Option<String> {
        let mut state = self.lock();
        loop {
            if let Some((_, line)) = state.lines.pop_front() {
                return Some(line);
            }
            if state.ended {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Writer of the lines.
#[derive(Debug)]
pub(crate) struct Events {
    queue: Arc<StatusQueue>,
    writer: JoinHandle<()>,
}

impl Events {
    /// Opens a file, or standard output for `-`.
    pub(crate) fn to(path: &Path) -> Result<Self> {
        let out = output::open(path)?;
        Self::start(out).context("cannot start a thread for --events")
    }

    fn start(mut out: Box<dyn Write + Send>) -> std::io::Result<Self> {
        let queue = Arc::new(StatusQueue::default());
        let own = Arc::clone(&queue);
        let write = move || {
            while let Some(line) = own.next() {
                // A reader that has closed its end must not stop a migration.
                let _ = writeln!(out, "{line}");
            }
        };
        let writer = std::thread::Builder::new().name("events".into()).spawn(write)?;
        Ok(Self { queue, writer })
    }

    /// Queues a status. Never waits.
    pub(crate) fn publish(&self, status: &Value) {
        self.queue.push((status["state"].clone(), status.to_string()));
    }

    /// Waits until all lines are written, at most for `most`.
    pub(crate) fn finish(self, most: Duration) {
        self.queue.lock().ended = true;
        self.queue.changed.notify_one();
        let began = Instant::now();
        while !self.writer.is_finished() && began.elapsed() < most {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::io;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// A writer that waits for permission before each write.
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
    fn stalled_reader_delays_no_one_and_gets_the_last_status() {
        let ((go, wait), (written, all)) = (channel(), channel());
        let events = Events::start(Box::new(Slow(wait, written))).unwrap();
        let (each, states) = (4 * MOST, ["precopy", "switchover", "postcopy", "completed"]);
        for (state, name) in states.iter().enumerate() {
            (0..each).for_each(|look| events.publish(&json!({ "state": name, "look": state * each + look })));
        }
        // From now on the writer need not wait.
        drop(go);
        events.finish(Duration::MAX);
        let text = String::from_utf8(all.iter().collect()).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let number = |look: &Value| usize::try_from(look["look"].as_u64().unwrap()).unwrap();
        assert!(lines.is_sorted_by_key(number) && number(&lines[0]) == 0, "{text}");
        assert_eq!(number(&lines[lines.len() - 1]), states.len() * each - 1);
        for (state, name) in states.iter().enumerate() {
            let first = lines.iter().find(|look| look["state"] == **name).map(number);
            assert_eq!(first, Some(state * each), "the first status in state {name}");
        }
        assert!((MOST..MOST + 10).contains(&lines.len()), "{}", lines.len());
    }
}
