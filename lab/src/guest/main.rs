//! Program that runs in a Linux guest of the lab and checks from inside that nothing is lost.
//!
//! The program reads the clocks, writes and checks memory, keeps a file with a known checksum,
//! writes records to a disk, answers on a socket, and reads the kernel's log. It prints a report to
//! the console once a second, and on request (`lab-guest report`).

#![forbid(unsafe_code)]

mod clock;
mod fresh;
mod kept;
mod kmsg;
mod records;
mod server;
mod stress;

use anyhow::{Context, Result, bail};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use vmferry_lab::guest_report::{GuestReport, MARK};

/// Socket on which the serving process answers `report` and other requests.
const SOCKET: &str = "/run/lab.sock";
/// Interval of unrequested reports.
const EVERY: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve"] => serve(),
        ["report"] => request_report("report"),
        ["verify"] => request_report("verify"),
        ["stop-records"] => request_report("stop-records"),
        ["fresh", mib] => fresh::check(mib),
        _ => Err(anyhow::anyhow!("usage: lab-guest serve | report | verify | stop-records | fresh MIB")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("lab-guest: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// All checks that run.
struct Work {
    clock: clock::Clock,
    stress: Option<stress::Stress>,
    kept: kept::Kept,
    records: Option<records::Records>,
    server: Option<server::Server>,
}

impl Work {
    fn begin(options: &Options) -> Result<Self> {
        Ok(Self {
            clock: clock::Clock::start()?,
            stress: options.stress.map(stress::Stress::start).transpose()?,
            kept: kept::Kept::write()?,
            records: options.records.as_deref().map(records::Records::start).transpose()?,
            server: options.port.map(server::Server::start).transpose()?,
        })
    }

    /// Returns a report. With `whole`, all kept data is checked first, which takes a while.
    fn report(&self, whole: bool) -> Result<GuestReport> {
        let mut report = GuestReport { cpus: cpus(), whole, ..GuestReport::default() };
        if let Some(stress) = &self.stress {
            stress.fill(&mut report, whole);
        }
        if whole {
            report.kept_good = Some(self.kept.check());
        }
        if let Some(records) = &self.records {
            records.fill(&mut report, whole);
        }
        if let Some(server) = &self.server {
            server.fill(&mut report);
        }
        report.complaints = kmsg::complaints()?;
        // The clock comes last: the reader compares it with its own clock, and the checks above
        // take a while.
        self.clock.fill(&mut report, whole);
        Ok(report)
    }
}

/// Options of the lab on the kernel's command line.
#[derive(Debug, Default)]
struct Options {
    /// Bytes of memory that are written and checked.
    stress: Option<usize>,
    /// File for records that must last.
    records: Option<String>,
    /// TCP port of the echo server.
    port: Option<u16>,
}

impl Options {
    fn parse(line: &str) -> Result<Self> {
        let mut options = Self::default();
        for word in line.split_whitespace() {
            let Some((name, value)) = word.split_once('=') else { continue };
            let number = || value.parse::<usize>().with_context(|| format!("{word}: not a number"));
            match name {
                "lab.stress_mib" => options.stress = Some(number()? << 20),
                "lab.records" => options.records = Some(value.to_owned()),
                "lab.port" => {
                    options.port = Some(value.parse().with_context(|| format!("{word}: not a port"))?)
                }
                _ => {}
            }
        }
        Ok(options)
    }
}

fn serve() -> Result<()> {
    let options = Options::parse(&std::fs::read_to_string("/proc/cmdline")?)?;
    let work = Arc::new(Work::begin(&options)?);
    let _ = std::fs::remove_file(SOCKET);
    let listener = UnixListener::bind(SOCKET).with_context(|| format!("cannot listen at {SOCKET}"))?;
    let asked = Arc::clone(&work);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if let Err(error) = answer(stream, &asked) {
                println!("lab-guest: {error:#}");
            }
        }
    });
    println!("LAB-GUEST-UP");
    loop {
        print_report(&work.report(false)?)?;
        std::thread::sleep(EVERY);
    }
}

/// Prints a report as one line with one write, so that no other output interrupts the line.
fn print_report(report: &GuestReport) -> Result<()> {
    let line = format!("{MARK}{}\n", serde_json::to_string(report)?);
    std::io::stdout().write_all(line.as_bytes())?;
    Ok(())
}

fn answer(mut stream: UnixStream, work: &Work) -> Result<()> {
    let mut request = String::new();
    stream.read_to_string(&mut request)?;
    let report = match request.as_str() {
        "report" => work.report(false)?,
        "verify" => work.report(true)?,
        "stop-records" => {
            if let Some(records) = &work.records {
                records.stop();
            }
            work.report(true)?
        }
        other => bail!("unknown request '{other}'"),
    };
    stream.write_all(&serde_json::to_vec(&report)?)?;
    Ok(())
}

fn request_report(what: &str) -> Result<()> {
    let mut stream = UnixStream::connect(SOCKET).context("lab-guest serve does not run")?;
    stream.write_all(what.as_bytes())?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    print_report(&serde_json::from_slice(&text).context("cannot parse the report of lab-guest")?)
}

/// Returns the number of processors that are online.
fn cpus() -> u64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let named = |line: &str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    stat.lines().filter(|line| named(line)).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_the_lab_are_found_among_others() {
        let options =
            Options::parse("console=ttyS0 quiet lab.stress_mib=32 lab.records=/disk/r lab.port=7\n").unwrap();
        assert_eq!((options.stress, options.port), (Some(32 << 20), Some(7)));
        assert_eq!(options.records.as_deref(), Some("/disk/r"));
        assert!(Options::parse("lab.port=no").is_err());
    }
}
