//! The other machine of the lab, behind a TCP connection on the link between the two machines.
//!
//! Each connection carries one request and one answer, both as JSON. Closing a direction of the
//! connection ends the text in that direction. Only the lab's machines are on this link.

use crate::pace::{Limit, stretched};
use crate::programs::{Answer, ProgramHost, ProgramTable, Request};
use anyhow::{Context, Result, bail};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Port on which the other machine's agent listens.
pub const PORT: u16 = 7100;
/// Longest time until an answer, which may wait for a whole migration.
const PATIENCE: Duration = Duration::from_secs(240);
/// Longest time until a connection over the link is open.
const CONNECT: Duration = Duration::from_secs(10);

/// Answers requests without end.
///
/// # Errors
///
/// Fails if the agent cannot listen at `address`.
pub fn serve(address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
    println!("LAB serves at {}", listener.local_addr()?);
    let mut programs = ProgramTable::default();
    // All requests are served on this thread, because programs end with the thread that started
    // them, and not only with the process.
    for stream in listener.incoming() {
        if let Err(error) = stream.map_err(Into::into).and_then(|stream| answer(stream, &mut programs)) {
            println!("LAB cannot answer: {error:#}");
        }
    }
    Ok(())
}

fn answer(mut stream: TcpStream, programs: &mut ProgramTable) -> Result<()> {
    stream.set_read_timeout(Some(stretched(CONNECT)))?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    let request = serde_json::from_slice(&text).context("not a request")?;
    let answer = programs.handle(request).unwrap_or_else(|error| Answer::Failed(format!("{error:#}")));
    stream.write_all(&serde_json::to_vec(&answer)?)?;
    Ok(())
}

/// The other machine.
#[derive(Debug)]
pub struct RemoteHost {
    address: SocketAddr,
}

impl RemoteHost {
    /// Returns the machine whose agent listens at `address`, after it has answered.
    ///
    /// # Errors
    ///
    /// Fails if the agent does not answer within `patience`.
    pub fn reach(address: SocketAddr, patience: Duration) -> Result<Self> {
        let limit = Limit::new(patience);
        let remote = Self { address };
        loop {
            match remote.execute(Request::Run { command: vec!["true".into()] }) {
                Ok(_) => return Ok(remote),
                Err(error) if limit.is_over() => {
                    return Err(error)
                        .with_context(|| format!("the other machine ({address}) does not answer"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }
}

impl ProgramHost for RemoteHost {
    fn execute(&self, request: Request) -> Result<Answer> {
        let mut stream = TcpStream::connect_timeout(&self.address, stretched(CONNECT))?;
        stream.set_read_timeout(Some(stretched(PATIENCE)))?;
        stream.write_all(&serde_json::to_vec(&request)?)?;
        stream.shutdown(Shutdown::Write)?;
        let mut text = Vec::new();
        stream.read_to_end(&mut text)?;
        match serde_json::from_slice(&text).context("cannot parse the other machine's answer")? {
            Answer::Failed(why) => bail!("on the other machine: {why}"),
            answer => Ok(answer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_machine_carries_out_requests_and_reports_errors() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let mut programs = ProgramTable::default();
            for _ in 0..2 {
                answer(listener.accept().unwrap().0, &mut programs).unwrap();
            }
        });
        let remote = RemoteHost::reach(address, Duration::from_secs(5)).unwrap();
        let error = remote.execute(Request::Ended { id: 9 }).unwrap_err();
        assert!(error.to_string().contains("there is no program 9"), "{error}");
        server.join().unwrap();
    }
}
