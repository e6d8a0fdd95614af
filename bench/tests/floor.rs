//! The floor between two real processes. A test without the usual harness, because its executable is the
//! receiver too, and the harness talks on standard output.

use std::net::TcpStream;
use std::time::Duration;

use vmferry_bench::floor::{self, FloorError, RECEIVER_SUBCOMMAND, ReceiverCommand};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.split_first() {
        Some((first, rest)) if first == RECEIVER_SUBCOMMAND => return Ok(floor::receiver_main(rest)?),
        // A receiver that says that it has everything, and has not.
        Some((first, rest)) if first == "liar" => return lie(rest),
        // `cargo test -- --list` asks every test executable what it holds.
        Some((first, _)) if first == "--list" => {
            println!("floor: test");
            return Ok(());
        }
        _ => {}
    }
    copies_arrive_whole()?;
    a_copy_that_did_not_arrive_is_found()?;
    println!("floor: ok");
    Ok(())
}

fn copies_arrive_whole() -> Result<(), Box<dyn std::error::Error>> {
    let receiver = ReceiverCommand::this_executable()?;
    for (bytes, streams) in [(1u64, 1u32), (64 << 20, 1), ((64 << 20) + 1, 3)] {
        let result = floor::run(bytes, streams, &receiver)?;
        assert!(result.bytes >= bytes && result.bytes < bytes + 4096 * u64::from(streams), "{result:?}");
        assert!(result.elapsed > Duration::ZERO && result.gbytes_per_s() > 0.0, "{result:?}");
        assert!(result.cpu_sender > Duration::ZERO && result.cpu_receiver > Duration::ZERO, "{result:?}");
    }
    Ok(())
}

fn a_copy_that_did_not_arrive_is_found() -> Result<(), Box<dyn std::error::Error>> {
    let liar = ReceiverCommand { program: std::env::current_exe()?, args: vec!["liar".into()] };
    match floor::run(1 << 20, 1, &liar) {
        Err(FloorError::Receiver(words)) if words.contains("255 right pages") => Ok(()),
        other => Err(format!("a missing page was not noticed: {other:?}").into()),
    }
}

/// Takes everything, and admits to one page less.
fn lie(args: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    use std::io::{Read, Write};
    let bytes: usize = args.get(1).ok_or("no size")?.parse()?;
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    println!("PORT {}", listener.local_addr()?.port());
    let (mut socket, _): (TcpStream, _) = listener.accept()?;
    socket.read_exact(&mut vec![0; bytes + 12])?;
    socket.write_all(&[1])?;
    println!("CPU 1\nPAGES {}", bytes / 4096 - 1);
    Ok(())
}
