//! Scenario of a TCP connection that survives the move of its guest.

use super::{Lab, Rig, Verdict};
use crate::pace::{Limit, stretched};
use crate::scenarios::vm::Guest;
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const BRIDGE: &str = "labbr0";
pub(super) const TAPS: [&str; 2] = ["labtap0", "labtap1"];
const HOST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
pub(super) const GUEST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
pub(super) const PORT: u16 = 7000;
/// Time of silence after which the connection counts as lost. It is longer than any move.
const SILENCE: Duration = Duration::from_secs(30);

/// Checks that numbered lines to the guest come back in order over one connection, before and after
/// a move.
pub(super) fn tcp(lab: &mut Lab) -> Result<Verdict> {
    if !lab.plan.emulated {
        return Ok(Verdict::Skipped("network interfaces are created only in the emulated machine".into()));
    }
    let guest = |tap: &str| Guest {
        dirty_ring: true,
        options: format!("lab.stress_mib=16 lab.address={GUEST} lab.port={PORT}"),
        devices: vec!["--net".into(), format!("tap={tap}")],
        ..Guest::usual()
    };
    let _bridge = Bridge::make()?;
    let mut rig = Rig::new(lab);
    let target = rig.awaiting(&guest(TAPS[1]))?;
    let source = rig.boot(&guest(TAPS[0]))?;
    let talk = Talk::start(SocketAddr::from((GUEST, PORT)))?;
    talk.progresses(10)?;
    rig.carry(&source, &target, &["--mode", "precopy", "--tracker", "ring", "--verify"])?;
    talk.progresses(10)?;
    let guest_report = target.guest_report()?;
    let (lines, longest) = talk.finish()?;
    ensure!(guest_report.echoes > 0, "the guest echoed no line");
    rig.lab.figure("lines", lines);
    rig.lab.figure("longest_silence_ms", longest);
    rig.power_off(&target)?;
    Ok(Verdict::Passed)
}

/// Bridge with a port for each side of the move and an address of this host.
pub(super) struct Bridge;

impl Bridge {
    pub(super) fn make() -> Result<Self> {
        let bridge = Self;
        run(&["brctl", "addbr", BRIDGE])?;
        for tap in TAPS {
            run(&["tunctl", "-t", tap])?;
            run(&["brctl", "addif", BRIDGE, tap])?;
            run(&["ip", "link", "set", tap, "up"])?;
        }
        run(&["ip", "addr", "add", &format!("{HOST}/24"), "dev", BRIDGE])?;
        run(&["ip", "link", "set", BRIDGE, "up"])?;
        Ok(bridge)
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        for tap in TAPS {
            let _ = run(&["tunctl", "-d", tap]);
        }
        let _ = run(&["ip", "link", "set", BRIDGE, "down"]);
        let _ = run(&["brctl", "delbr", BRIDGE]);
    }
}

fn run(command: &[&str]) -> Result<()> {
    let output = Command::new(command[0])
        .args(&command[1..])
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", command[0]))?;
    if !output.status.success() {
        bail!("`{}` failed: {}", command.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Thread that sends lines to the guest all the time.
pub(super) struct Talk {
    stop: Arc<AtomicBool>,
    lines: Arc<AtomicU64>,
    thread: JoinHandle<Result<f64>>,
}

impl Talk {
    pub(super) fn start(address: SocketAddr) -> Result<Self> {
        let silence = stretched(SILENCE);
        let stream = TcpStream::connect_timeout(&address, silence).context("cannot connect to the guest")?;
        stream.set_read_timeout(Some(silence))?;
        stream.set_nodelay(true)?;
        let (stop, lines) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&lines));
        let thread = std::thread::spawn(move || talk(&stream, &stopped, &counted));
        Ok(Self { stop, lines, thread })
    }

    /// Waits for `more` more lines.
    pub(super) fn progresses(&self, more: u64) -> Result<()> {
        let wanted = self.lines.load(Ordering::Acquire) + more;
        let limit = Limit::new(SILENCE);
        while self.lines.load(Ordering::Acquire) < wanted {
            ensure!(!self.thread.is_finished() && !limit.is_over(), "the connection to the guest is lost");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Returns the number of lines, and the longest wait for one in milliseconds.
    pub(super) fn finish(self) -> Result<(u64, f64)> {
        self.stop.store(true, Ordering::Release);
        let longest =
            self.thread.join().map_err(|_| anyhow::anyhow!("the thread that sends lines panicked"))??;
        Ok((self.lines.load(Ordering::Acquire), longest))
    }
}

fn talk(stream: &TcpStream, stop: &AtomicBool, lines: &AtomicU64) -> Result<f64> {
    let mut answers = BufReader::new(stream);
    let mut longest = 0.0_f64;
    let mut line = String::new();
    while !stop.load(Ordering::Acquire) {
        let number = lines.load(Ordering::Acquire);
        let began = Instant::now();
        (&mut &*stream).write_all(format!("line {number}\n").as_bytes())?;
        line.clear();
        answers.read_line(&mut line).context("no answer")?;
        ensure!(line == format!("line {number}\n"), "line {number} came back as {line:?}");
        longest = longest.max(began.elapsed().as_secs_f64() * 1e3);
        lines.store(number + 1, Ordering::Release);
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(longest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn talk_detects_wrong_answers() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let stream = listener.accept().unwrap().0;
            let mut lines = BufReader::new(&stream);
            let mut line = String::new();
            for number in 0..4 {
                line.clear();
                lines.read_line(&mut line).unwrap();
                let answer = if number == 3 { "line 7\n" } else { &line };
                (&mut &stream).write_all(answer.as_bytes()).unwrap();
            }
        });
        let talk = Talk::start(address).unwrap();
        talk.progresses(2).unwrap();
        server.join().unwrap();
        assert!(talk.progresses(10).is_err());
        assert!(talk.finish().unwrap_err().to_string().contains("came back as"));
    }
}
