//! Host memory that a VM uses in addition to its guest memory.

use std::ops::Range;
use vmferry_vmm::{RamRegion, VmHandle};

/// Returns the memory of this process (proportional set size) without guest memory, in KiB; `None`
/// if the kernel does not report it (proc(5), `smaps`). Dirty bitmaps and rings are included.
pub(crate) fn kib(vm: &VmHandle) -> Option<u64> {
    let span = |ram: &RamRegion| ram.host_address()..ram.host_address() + ram.region().len;
    let guest: Vec<_> = vm.ram().regions().iter().map(span).collect();
    Some(outside(&std::fs::read_to_string("/proc/self/smaps").ok()?, &guest))
}

/// Returns the sum of all mappings in `smaps` that do not overlap `spans`, in KiB.
fn outside(smaps: &str, spans: &[Range<u64>]) -> u64 {
    let (mut sum, mut counts) = (0, false);
    for line in smaps.lines() {
        if let Some(range) = range(line) {
            counts = !spans.iter().any(|span| range.start < span.end && span.start < range.end);
        } else if let Some(rest) = line.strip_prefix("Pss:")
            && counts
        {
            sum += rest.trim().trim_end_matches(" kB").parse().unwrap_or(0);
        }
    }
    sum
}

/// Returns the addresses of a mapping, if `line` begins one.
fn range(line: &str) -> Option<Range<u64>> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
00400000-00500000 r-xp 00000000 fe:00 12                   /usr/bin/vmferry
Size:               1024 kB
Pss:                 700 kB
Pss_Dirty:           300 kB
7f0000000000-7f0040000000 rw-p 00000000 00:00 0
Rss:              900000 kB
Pss:              900000 kB
7f0040000000-7f0040100000 rw-p 00000000 00:00 0            [stack]
Pss:                  12 kB
";

    #[test]
    fn guest_memory_is_not_counted() {
        let guest = 0x7f00_0000_0000..0x7f00_4000_0000;
        assert_eq!(outside(SMAPS, std::slice::from_ref(&guest)), 712);
        assert_eq!(outside(SMAPS, &[]), 900_712);
        assert_eq!(outside("", &[]), 0);
    }
}
