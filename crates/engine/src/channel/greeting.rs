//! Connections that have yet to say hello. Anybody can open them, so they are few, they are short, and they give way to newer ones.
//!
//! Who says nothing waits without a thread; who speaks is heard on one. Where there is no room for another, the one that came first has
//! to go: a source speaks as soon as it is connected, and is heard within milliseconds, while whoever is there to take places keeps
//! them. So a listener is not filled up by connections that are held open, however many are tried.

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

/// How long a connection may take to say hello, and again as long to end it.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections that may be silent at once: some for a stranger, and far below what a process may have open.
const MOST_SILENT: usize = 256;
/// Connections that may be saying hello at once, each on a thread.
const MOST_GREETING: usize = 32;
/// How long until it is looked again whether a thread has become free.
const FULL: Duration = Duration::from_millis(1);

/// A connection that has yet to say hello.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Socket,
    pub(super) peer: String,
    /// The connection that this one is a lane of, if it is one.
    pub(super) lane_of: Option<Arc<Carried>>,
    /// It may stay silent for any time: the source may use it long after it was made.
    pub(super) lasting: bool,
}

/// A connection of which nothing has come.
#[derive(Debug)]
struct Silent {
    connection: Connection,
    /// Time at which the connection is ended; `None` if it may stay silent for any time.
    until: Option<Instant>,
    /// Something has come, or its end.
    speaks: bool,
}

/// Those that are being heard, by the order in which they began to speak; what is not among them any more must go.
type Heard = Mutex<BTreeMap<u64, Socket>>;

/// Connections that have yet to say hello.
#[derive(Debug, Default)]
pub(super) struct Greeting {
    silent: VecDeque<Silent>,
    heard: Arc<Heard>,
    threads: Arc<AtomicUsize>,
    next: u64,
    complaints: Arc<Complaints>,
}

impl Greeting {
    /// Waits for a connection at one of the `doors`, and returns at which doors there is one. The wait also ends when `ending` is
    /// raised, when a silent connection needs attention, and after `within`.
    pub(super) fn wait<const N: usize>(
        &mut self,
        doors: [Option<BorrowedFd<'_>>; N],
        ending: &Ending,
        within: Option<Duration>,
    ) -> [bool; N] {
        let now = Instant::now();
        self.end_late_ones(now);
        let first_late = self.silent.iter().filter_map(|silent| silent.until).min();
        let within = [within, first_late.map(|until| until - now)].into_iter().flatten().min();
        let own = std::iter::once(ending.as_fd()).chain(doors.into_iter().flatten());
        let silent = self.silent.iter().map(|silent| silent.connection.socket.as_fd());
        let fds: Vec<_> = own.chain(silent).collect();
        let mut ready = ready(&fds, within).into_iter().skip(1);
        let knocks = doors.map(|door| door.is_some() && ready.next() == Some(true));
        for (silent, ready) in self.silent.iter_mut().zip(ready) {
            silent.speaks = ready;
        }
        knocks
    }

    /// Ends the connections that have taken too long.
    fn end_late_ones(&mut self, now: Instant) {
        let complaints = &self.complaints;
        self.silent.retain(|Silent { connection, until, .. }| {
            let late = until.is_some_and(|until| until <= now);
            if late {
                complaints.about(&connection.peer, &format!("it said no hello within {HELLO_TIMEOUT:?}"));
            }
            !late
        });
    }

    /// Takes a new connection in.
    pub(super) fn add(&mut self, connection: Connection) {
        if self.silent.len() >= MOST_SILENT {
            self.make_room();
        }
        let until = (!connection.lasting).then(|| Instant::now() + HELLO_TIMEOUT);
        self.silent.push_back(Silent { connection, until, speaks: false });
    }

    /// Reports a connection that was closed before anything was heard of it.
    pub(super) fn turn_away(&self, peer: &str, why: &str) {
        self.complaints.about(peer, why);
    }

    /// Returns whether every connection has said hello or has ended.
    pub(super) fn is_idle(&self) -> bool {
        self.silent.is_empty() && self.threads.load(Ordering::Acquire) == 0
    }

    /// Ends the connection that has been silent for longest, if there is one.
    pub(super) fn make_room(&mut self) {
        if let Some(oldest) = self.silent.pop_front() {
            self.complaints.about(&oldest.connection.peer, "it said nothing while others waited");
        }
    }

    /// Reads the hello of each connection that speaks by `hear`, on a thread of its own, and gives the result to `take`. The thread
    /// calls `left` when the connection is not counted here any more.
    pub(super) fn hear<T>(
        &mut self,
        hear: impl Fn(Connection) -> io::Result<Option<T>> + Send + Clone + 'static,
        take: impl Fn(T) + Send + Clone + 'static,
        left: impl Fn() + Send + Clone + 'static,
    ) {
        while let Some(at) = self.silent.iter().position(|silent| silent.speaks) {
            if self.threads.load(Ordering::Acquire) >= MOST_GREETING {
                self.hang_up_on_the_longest();
                std::thread::sleep(FULL);
                return;
            }
            let Some(speaker) = self.silent.remove(at) else { return };
            self.start(speaker.connection, hear.clone(), take.clone(), left.clone());
        }
    }

    fn hang_up_on_the_longest(&self) {
        if let Some((_, socket)) = lock(&self.heard).pop_first() {
            // Its thread ends as soon as it notices.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn start<T>(
        &mut self,
        connection: Connection,
        hear: impl Fn(Connection) -> io::Result<Option<T>> + Send + 'static,
        take: impl Fn(T) + Send + 'static,
        left: impl Fn() + Send + 'static,
    ) {
        let id = self.next;
        self.next += 1;
        let who = connection.peer.clone();
        let again = match connection.socket.try_clone() {
            Ok(again) => again,
            Err(error) => return self.complaints.about(&who, &format!("no descriptor for it: {error}")),
        };
        lock(&self.heard).insert(id, again);
        self.threads.fetch_add(1, Ordering::AcqRel);
        let (heard, threads) = (Arc::clone(&self.heard), Arc::clone(&self.threads));
        let complaints = Arc::clone(&self.complaints);
        let greet = move || {
            let said = caught_io(|| hear(connection));
            let still = lock(&heard).remove(&id).is_some();
            match said {
                // Somebody whose hello is known does not have to go any more.
                Ok(Some(said)) if still => take(said),
                Ok(None) => {}
                Ok(Some(_)) => complaints.about(&who, "it took too long while others waited"),
                Err(error) => complaints.about(&who, &error.to_string()),
            }
            threads.fetch_sub(1, Ordering::AcqRel);
            left();
        };
        if let Err(error) = vmferry_thread::spawn(vmferry_thread::Role::Listener, "greet", greet) {
            lock(&self.heard).remove(&id);
            self.threads.fetch_sub(1, Ordering::AcqRel);
            self.complaints.about("", &format!("no thread for it: {error}"));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is said about strangers: some lines at once and one a second, however many there are.
#[derive(Debug)]
struct Complaints(Mutex<Said>);

#[derive(Debug)]
struct Said {
    /// Lines that may be written now.
    may: u32,
    since: Instant,
    /// Connections of which nothing was written.
    kept_back: u64,
}

const LINES_AT_ONCE: u32 = 16;
const LINE_EVERY: Duration = Duration::from_secs(1);

impl Default for Complaints {
    fn default() -> Self {
        Self(Mutex::new(Said { may: LINES_AT_ONCE, since: Instant::now(), kept_back: 0 }))
    }
}

impl Complaints {
    fn about(&self, peer: &str, why: &str) {
        let allowed = lock(&self.0).next_line(Instant::now());
        match allowed {
            None => {}
            Some(0) => tracing::warn!("a connection was closed: {peer}: {why}"),
            Some(others) => {
                tracing::warn!("a connection was closed: {peer}: {why} (and {others} others before it)")
            }
        }
    }
}

impl Said {
    /// Returns how many connections no line was written of since the last line, or `None` if no line may be written now.
    fn next_line(&mut self, now: Instant) -> Option<u64> {
        while self.may < LINES_AT_ONCE && now.saturating_duration_since(self.since) >= LINE_EVERY {
            self.may += 1;
            self.since += LINE_EVERY;
        }
        if self.may == LINES_AT_ONCE {
            self.since = now;
        }
        if self.may == 0 {
            self.kept_back += 1;
            return None;
        }
        self.may -= 1;
        Some(std::mem::take(&mut self.kept_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::sync::mpsc::channel;
    use vmferry_testkit::{PATIENCE, wait};

    /// A connection whose other end is `.0`.
    fn pair() -> (Socket, Socket) {
        Socket::pair(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap()
    }

    fn hung_up(socket: &mut Socket) -> bool {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        matches!(socket.read(&mut [0]), Ok(0))
    }

    /// A listener that nobody comes to, as what is silent is looked at.
    fn look(greeting: &mut Greeting, nobody: &Socket) {
        let ending = Ending::new().unwrap();
        assert!(!greeting.wait([Some(nobody.as_fd()), None], &ending, Some(Duration::ZERO)).contains(&true));
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
    fn the_silent_give_way_and_whoever_speaks_is_heard() {
        let (mut greeting, (nobody, _keep)) = (Greeting::default(), pair());
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
        let (sender, heard) = channel();
        // However long it took to come here: none of them is late.
        greeting.silent.iter_mut().for_each(|silent| silent.until = Some(Instant::now() + PATIENCE));
        look(&mut greeting, &nobody);
        greeting.hear(read_one, move |byte| sender.send(byte).unwrap(), || ());
        assert_eq!(heard.recv_timeout(PATIENCE), Ok(7));
        // The one before it had to go, and no other.
        assert!(hung_up(&mut others[10]));
        assert_eq!(greeting.silent.len(), MOST_SILENT - 1);
    }

    #[test]
    fn those_that_stop_in_the_middle_of_a_word_keep_nobody_out() {
        let (mut greeting, (nobody, _keep)) = (Greeting::default(), pair());
        let mut others = Vec::new();
        for _ in 0..MOST_GREETING {
            let (other, own) = pair();
            other.send(&[0]).unwrap();
            greeting.add(connection(own, "half"));
            others.push(other);
        }
        let (sender, heard) = channel();
        let take = move |byte| sender.send(byte).unwrap();
        look(&mut greeting, &nobody);
        greeting.hear(read_one, take.clone(), || ());
        assert_eq!(greeting.threads.load(Ordering::Acquire), MOST_GREETING);
        let (source, own) = pair();
        source.send(&[0, 9]).unwrap();
        greeting.add(connection(own, "source"));
        wait("a free thread", || {
            look(&mut greeting, &nobody);
            greeting.hear(read_one, take.clone(), || ());
            greeting.silent.is_empty()
        });
        assert_eq!(heard.recv_timeout(PATIENCE), Ok(9));
        assert!(hung_up(&mut others[0]));
    }

    #[test]
    fn raised_ending_ends_a_wait_that_has_no_time_limit() {
        let (waited, done) = channel();
        std::thread::spawn(move || {
            let (mut greeting, (nobody, _keep)) = (Greeting::default(), pair());
            let ending = Ending::new().unwrap();
            ending.end();
            waited.send(greeting.wait([Some(nobody.as_fd())], &ending, None)).unwrap();
        });
        // Nothing else ends that wait.
        assert_eq!(done.recv_timeout(PATIENCE), Ok([false]));
    }

    #[test]
    fn panic_while_a_hello_is_read_frees_the_place() {
        let (mut greeting, (nobody, _keep)) = (Greeting::default(), pair());
        let (other, own) = pair();
        other.send(&[0]).unwrap();
        greeting.add(connection(own, "odd"));
        look(&mut greeting, &nobody);
        let (sender, heard) = channel::<()>();
        let (gone, left) = channel();
        let hear = |_| -> io::Result<Option<()>> { panic!("a defect") };
        greeting.hear(hear, move |()| sender.send(()).unwrap(), move || gone.send(()).unwrap());
        // The thread drops `take`, and the sender with it, when it has ended or almost has.
        assert!(heard.recv_timeout(PATIENCE).is_err());
        assert!(lock(&greeting.heard).is_empty());
        assert_eq!(left.recv_timeout(PATIENCE), Ok(()));
        assert!(greeting.is_idle());
    }

    #[test]
    fn silence_ends() {
        let mut greeting = Greeting::default();
        let (mut other, own) = pair();
        greeting.add(connection(own, "late"));
        greeting.silent[0].until = Some(Instant::now());
        let (nobody, _keep) = pair();
        look(&mut greeting, &nobody);
        assert!(greeting.silent.is_empty() && hung_up(&mut other));
        // One that the caller handed over is waited for, and keeps none behind it.
        let ((_lasting, own), (mut other, late)) = (pair(), pair());
        greeting.add(Connection { lasting: true, ..connection(own, "lasting") });
        greeting.add(connection(late, "late"));
        assert_eq!(greeting.silent[0].until, None);
        greeting.silent[1].until = Some(Instant::now());
        look(&mut greeting, &nobody);
        assert!(greeting.silent.len() == 1 && hung_up(&mut other));
    }

    #[test]
    fn few_lines_are_written_of_many_connections() {
        let Complaints(said) = Complaints::default();
        let mut said = said.into_inner().unwrap();
        let began = said.since;
        let mut lines =
            |connections, at| (0..connections).filter_map(|_| said.next_line(began + at)).collect::<Vec<_>>();
        assert_eq!(lines(1000, Duration::ZERO), [0; LINES_AT_ONCE as usize]);
        assert_eq!(lines(1000, LINE_EVERY / 2), [0; 0]);
        assert_eq!(lines(1000, LINE_EVERY), [1000 - u64::from(LINES_AT_ONCE) + 1000]);
        assert_eq!(lines(1000, LINE_EVERY * 3).len(), 2);
        assert_eq!(lines(1000, LINE_EVERY * 100).len(), LINES_AT_ONCE as usize, "no more for a long silence");
    }
}
