//! Placement of an initial RAM disk.

use super::BootError;
use crate::memory::GuestRam;
use vm_memory::{Bytes, GuestAddress};
use vmferry_core::PAGE_SIZE;

/// An initial RAM disk in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) address: u64,
    pub(super) len: u64,
}

/// Places `initrd` as high as possible below `top`, where it does not disturb the kernel. The
/// kernel uses memory up to `kernel_end`.
///
/// # Errors
/// Returns an error if the initrd does not fit between the two addresses, or is empty.
pub(super) fn place(
    ram: &GuestRam,
    initrd: Option<&[u8]>,
    kernel_end: u64,
    top: u64,
) -> Result<Option<Placed>, BootError> {
    let Some(initrd) = initrd else { return Ok(None) };
    let len = initrd.len() as u64;
    if len == 0 {
        return Err(BootError::Invalid("the initrd is empty".to_owned()));
    }
    let bottom = kernel_end.next_multiple_of(PAGE_SIZE);
    let start = top.checked_sub(len).map(|start| start / PAGE_SIZE * PAGE_SIZE);
    let Some(address) = start.filter(|start| *start >= bottom) else {
        return Err(BootError::InitrdTooLarge { len, room: top.saturating_sub(bottom) });
    };
    let written = ram.map().write_slice(initrd, GuestAddress(address));
    written.map_err(|e| BootError::Invalid(e.to_string()))?;
    Ok(Some(Placed { address, len }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::VmOptions;

    #[test]
    fn initrd_is_placed_at_the_top_and_never_overlaps_the_kernel() {
        let ram = GuestRam::new(&VmOptions::new(8 << 20, 1)).unwrap();
        let place = |len: usize, end: u64| place(&ram, Some(&vec![7; len]), end, 8 << 20);
        assert_eq!(place(1, 4 << 20), Ok(Some(Placed { address: (8 << 20) - 4096, len: 1 })));
        assert_eq!(place(3 << 20, 5 << 20), Ok(Some(Placed { address: 5 << 20, len: 3 << 20 })));
        let error = BootError::InitrdTooLarge { len: (3 << 20) + 1, room: 3 << 20 };
        assert_eq!(place((3 << 20) + 1, 5 << 20), Err(error));
        assert_eq!(place(9 << 20, 0), Err(BootError::InitrdTooLarge { len: 9 << 20, room: 8 << 20 }));
        assert!(matches!(place(0, 0), Err(BootError::Invalid(_))));
        let mut last = [0];
        ram.map().read_slice(&mut last, GuestAddress((8 << 20) - 4096)).unwrap();
        assert_eq!(last, [7]);
    }
}
