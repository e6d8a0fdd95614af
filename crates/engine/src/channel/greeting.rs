//! Connections that have not sent a hello yet.
//!
//! Any process can open such connections. Therefore their number and their lifetime are limited,
//! and older ones give way to newer ones.
//!
//! A silent connection waits without a thread. Once a connection sends bytes, a thread reads its
//! hello. If there is no room for another connection, the oldest one is closed. A source sends as
//! soon as it is connected, so its hello is read within milliseconds, whereas a silent connection
//! becomes the oldest one and is closed. Therefore silent connections cannot keep a source out,
//! however many there are.

use super::carried::Carried;
use crate::vm::caught_io;
use crate::wake::{Ending, ready};
use socket2::Socket;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time within which a connection must begin its hello. The rest of the hello may then take the
/// same time again.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of silent connections. It leaves room for connections of other programs, and is
/// far below the process's limit of open files.
const MOST_SILENT: usize = 256;
/// Maximum number of connections whose hello is being read, each on a separate thread.
const MOST_GREETING: usize = 32;
/// Interval at which the listener checks whether a thread has become free.
const FULL: Duration = Duration::from_millis(1);

/// Connection that has not sent a hello yet.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Socket,
    pub(super) peer: String,
    /// Connection that this one is a lane of. `None` if it is no lane.
    pub(super) lane_of: Option<Arc<Carried>>,
    /// True if the connection may stay silent without a time limit, because the source may use it
    /// long after it was made.
    pub(super) lasting: bool,
}

/// Connection that has not sent anything.
#[derive(Debug)]
struct SilentConnection {
    connection: Connection,
    /// Time at which the connection is closed. `None` if it may stay silent without limit.
    until: Option<Instant>,
    /// True if the connection has sent something, or has ended.
    speaks: bool,
}

/// Connections whose hello is being read, in the order in which they began to send. A connection
/// that was removed from the map must end.
type Reading = Mutex<BTreeMap<u64, Socket>>;

/// Connections that have not sent a hello yet.
#[derive(Debug, Default)]
pub(super) struct Greeting {
    silent: VecDeque<SilentConnection>,
    reading: Arc<Reading>,
    threads: Arc<AtomicUsize>,
    next: u64,
    log: Arc<ClosedLog>,
}

impl Greeting {
    /// Waits for a connection at one of the `inputs`, and returns for each input whether a
    /// connection waits.
    ///
    /// The wait also ends when `ending` is raised, when a silent connection needs attention, and
    /// after `within`.
    pub(super) fn wait<const N: usize>(
        &mut self,
        inputs: [Option<BorrowedFd<'_>>; N],
        ending: &Ending,
        within: Option<Duration>,
    ) -> [bool; N] {
        let now = Instant::now();
        self.end_late_ones(now);
        let first_late = self.silent.iter().filter_map(|silent| silent.until).min();
        let within = [within, first_late.map(|until| until - now)].into_iter().flatten().min();
        let own = std::iter::once(ending.as_fd()).chain(inputs.into_iter().flatten());
        let silent = self.silent.iter().map(|silent| silent.connection.socket.as_fd());
        let fds: Vec<_> = own.chain(silent).collect();
        let mut ready = ready(&fds, within).into_iter().skip(1);
        let arrived = inputs.map(|input| input.is_some() && ready.next() == Some(true));
        for (silent, ready) in self.silent.iter_mut().zip(ready) {
            silent.speaks = ready;
        }
        arrived
    }

    /// Closes the connections that have been silent for too long.
    fn end_late_ones(&mut self, now: Instant) {
        let log = &self.log;
        self.silent.retain(|SilentConnection { connection, until, .. }| {
            let late = until.is_some_and(|until| until <= now);
            if late {
                log.report(&connection.peer, &format!("it sent no hello within {HELLO_TIMEOUT:?}"));
            }
            !late
        });
    }

    /// Adds a new connection.
    pub(super) fn add(&mut self, connection: Connection) {
        if self.silent.len() >= MOST_SILENT {
            self.make_room();
        }
        let until = (!connection.lasting).then(|| Instant::now() + HELLO_TIMEOUT);
        self.silent.push_back(SilentConnection { connection, until, speaks: false });
    }

    /// Logs a connection that was closed before anything was read from it.
    pub(super) fn log_refused(&self, peer: &str, why: &str) {
        self.log.report(peer, why);
    }

    /// Returns true if every connection has sent its hello or has ended.
    pub(super) fn is_idle(&self) -> bool {
        self.silent.is_empty() && self.threads.load(Ordering::Acquire) == 0
    }

    /// Closes the connection that has been silent for longest, if there is one.
    pub(super) fn make_room(&mut self) {
        if let Some(oldest) = self.silent.pop_front() {
            self.log.report(&oldest.connection.peer, "it sent nothing while other connections waited");
        }
    }

    /// Reads the hello of each connection that has sent bytes, by calling `read` on a separate
    /// thread, and passes the result to `take`.
    ///
    /// The thread calls `left` once [`is_idle`](Self::is_idle) no longer counts the connection.
    pub(super) fn read_hellos<T>(
        &mut self,
        read: impl Fn(Connection) -> io::Result<Option<T>> + Send + Clone + 'static,
        take: impl Fn(T) + Send + Clone + 'static,
        left: impl Fn() + Send + Clone + 'static,
    ) {
        while let Some(at) = self.silent.iter().position(|silent| silent.speaks) {
            if self.threads.load(Ordering::Acquire) >= MOST_GREETING {
                self.close_longest_greeting();
                std::thread::sleep(FULL);
                return;
            }
            let Some(speaker) = self.silent.remove(at) else { return };
            self.start(speaker.connection, read.clone(), take.clone(), left.clone());
        }
    }

    fn close_longest_greeting(&self) {
        if let Some((_, socket)) = lock(&self.reading).pop_first() {
            // The thread of the connection ends when it notices the shutdown.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn start<T>(
        &mut self,
        connection: Connection,
        read: impl Fn(Connection) -> io::Result<Option<T>> + Send + 'static,
        take: impl Fn(T) + Send + 'static,
        left: impl Fn() + Send + 'static,
    ) {
        let id = self.next;
        self.next += 1;
        let peer = connection.peer.clone();
        let again = match connection.socket.try_clone() {
            Ok(again) => again,
            Err(error) => {
                return self.log.report(&peer, &format!("cannot duplicate its descriptor: {error}"));
            }
        };
        lock(&self.reading).insert(id, again);
        self.threads.fetch_add(1, Ordering::AcqRel);
        let (reading, threads) = (Arc::clone(&self.reading), Arc::clone(&self.threads));
        let log = Arc::clone(&self.log);
        let work = move || {
            let said = caught_io(|| read(connection));
            let still = lock(&reading).remove(&id).is_some();
            match said {
                // The connection is passed on only if it was not removed while its hello was read.
                Ok(Some(said)) if still => take(said),
                Ok(None) => {}
                Ok(Some(_)) => log.report(&peer, "its hello took too long while other connections waited"),
                Err(error) => log.report(&peer, &error.to_string()),
            }
            threads.fetch_sub(1, Ordering::AcqRel);
            left();
        };
        if let Err(error) = vmferry_thread::spawn(vmferry_thread::Role::Listener, "greet", work) {
            lock(&self.reading).remove(&id);
            self.threads.fetch_sub(1, Ordering::AcqRel);
            self.log.report("", &format!("cannot start a thread for it: {error}"));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Log of closed connections, which is limited to a burst of lines and one line per second.
#[derive(Debug)]
struct ClosedLog(Mutex<LogBudget>);

#[derive(Debug)]
struct LogBudget {
    /// Number of lines that may be written now.
    may: u32,
    since: Instant,
    /// Number of connections for which no line was written.
    suppressed: u64,
}

const LINES_AT_ONCE: u32 = 16;
const LINE_EVERY: Duration = Duration::from_secs(1);

impl Default for ClosedLog {
    fn default() -> Self {
        Self(Mutex::new(LogBudget { may: LINES_AT_ONCE, since: Instant::now(), suppressed: 0 }))
    }
}

impl ClosedLog {
    fn report(&self, peer: &str, why: &str) {
        let allowed = lock(&self.0).next_line(Instant::now());
        match allowed {
            None => {}
            Some(0) => tracing::warn!("closed a connection: {peer}: {why}"),
            Some(others) => {
                tracing::warn!("closed a connection: {peer}: {why} (and {others} others before it)")
            }
        }
    }
}

impl LogBudget {
    /// Returns the number of connections since the last line for which no line was written. Returns
    /// `None` if no line may be written now.
    fn next_line(&mut self, now: Instant) -> Option<u64> {
        while self.may < LINES_AT_ONCE && now.saturating_duration_since(self.since) >= LINE_EVERY {
            self.may += 1;
            self.since += LINE_EVERY;
        }
        if self.may == LINES_AT_ONCE {
            self.since = now;
        }
        if self.may == 0 {
            self.suppressed += 1;
            return None;
        }
        self.may -= 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::sync::mpsc::channel;
    use vmferry_testkit::{PATIENCE, wait};

    /// Returns the two ends of a connection.
    fn pair() -> (Socket, Socket) {
        Socket::pair(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap()
    }

    fn hung_up(socket: &mut Socket) -> bool {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        matches!(socket.read(&mut [0]), Ok(0))
    }

    /// Updates the silent connections. No connection waits at the listener `idle`.
    fn look(greeting: &mut Greeting, idle: &Socket) {
        let ending = Ending::new().unwrap();
        assert!(!greeting.wait([Some(idle.as_fd()), None], &ending, Some(Duration::ZERO)).contains(&true));
    }

    fn read_one(Connection { mut socket, .. }: Connection) -> io::Result<Option<u8>> {
        let mut byte = [0; 2];
        socket.read_exact(&mut byte)?;
        Ok(Some(byte[1]))
    }

    fn connection(socket: Socket, peer: &str) -> Connection {
        Connection { socket, peer: peer.into(), lane_of: None, lasting: false }
    }

    #[test]
    fn silent_connection_gives_way_to_connection_that_sends() {
        let (mut greeting, (idle, _keep)) = (Greeting::default(), pair());
        let mut others = Vec::new();
        for _ in 0..MOST_SILENT + 10 {
            let (other, own) = pair();
            greeting.add(connection(own, "silent"));
            others.push(other);
        }
        assert_eq!(greeting.silent.len(), MOST_SILENT);
        assert!(others[..10].iter_mut().all(hung_up));
        let (source, own) = pair();
        greeting.add(connection(own, "source"));
        source.send(&[0, 7]).unwrap();
        let (sender, reading) = channel();
        // The deadlines are moved, so that no connection is late however slowly the test runs.
        greeting.silent.iter_mut().for_each(|silent| silent.until = Some(Instant::now() + PATIENCE));
        look(&mut greeting, &idle);
        greeting.read_hellos(read_one, move |byte| sender.send(byte).unwrap(), || ());
        assert_eq!(reading.recv_timeout(PATIENCE), Ok(7));
        // Only the oldest one had to end for the new connection.
        assert!(hung_up(&mut others[10]));
        assert_eq!(greeting.silent.len(), MOST_SILENT - 1);
    }

    #[test]
    fn incomplete_hellos_do_not_block_other_connections() {
        let (mut greeting, (idle, _keep)) = (Greeting::default(), pair());
        let mut others = Vec::new();
        for _ in 0..MOST_GREETING {
            let (other, own) = pair();
            other.send(&[0]).unwrap();
            greeting.add(connection(own, "half"));
            others.push(other);
        }
        let (sender, reading) = channel();
        let take = move |byte| sender.send(byte).unwrap();
        look(&mut greeting, &idle);
        greeting.read_hellos(read_one, take.clone(), || ());
        assert_eq!(greeting.threads.load(Ordering::Acquire), MOST_GREETING);
        let (source, own) = pair();
        source.send(&[0, 9]).unwrap();
        greeting.add(connection(own, "source"));
        wait("a free thread", || {
            look(&mut greeting, &idle);
            greeting.read_hellos(read_one, take.clone(), || ());
            greeting.silent.is_empty()
        });
        assert_eq!(reading.recv_timeout(PATIENCE), Ok(9));
        assert!(hung_up(&mut others[0]));
    }

    #[test]
    fn raised_ending_ends_a_wait_that_has_no_time_limit() {
        let (waited, done) = channel();
        std::thread::spawn(move || {
            let (mut greeting, (idle, _keep)) = (Greeting::default(), pair());
            let ending = Ending::new().unwrap();
            ending.end();
            waited.send(greeting.wait([Some(idle.as_fd())], &ending, None)).unwrap();
        });
        // Nothing except `ending` ends that wait.
        assert_eq!(done.recv_timeout(PATIENCE), Ok([false]));
    }

    #[test]
    fn panic_while_a_hello_is_read_frees_the_place() {
        let (mut greeting, (idle, _keep)) = (Greeting::default(), pair());
        let (other, own) = pair();
        other.send(&[0]).unwrap();
        greeting.add(connection(own, "odd"));
        look(&mut greeting, &idle);
        let (sender, reading) = channel::<()>();
        let (gone, left) = channel();
        let read = |_| -> io::Result<Option<()>> { panic!("a defect") };
        greeting.read_hellos(read, move |()| sender.send(()).unwrap(), move || gone.send(()).unwrap());
        // The thread drops `take`, and the sender with it, when it has ended or almost has.
        assert!(reading.recv_timeout(PATIENCE).is_err());
        assert!(lock(&greeting.reading).is_empty());
        assert_eq!(left.recv_timeout(PATIENCE), Ok(()));
        assert!(greeting.is_idle());
    }

    #[test]
    fn silent_connection_is_closed_at_its_deadline() {
        let mut greeting = Greeting::default();
        let (mut other, own) = pair();
        greeting.add(connection(own, "late"));
        greeting.silent[0].until = Some(Instant::now());
        let (idle, _keep) = pair();
        look(&mut greeting, &idle);
        assert!(greeting.silent.is_empty() && hung_up(&mut other));
        // A connection that the caller handed over has no deadline, and does not delay the ones
        // behind it.
        let ((_lasting, own), (mut other, late)) = (pair(), pair());
        greeting.add(Connection { lasting: true, ..connection(own, "lasting") });
        greeting.add(connection(late, "late"));
        assert_eq!(greeting.silent[0].until, None);
        greeting.silent[1].until = Some(Instant::now());
        look(&mut greeting, &idle);
        assert!(greeting.silent.len() == 1 && hung_up(&mut other));
    }

    #[test]
    fn log_is_limited_for_many_connections() {
        let ClosedLog(said) = ClosedLog::default();
        let mut said = said.into_inner().unwrap();
        let began = said.since;
        let mut lines =
            |connections, at| (0..connections).filter_map(|_| said.next_line(began + at)).collect::<Vec<_>>();
        assert_eq!(lines(1000, Duration::ZERO), [0; LINES_AT_ONCE as usize]);
        assert_eq!(lines(1000, LINE_EVERY / 2), [0; 0]);
        assert_eq!(lines(1000, LINE_EVERY), [1000 - u64::from(LINES_AT_ONCE) + 1000]);
        assert_eq!(lines(1000, LINE_EVERY * 3).len(), 2);
        assert_eq!(
            lines(1000, LINE_EVERY * 100).len(),
            LINES_AT_ONCE as usize,
            "a long pause allows no larger burst"
        );
    }
}
