//! QEMU's balloon, of a microvm, whose virtio-mmio devices the measuring guest has drivers for.

use std::fs;
use std::time::{Duration, Instant};

use vmferry_guest_abi::{GuestArgs, InflateBy, Inflation as Inflate, Line, ReportMode};

use super::error::QemuError;
use super::machine::{Machine, Setup};
use super::serial::Serial;
use super::{POLL, QemuSpec, READY_LIMIT, available, watch};
use crate::free_page::{Inflation, Learned, MoveSpec, Moved};
use crate::link::Link;

/// A machine with a balloon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Balloon {
    /// Whether it asks for free pages when the guest moves.
    pub hints: bool,
    /// What else the guest is told.
    pub guest_args: String,
}

/// What makes a machine one with a balloon, in place of a PC.
pub(super) fn arguments(balloon: &Balloon) -> Vec<String> {
    let hints = if balloon.hints { "on" } else { "off" };
    [
        "-machine",
        "microvm,pit=on,pic=on,rtc=on",
        // Without this its devices are those of before virtio 1.0.
        "-global",
        "virtio-mmio.force-legacy=false",
        // Hints are taken by a thread of their own; QEMU refuses them without.
        "-object",
        "iothread,id=io",
        "-device",
    ]
    .into_iter()
    .map(str::to_owned)
    .chain([format!("virtio-balloon-device,id=balloon,free-page-hint={hints},iothread=io")])
    .collect()
}

/// What a guest is told besides its workload. A microvm has no timer to measure the processors' clock by.
fn guest_args(tsc_khz: Option<u32>) -> GuestArgs {
    let idle = vmferry_guest_abi::Workload::new(vmferry_guest_abi::Pattern::Idle);
    GuestArgs { report: ReportMode::Off, tsc_khz, ..GuestArgs::new(idle) }
}

/// The words of `args` but for those that are said anyway.
fn words(args: &GuestArgs) -> String {
    let line = args.to_string();
    let own = |word: &&str| !word.starts_with("workload=") && !word.starts_with("stats=");
    line.split(' ').filter(own).collect::<Vec<_>>().join(" ")
}

/// Boots an idle guest of `memory` bytes that gives `inflate` bytes to its balloon by so many page numbers a request.
///
/// # Errors
/// [`QemuError::Unavailable`] when QEMU or KVM cannot be used here: skip the case. Everything else is a failure.
pub fn inflate(memory: u64, inflate: u64, pages: u32, tsc_khz: Option<u32>) -> Result<Learned, QemuError> {
    available()?;
    let inflation = Inflate { bytes: inflate, by: InflateBy::Pages(pages) };
    let args = words(&GuestArgs { inflate: Some(inflation), ..guest_args(tsc_khz) });
    let balloon = Some(Balloon { hints: false, guest_args: args });
    let spec = QemuSpec { memory, workload: "idle,data=4K".into(), balloon, ..QemuSpec::default() };
    let folder = tempfile::Builder::new()
        .prefix("vmferry-bench-")
        .tempdir()
        .map_err(QemuError::io("create a folder for its sockets"))?;
    let kernel = folder.path().join("guest.elf");
    fs::write(&kernel, vmferry_guest_image::ELF).map_err(QemuError::io("write the guest's file"))?;
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

/// None: the guest did not get as far as it should.
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

/// Moves the guest of `spec` once, with or without hints.
///
/// # Errors
/// As [`inflate`].
pub fn move_freed(spec: &MoveSpec, hints: bool, tsc_khz: Option<u32>) -> Result<Moved, QemuError> {
    let balloon = Some(Balloon { hints, guest_args: words(&guest_args(tsc_khz)) });
    let qemu = QemuSpec {
        memory: spec.memory,
        workload: spec.workload(),
        balloon,
        settle: Duration::from_millis(300),
        ..QemuSpec::default()
    };
    let (result, _) = watch(&qemu)?;
    Ok(Moved { result, first_page: None, skipped_pages: None, freed: spec.alloc })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_is_told_its_clock_and_nothing_twice() {
        let args = GuestArgs {
            inflate: Some(Inflate { bytes: 7 << 30, by: InflateBy::Pages(256) }),
            ..guest_args(Some(2_000_000))
        };
        assert_eq!(words(&args), "tsc_khz=2000000 report=off inflate=7G,by=256");
    }

    #[test]
    fn an_inflation_that_stopped_early_is_none() {
        let line = |pages| Line::Inflated { pages, requests: 2, alloc_us: 3, send_us: 4, total_us: 5 };
        assert_eq!(learned(&line(8), 8).unwrap().total, Duration::from_micros(5));
        assert_eq!(learned(&line(7), 8), None);
    }
}
