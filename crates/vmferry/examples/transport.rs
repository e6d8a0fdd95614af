//! Moves a guest over connections that the caller makes, as a management daemon makes them for the VMMs
//! of two hosts. A channel is a connected socket: the source's end goes to the engine from
//! `Connect::connect`, and the target's end from `Accept::accept`.
//!
//! ```sh
//! cargo run --release -p vmferry --example transport
//! ```

mod machine;

use machine::Machine;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use vmferry::{Accept, Arrival, Attempt, Connect, Connected, Ended, Listener, Migration, Settings, receive};

/// A daemon that connects the two sides. Both are of one process here. They may be of two hosts.
#[derive(Debug)]
struct Daemon {
    /// Connections that the target has yet to take. `door` has one byte for each.
    waiting: Mutex<VecDeque<OwnedFd>>,
    door: UnixStream,
    knock: UnixStream,
}

#[derive(Debug)]
struct SourceEnd(Arc<Daemon>);

#[derive(Debug)]
struct TargetEnd(Arc<Daemon>);

impl Connect for SourceEnd {
    fn name(&self) -> String {
        "the daemon".into()
    }

    /// A postcopy whose link is lost comes here again.
    fn connect(&self, attempt: &Attempt<'_>) -> io::Result<Connected> {
        let (here, there) = UnixStream::pair()?;
        println!("a connection for {:?} {}", attempt.role(), attempt.index());
        self.0.waiting.lock().expect("no thread panics while it holds the lock").push_back(there.into());
        (&self.0.knock).write_all(&[0])?;
        // `Connected::All` would carry all channels on this connection.
        Ok(here.into())
    }
}

impl AsFd for TargetEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.door.as_fd()
    }
}

impl Accept for TargetEnd {
    fn name(&self) -> String {
        "the daemon".into()
    }

    /// Called when `door` is readable. It fails with `WouldBlock` when it is not.
    fn accept(&self) -> io::Result<Option<OwnedFd>> {
        (&self.0.door).read_exact(&mut [0])?;
        Ok(self.0.waiting.lock().expect("no thread panics while it holds the lock").pop_front())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (door, knock) = UnixStream::pair()?;
    door.set_nonblocking(true)?;
    let daemon = Arc::new(Daemon { waiting: Mutex::default(), door, knock });
    // `false`: no connection of another host is taken. With `Listener::through_encrypted` it may be.
    let listener = Listener::through(TargetEnd(Arc::clone(&daemon)), false)?;
    let mut source = Machine::new(true);
    let (report, target) = std::thread::scope(|scope| {
        let target = scope.spawn(|| {
            let mut vm = Machine::new(false);
            receive(&mut vm, &listener, &Arrival::new(Settings::default().peer_timeout)).map(|_| vm)
        });
        let migration = Migration::through(SourceEnd(daemon)).channels(3);
        (migration.run(&mut source), target.join())
    });
    let (report, target) = (report?, target.map_err(|_| "the target panicked")??);
    let Some(Ended::Completed) = report.ended() else { return Err(format!("{:?}", report.ended()).into()) };
    println!("{:.1} ms of downtime, {} writes and counting", report.downtime_ms, target.counted());
    Ok(())
}
