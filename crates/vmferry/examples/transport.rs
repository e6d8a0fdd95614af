//! Moves a guest over a socket that the caller has connected, such as one that a management daemon
//! passes. One socket carries all channels of the migration.
//!
//! ```sh
//! cargo run --release -p vmferry --example transport
//! ```

mod machine;

use machine::Machine;
use std::os::unix::net::UnixStream;
use vmferry::{Arrival, Ended, Listener, Migration, MigrationMode, Settings, Sockets, Uri, receive};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The two ends are of one process here. They may be of two hosts.
    let (here, there) = UnixStream::pair()?;
    let mut source = Machine::new(true);
    // The name stands for the socket in messages.
    let listener = Listener::passed(vec![there.into()], &Uri::Fd(vec!["there".into()]), false, None)?;
    let (report, target) = std::thread::scope(|scope| {
        let target = scope.spawn(|| {
            let mut vm = Machine::new(false);
            receive(&mut vm, &listener, &Arrival::new(Settings::default().peer_timeout)).map(|_| vm)
        });
        let migration = Migration::over(Sockets::new(vec![here.into()])?).mode(MigrationMode::Precopy);
        Ok::<_, Box<dyn std::error::Error>>((migration.run(&mut source), target.join()))
    })?;
    let (report, target) = (report?, target.map_err(|_| "the target panicked")??);
    let Some(Ended::Completed) = report.ended() else { return Err(format!("{:?}", report.ended()).into()) };
    println!("{:.1} ms of downtime, {} writes and counting", report.downtime_ms, target.counted());
    Ok(())
}
