//! Moves a guest from one VM to another over a Unix socket, while the guest runs. The VM is in
//! `machine/mod.rs`.
//!
//! ```sh
//! cargo run --release -p vmferry --example embed
//! ```

mod machine;

use machine::Machine;
use vmferry::{Arrival, Ended, Listener, Migration, Settings, Uri, receive};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::temp_dir().join(format!("vmferry-embed-{}", std::process::id()));
    let (mut source, uri) = (Machine::new(true), Uri::Unix(path));
    let listener = Listener::bind(&uri, false)?;
    let (report, target) = std::thread::scope(|scope| {
        // `receive` blocks until the guest runs on the target, so the target has its own thread.
        let target = scope.spawn(|| {
            let mut vm = Machine::new(false);
            receive(&mut vm, &listener, &Arrival::new(Settings::default().peer_timeout)).map(|_| vm)
        });
        (Migration::to(uri).verify(true).run(&mut source), target.join())
    });
    let (report, target) = (report?, target.map_err(|_| "the target panicked")??);
    let Some(Ended::Completed) = report.ended() else { return Err(format!("{:?}", report.ended()).into()) };
    println!("{:.1} ms of downtime, {} writes so far", report.downtime_ms, target.counted());
    Ok(())
}
