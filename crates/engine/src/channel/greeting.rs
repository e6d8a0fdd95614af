//! Connections that have yet to say hello. Anybody can open them, so they are few, they are short, and they give way to newer ones.
//!
//! Who says nothing waits without a thread; who speaks is heard on one. Where there is no room for another, the one that came first has
//! to go: a source speaks as soon as it is connected, and is heard within milliseconds, while whoever is there to take places keeps
//! them. So a listener is not filled up by connections that are held open, however many are tried.

use super::carried::Carried;
use socket2::Socket;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
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
    /// It is a lane of this connection, and not one of its own.
    pub(super) lane_of: Option<Arc<Carried>>,
    /// It was handed over by the caller, who may have connected it long before the source uses it.
    pub(super) lasting: bool,
}

/// A connection of which nothing has come.
#[derive(Debug)]
struct Silent {
    connection: Connection,
    /// `None` for as long as it takes.
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
    /// Waits at most `within` for a connection at one of the `doors` (true), or for something to do
    /// about those that are here. A door of -1 is none.
    pub(super) fn wait<const N: usize>(&mut self, doors: [RawFd; N], within: Duration) -> [bool; N] {
        let now = Instant::now();
        while let Some(late) =
            self.silent.pop_front_if(|silent| silent.until.is_some_and(|until| until <= now))
        {
            self.complaints
                .about(&late.connection.peer, &format!("it said no hello within {HELLO_TIMEOUT:?}"));
        }
        let silent = self.silent.iter().map(|silent| silent.connection.socket.as_raw_fd());
        let fds = doors.into_iter().chain(silent);
        let mut fds: Vec<_> = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
        let within = i32::try_from(within.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: so many of our own, on descriptors that are open; one that fails is ready, too.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, within) };
        let mut ready = fds.iter().map(|fd| ready > 0 && fd.revents != 0);
        let knocks = doors.map(|_| ready.next() == Some(true));
        for (silent, ready) in self.silent.iter_mut().zip(ready) {
            silent.speaks = ready;
        }
        knocks
    }

    /// Takes a new connection in.
    pub(super) fn add(&mut self, connection: Connection) {
        if self.silent.len() >= MOST_SILENT {
            self.make_room();
        }
        let until = (!connection.lasting).then(|| Instant::now() + HELLO_TIMEOUT);
        self.silent.push_back(Silent { connection, until, speaks: false });
    }

    /// Whether there is no connection that has yet to say hello.
    pub(super) fn is_idle(&self) -> bool {
        self.silent.is_empty() && self.threads.load(Ordering::Acquire) == 0
    }

    /// Ends the connection that has been silent for longest, if there is one.
    pub(super) fn make_room(&mut self) {
        if let Some(oldest) = self.silent.pop_front() {
            self.complaints.about(&oldest.connection.peer, "it said nothing while others waited");
        }
    }

    /// Has those that speak heard by `hear`, and what came of it, if anything did, given to `take`.
    pub(super) fn hear<T>(
        &mut self,
        hear: impl Fn(Connection) -> io::Result<Option<T>> + Send + Clone + 'static,
        take: impl Fn(T) + Send + Clone + 'static,
    ) {
        while let Some(at) = self.silent.iter().position(|silent| silent.speaks) {
            if self.threads.load(Ordering::Acquire) >= MOST_GREETING {
                self.hang_up_on_the_longest();
                std::thread::sleep(FULL);
                return;
            }
            let Some(speaker) = self.silent.remove(at) else { return };
            self.start(speaker.connection, hear.clone(), take.clone());
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
            let said = hear(connection);
            let still = lock(&heard).remove(&id).is_some();
            match said {
                // Somebody whose hello is known does not have to go any more.
                Ok(Some(said)) if still => take(said),
                Ok(None) => {}
                Ok(Some(_)) => complaints.about(&who, "it took too long while others waited"),
                Err(error) => complaints.about(&who, &error.to_string()),
            }
            threads.fetch_sub(1, Ordering::AcqRel);
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
        let mut said = lock(&self.0);
        while said.may < LINES_AT_ONCE && said.since.elapsed() >= LINE_EVERY {
            said.may += 1;
            said.since += LINE_EVERY;
        }
        if said.may == LINES_AT_ONCE {
            said.since = Instant::now();
        }
        if said.may == 0 {
            said.kept_back += 1;
            return;
        }
        said.may -= 1;
        let others = std::mem::take(&mut said.kept_back);
        drop(said);
        match others {
            0 => tracing::warn!("a connection was closed: {peer}: {why}"),
            others => {
                tracing::warn!("a connection was closed: {peer}: {why} (and {others} others before it)")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::sync::mpsc::channel;

    /// A connection whose other end is `.0`.
    fn pair() -> (Socket, Socket) {
        Socket::pair(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap()
    }

    fn hung_up(socket: &mut Socket) -> bool {
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        matches!(socket.read(&mut [0]), Ok(0))
    }

    /// A listener that nobody comes to, as what is silent is looked at.
    fn look(greeting: &mut Greeting, nobody: &Socket) {
        assert_eq!(greeting.wait([nobody.as_raw_fd(), -1], Duration::ZERO), [false, false]);
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
        look(&mut greeting, &nobody);
        greeting.hear(read_one, move |byte| sender.send(byte).unwrap());
        assert_eq!(heard.recv_timeout(Duration::from_secs(20)), Ok(7));
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
        greeting.hear(read_one, take.clone());
        assert_eq!(greeting.threads.load(Ordering::Acquire), MOST_GREETING);
        let (source, own) = pair();
        source.send(&[0, 9]).unwrap();
        greeting.add(connection(own, "source"));
        let deadline = Instant::now() + Duration::from_secs(20);
        while !greeting.silent.is_empty() {
            assert!(Instant::now() < deadline, "no thread becomes free");
            look(&mut greeting, &nobody);
            greeting.hear(read_one, take.clone());
        }
        assert_eq!(heard.recv_timeout(Duration::from_secs(20)), Ok(9));
        assert!(hung_up(&mut others[0]));
    }

    #[test]
    fn silence_ends_and_few_lines_are_written_of_many() {
        let mut greeting = Greeting::default();
        let (mut other, own) = pair();
        greeting.add(connection(own, "late"));
        greeting.silent[0].until = Some(Instant::now());
        let (nobody, _keep) = pair();
        look(&mut greeting, &nobody);
        assert!(greeting.silent.is_empty() && hung_up(&mut other));
        // One that the caller handed over is waited for.
        let (_other, own) = pair();
        greeting.add(Connection { lasting: true, ..connection(own, "lasting") });
        assert_eq!(greeting.silent[0].until, None);
        let complaints = Complaints::default();
        for _ in 0..1000 {
            complaints.about("x", "y");
        }
        // At most one line a second more, which this does not take.
        assert!(lock(&complaints.0).kept_back >= 1000 - 2 * u64::from(LINES_AT_ONCE));
    }
}
