//! Moves a guest over connections that the caller creates. A management daemon, for example, could
//! create such connections for the VMMs of two hosts.
//!
//! A channel is a connected socket. `Connect::connect` passes the source's end to the engine, and
//! `Accept::accept` passes the target's end.
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

/// Daemon that connects source and target. In this example both run in one process, but they may
/// run on two hosts.
#[derive(Debug)]
struct Daemon {
    /// Connections that the target has not accepted yet. For each of them, one byte can be read
    /// from `door`.
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

    /// The engine calls this function for each channel, and again if a postcopy has lost its link.
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

    /// The engine calls this function when `door` is readable. Otherwise the function fails with
    /// `WouldBlock`.
    fn accept(&self) -> io::Result<Option<OwnedFd>> {
        (&self.0.door).read_exact(&mut [0])?;
        Ok(self.0.waiting.lock().expect("no thread panics while it holds the lock").pop_front())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (door, knock) = UnixStream::pair()?;
    door.set_nonblocking(true)?;
    let daemon = Arc::new(Daemon { waiting: Mutex::default(), door, knock });
    // With `false`, the listener closes connections from other hosts, because the channels are not
    // encrypted. `Listener::through_encrypted` accepts them.
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
    println!("{:.1} ms of downtime, {} writes so far", report.downtime_ms, target.counted());
    Ok(())
}
