//! QEMU's balloon in a microvm. The bare-metal guest has drivers for its virtio-mmio devices.

use std::time::{Duration, Instant};

use vmferry_guest_abi::{GuestArgs, InflateBy, Inflation as Inflate, Line, ReportMode};

use super::error::QemuError;
use super::machine::{Machine, Setup};
use super::serial::Serial;
use super::{POLL, QemuSpec, READY_LIMIT, available, watch};
use crate::free_page::{Inflation, Learned, MoveSpec, Moved};
use crate::link::Link;

/// Settings of a machine with a balloon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Balloon {
    /// Set if QEMU asks for free pages when the guest moves.
    pub hints: bool,
    /// Set if QEMU takes back the pages that the guest reports as unused.
    pub reporting: bool,
    /// Guest arguments besides the workload.
    pub guest_args: String,
}

/// Returns the QEMU options of a microvm with a balloon. They replace those of a PC.
pub(super) fn arguments(balloon: &Balloon) -> Vec<String> {
    let switch = |on: bool| if on { "on" } else { "off" };
    let (hints, reporting) = (switch(balloon.hints), switch(balloon.reporting));
    let device = format!(
        "virtio-balloon-device,id=balloon,free-page-hint={hints},free-page-reporting={reporting},iothread=io"
    );
    [
        "-machine",
        "microvm,pit=on,pic=on,rtc=on",
        // Without this option the devices follow the specification before virtio 1.0.
        "-global",
        "virtio-mmio.force-legacy=false",
        // A separate thread takes the hints. QEMU refuses hints without one.
        "-object",
        "iothread,id=io",
        "-device",
    ]
    .into_iter()
    .map(str::to_owned)
    .chain([device])
    .collect()
}

/// Returns the guest arguments besides the workload. A microvm has no timer to measure the
/// processor's clock with.
fn guest_args(tsc_khz: Option<u32>) -> GuestArgs {
    let idle = vmferry_guest_abi::Workload::new(vmferry_guest_abi::Pattern::Idle);
    GuestArgs { report: ReportMode::Off, tsc_khz, ..GuestArgs::new(idle) }
}

/// Returns the arguments of `args` without the workload and the statistics, which are passed
/// anyway.
fn words(args: &GuestArgs) -> String {
    let line = args.to_string();
    let own = |word: &&str| !word.starts_with("workload=") && !word.starts_with("stats=");
    line.split(' ').filter(own).collect::<Vec<_>>().join(" ")
}

/// Boots an idle guest of `memory` bytes that gives `inflate` bytes to its balloon, with `pages`
/// page numbers per request.
///
/// # Errors
///
/// Fails with [`QemuError::Unavailable`] if QEMU or KVM cannot be used on this host. The caller
/// then skips the case. Every other error is a failure.
pub fn inflate(memory: u64, inflate: u64, pages: u32, tsc_khz: Option<u32>) -> Result<Learned, QemuError> {
    available()?;
    let inflation = Inflate { bytes: inflate, by: InflateBy::Pages(pages) };
    let args = words(&GuestArgs { inflate: Some(inflation), ..guest_args(tsc_khz) });
    let balloon = Some(Balloon { hints: false, reporting: false, guest_args: args });
    let spec = QemuSpec { memory, workload: "idle,data=4K".into(), balloon, ..QemuSpec::default() };
    let (folder, kernel) = super::guest_folder()?;
    let cmdline = super::serial::cmdline(&spec)?;
    let setup = Setup {
        folder: folder.path(),
        kernel: &kernel,
        cmdline: &cmdline,
        spec: &spec,
        link: &Link::Loopback,
    };
    let mut machine = Machine::start("source", false, setup)?;
    let paths = ["source", "destination"].map(|side| Machine::serial_path(folder.path(), side));
    let line = await_inflation(&mut machine, &mut Serial::new(paths))?;
    machine.quit();
    learned(&line, inflate / 4096).ok_or(QemuError::Guest(line.to_string()))
}

fn await_inflation(machine: &mut Machine, serial: &mut Serial) -> Result<Line, QemuError> {
    let deadline = Instant::now() + READY_LIMIT;
    loop {
        machine.still_runs()?;
        serial.read()?;
        if let Some(line) = serial.inflated() {
            return Ok(line);
        }
        if Instant::now() > deadline {
            let detail = format!("{}; {}", machine.last_words(), serial.last_words());
            return Err(QemuError::Timeout {
                side: "source",
                what: "the end of the inflation",
                limit: READY_LIMIT,
                detail,
            });
        }
        std::thread::sleep(POLL);
    }
}

/// Returns the figures of an inflation, or `None` if the guest gave less than `wanted` pages.
fn learned(line: &Line, wanted: u64) -> Option<Learned> {
    let us = Duration::from_micros;
    match *line {
        Line::Inflated { pages, requests, alloc_us, send_us, total_us } if pages == wanted => Some(Learned {
            total: us(total_us),
            pages,
            free_pages: pages,
            inflation: Some(Inflation {
                requests,
                alloc: us(alloc_us),
                send: us(send_us),
                host: None,
                madvise: None,
            }),
            ..Learned::default()
        }),
        _ => None,
    }
}

/// Migrates the guest of `spec` once, with or without hints.
///
/// # Errors
///
/// Fails in the same cases as [`inflate`].
pub fn move_freed(spec: &MoveSpec, hints: bool, tsc_khz: Option<u32>) -> Result<Moved, QemuError> {
    let balloon = Some(Balloon { hints, reporting: false, guest_args: words(&guest_args(tsc_khz)) });
    let qemu = QemuSpec {
        memory: spec.memory,
        workload: spec.workload(),
        balloon,
        warm_up: Duration::from_millis(300),
        ..QemuSpec::default()
    };
    let (result, _) = watch(&qemu)?;
    Ok(Moved { result, freed: spec.alloc, ..Moved::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_arguments_have_the_clock_and_no_duplicates() {
        let args = GuestArgs {
            inflate: Some(Inflate { bytes: 7 << 30, by: InflateBy::Pages(256) }),
            ..guest_args(Some(2_000_000))
        };
        assert_eq!(words(&args), "tsc_khz=2000000 report=off inflate=7G,by=256");
    }

    #[test]
    fn inflation_that_stopped_early_is_none() {
        let line = |pages| Line::Inflated { pages, requests: 2, alloc_us: 3, send_us: 4, total_us: 5 };
        assert_eq!(learned(&line(8), 8).unwrap().total, Duration::from_micros(5));
        assert_eq!(learned(&line(7), 8), None);
    }
}
