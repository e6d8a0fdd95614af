//! The other machine of the lab: its desk, behind a TCP connection on the link between the two.
//!
//! One request and one answer a connection, both JSON, each ended by closing that direction. Only the lab's machines are on this link.

use crate::desk::{Answer, Desk, Place, Request};
use crate::pace::{Limit, stretched};
use anyhow::{Context, Result, bail};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Where the other machine's agent listens.
pub const PORT: u16 = 7100;
/// How long an answer may take: as long as a migration that it runs.
const PATIENCE: Duration = Duration::from_secs(240);
/// How long the link itself may take: if it is not there by then, it does not come.
const CONNECT: Duration = Duration::from_secs(10);

/// Answers requests, for ever.
///
/// # Errors
/// If nothing can listen here.
pub fn serve(address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
    println!("LAB serves at {}", listener.local_addr()?);
    let mut desk = Desk::default();
    // On this thread alone: what it starts ends with it, the thread, and not only with the process.
    for stream in listener.incoming() {
        if let Err(error) = stream.map_err(Into::into).and_then(|stream| answer(stream, &mut desk)) {
            println!("LAB cannot answer: {error:#}");
        }
    }
    Ok(())
}

fn answer(mut stream: TcpStream, desk: &mut Desk) -> Result<()> {
    stream.set_read_timeout(Some(stretched(CONNECT)))?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    let request = serde_json::from_slice(&text).context("not a request")?;
    let answer = desk.handle(request).unwrap_or_else(|error| Answer::Failed(format!("{error:#}")));
    stream.write_all(&serde_json::to_vec(&answer)?)?;
    Ok(())
}

/// The other machine.
#[derive(Debug)]
pub struct There {
    address: SocketAddr,
}

impl There {
    /// The machine whose agent listens at `address`; waits until it does.
    ///
    /// # Errors
    /// If it does not within `patience`.
    pub fn reach(address: SocketAddr, patience: Duration) -> Result<Self> {
        let limit = Limit::new(patience);
        let there = Self { address };
        loop {
            match there.ask(Request::Run { command: vec!["true".into()] }) {
                Ok(_) => return Ok(there),
                Err(error) if limit.is_over() => {
                    return Err(error)
                        .with_context(|| format!("the other machine ({address}) does not answer"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }
}

impl Place for There {
    fn ask(&self, request: Request) -> Result<Answer> {
        let mut stream = TcpStream::connect_timeout(&self.address, stretched(CONNECT))?;
        stream.set_read_timeout(Some(stretched(PATIENCE)))?;
        stream.write_all(&serde_json::to_vec(&request)?)?;
        stream.shutdown(Shutdown::Write)?;
        let mut text = Vec::new();
        stream.read_to_end(&mut text)?;
        match serde_json::from_slice(&text).context("the other machine said nothing")? {
            Answer::Failed(why) => bail!("on the other machine: {why}"),
            answer => Ok(answer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_side_does_what_is_asked_and_says_what_it_cannot() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let mut desk = Desk::default();
            for _ in 0..2 {
                answer(listener.accept().unwrap().0, &mut desk).unwrap();
            }
        });
        let there = There::reach(address, Duration::from_secs(5)).unwrap();
        let error = there.ask(Request::Ended { id: 9 }).unwrap_err();
        assert!(error.to_string().contains("there is no program 9"), "{error}");
        server.join().unwrap();
    }
}
