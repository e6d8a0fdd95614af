//! Processors that are kept awake while somebody waits for pages.
//!
//! A remote fault wakes five threads in a row, on two hosts: the one that reads the fault, the one that sends the page, the one that
//! places it, and the vCPU (and between them the kernels' network stacks). Nobody computes meanwhile, so the processors fall asleep
//! between two of them, and waking one costs more than all the work that it wakes up for: tens of microseconds where it is deep in
//! sleep, or where it is itself a vCPU that its host must schedule again. Linux lets a process say for how long it may take
//! (`Documentation/power/pm_qos_interface.rst`): whoever may write `/dev/cpu_dma_latency` (by default root) is allowed to ask, so its
//! permissions are the consent of the host's owner.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::OnceLock;

/// The request, made by writing a number of microseconds, and withdrawn when the file is closed.
const DEVICE: &str = "/dev/cpu_dma_latency";
/// Who puts processors to sleep.
const DRIVER: &str = "/sys/devices/system/cpu/cpuidle/current_driver";

/// As long as waking up may take on hardware, in microseconds: the shallowest sleep (C1) is left, which also leaves a core's resources
/// to its other thread.
const SHALLOW: i32 = 2;
/// In a virtual machine there is no shallow sleep: the one state behind the guest's own polling gives the processor back to the host.
const NONE: i32 = 0;

/// The device, opened by whoever starts a thread that may have to ask: the thread itself need not be able to open files. Nothing is asked
/// for yet.
#[derive(Debug, Default)]
pub(crate) struct Asking(Option<File>);

impl Asking {
    /// Opens it. That it is refused is no error: whoever waits for pages waits somewhat longer.
    pub(crate) fn open() -> Self {
        let opened = OpenOptions::new().write(true).open(DEVICE);
        if let Err(error) = &opened {
            tracing::debug!("processors are not kept awake for the guest's faults: {DEVICE}: {error}");
        }
        // On this thread, too.
        longest();
        Self(opened.ok())
    }

    /// Asks.
    pub(crate) fn hold(self) -> Awake {
        let ask = |mut request: File| request.write_all(&longest().to_ne_bytes()).map(|()| request);
        let asked = self.0.map(ask).transpose();
        if let Err(error) = &asked {
            tracing::debug!("processors are not kept awake for the guest's faults: {DEVICE}: {error}");
        }
        Awake { _request: asked.ok().flatten() }
    }
}

/// As long as it lives, waking a processor of this host takes microseconds, if the host's owner lets us ask for that.
#[derive(Debug, Default)]
pub(crate) struct Awake {
    _request: Option<File>,
}

/// What to ask for on this host, in microseconds.
fn longest() -> i32 {
    static LONGEST: OnceLock<i32> = OnceLock::new();
    *LONGEST.get_or_init(|| {
        let virtual_machine = std::fs::read_to_string(DRIVER).is_ok_and(|driver| driver.trim() == "haltpoll");
        if virtual_machine { NONE } else { SHALLOW }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use vmferry_testkit::{Need, skip};

    /// The limit that holds on this host now, in microseconds.
    fn limit() -> Option<i32> {
        let mut bytes = [0; 4];
        File::open(DEVICE).and_then(|mut file| file.read_exact(&mut bytes)).ok()?;
        Some(i32::from_ne_bytes(bytes))
    }

    #[test]
    fn the_host_holds_it_as_long_as_it_is_asked_for() {
        let Some(before) = limit() else {
            return skip(Need::Root, format!("{DEVICE} cannot be read"));
        };
        let awake = Asking::open().hold();
        if awake._request.is_none() {
            return skip(Need::Root, format!("{DEVICE} cannot be written"));
        }
        assert!(limit().unwrap() <= SHALLOW);
        drop(awake);
        // Others may ask as well; what was asked here is gone at least.
        assert!(limit().unwrap() >= before.min(SHALLOW));
    }
}
