//! Memory of a process, with the memory of its guest apart from the rest.

/// Memory of some mappings in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum {
    /// Addresses.
    pub size: u64,
    /// Resident memory.
    pub resident: u64,
    /// Resident memory, in which each page counts by the share of this process.
    pub proportional: u64,
    /// Resident memory that only this process maps.
    pub private: u64,
}

impl Sum {
    fn add(&mut self, other: Self) {
        self.size += other.size;
        self.resident += other.resident;
        self.proportional += other.proportional;
        self.private += other.private;
    }
}

/// Memory of a process that runs a guest or waits for one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Footprint {
    /// Guest memory.
    pub guest: Sum,
    /// All other mappings.
    pub rest: Sum,
}

/// Mapping, as a file `smaps` of proc(5) describes it.
#[derive(Debug, Clone, Copy, Default)]
struct Mapping {
    sum: Sum,
    writable: bool,
    /// Set if the mapping has no reservation of swap space.
    noreserve: bool,
    /// Set if the mapping was advised to use huge pages.
    huge: bool,
}

impl Footprint {
    /// Reads the footprint of the process `pid`, whose guest has `memory` bytes.
    ///
    /// # Errors
    ///
    /// Fails if the kernel does not report the mappings of the process, or if no mappings of it can
    /// be the guest's.
    pub fn of(pid: u32, memory: u64) -> Result<Self, String> {
        let path = format!("/proc/{pid}/smaps");
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        Self::parse(&text, memory).map_err(|why| format!("{path}: {why}"))
    }

    /// Finds the guest's mappings in `text`.
    ///
    /// vmferry maps guest memory without a reservation of swap space (`nr` in `VmFlags`), and
    /// advises huge pages (`hg`) where the host has them. The sizes of the mappings must add up to
    /// `memory`: otherwise other memory would be taken for the guest's.
    fn parse(text: &str, memory: u64) -> Result<Self, String> {
        let mappings = mappings(text);
        let candidates: [fn(&Mapping) -> bool; 2] = [
            |mapping| mapping.writable && mapping.noreserve,
            |mapping| mapping.writable && mapping.noreserve && mapping.huge,
        ];
        for is_guest in candidates {
            let mut footprint = Footprint::default();
            for mapping in &mappings {
                let part = if is_guest(mapping) { &mut footprint.guest } else { &mut footprint.rest };
                part.add(mapping.sum);
            }
            if footprint.guest.size == memory {
                return Ok(footprint);
            }
        }
        Err(format!("no mappings without reserved swap space add up to the guest's {memory} bytes"))
    }
}

/// Returns the mappings that `text` describes.
fn mappings(text: &str) -> Vec<Mapping> {
    let mut all: Vec<Mapping> = Vec::new();
    for line in text.lines() {
        let Some((name, rest)) = line.split_once(':') else { continue };
        // The line that begins a mapping has a colon only in its device number.
        if name.contains('-') && name.contains(' ') {
            all.push(Mapping::default());
        }
        let Some(mapping) = all.last_mut() else { continue };
        let bytes = || {
            let kib = rest.trim().strip_suffix(" kB").and_then(|kib| kib.parse::<u64>().ok());
            kib.unwrap_or(0) << 10
        };
        match name {
            "Size" => mapping.sum.size = bytes(),
            "Rss" => mapping.sum.resident = bytes(),
            "Pss" => mapping.sum.proportional = bytes(),
            "Private_Clean" | "Private_Dirty" | "Private_Hugetlb" => mapping.sum.private += bytes(),
            "VmFlags" => {
                let has = |flag: &str| rest.split_whitespace().any(|word| word == flag);
                (mapping.writable, mapping.noreserve, mapping.huge) = (has("wr"), has("nr"), has("hg"));
            }
            _ => {}
        }
    }
    all
}

/// Starts a new peak of the resident memory of the process `pid`, which `VmHWM` in
/// `/proc/PID/status` then reports (proc(5), `clear_refs`).
///
/// # Errors
///
/// Fails if this process must not change the other one.
pub fn reset_peak(pid: u32) -> Result<(), String> {
    let path = format!("/proc/{pid}/clear_refs");
    std::fs::write(&path, "5").map_err(|error| format!("{path}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
00400000-00500000 r-xp 00000000 fe:00 12                   /usr/bin/vmferry
Size:               1024 kB
Rss:                 800 kB
Pss:                 400 kB
Private_Clean:       100 kB
Private_Dirty:         0 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
Size:               2048 kB
Rss:                1000 kB
Pss:                1000 kB
Private_Dirty:      1000 kB
VmFlags: rd wr mr mw me nr hg
7f0000400000-7f0000600000 rw-p 00000000 00:00 0
Size:               2048 kB
Rss:                   0 kB
VmFlags: rd wr mr mw me nr um uw hg
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0            [stack]
Size:                132 kB
Rss:                  12 kB
Pss:                  12 kB
Private_Dirty:        12 kB
VmFlags: rd wr mr mw me gd ac
";

    #[test]
    fn guest_memory_is_apart_from_the_rest() {
        let footprint = Footprint::parse(SMAPS, 4 << 20).unwrap();
        let kib = |[size, resident, proportional, private]: [u64; 4]| Sum {
            size: size << 10,
            resident: resident << 10,
            proportional: proportional << 10,
            private: private << 10,
        };
        assert_eq!(footprint.guest, kib([4096, 1000, 1000, 1000]));
        assert_eq!(footprint.rest, kib([1156, 812, 412, 112]));
    }

    #[test]
    fn other_memory_without_reservation_is_not_the_guests() {
        let more = format!(
            "{SMAPS}7f1000000000-7f1000100000 rw-p 00000000 00:00 0\nSize: 1024 kB\nRss: 4 kB\nVmFlags: rd wr nr\n"
        );
        let footprint = Footprint::parse(&more, 4 << 20).unwrap();
        assert_eq!((footprint.guest.size, footprint.rest.resident), (4 << 20, 816 << 10));
    }

    #[test]
    fn guest_that_is_not_mapped_is_an_error() {
        assert!(Footprint::parse(SMAPS, 8 << 20).unwrap_err().contains("8388608"));
        assert!(Footprint::parse("", 4096).is_err());
        assert!(Footprint::of(u32::MAX, 4096).unwrap_err().contains("/proc/4294967295/smaps"));
    }

    #[test]
    fn peak_starts_again_at_the_resident_memory() {
        // Other tests of this process run at the same time, so the test runs in a separate process.
        if std::env::var_os("VMFERRY_PEAK_TEST").is_none() {
            let status = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "footprint::tests::peak_starts_again_at_the_resident_memory"])
                .env("VMFERRY_PEAK_TEST", "1")
                .stdout(std::process::Stdio::null())
                .status()
                .unwrap();
            assert!(status.success());
            return;
        }
        let peak = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
            line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap()
        };
        drop(std::hint::black_box(vec![1_u8; 64 << 20]));
        let before = peak();
        reset_peak(std::process::id()).unwrap();
        assert!(peak() + (32 << 10) < before, "{} {before}", peak());
    }
}
