//! Requests of `ioctl`, identified by direction, group and number, without the size of their
//! argument. (Linux `include/uapi/asm-generic/ioctl.h`; virt/kvm/api.rst, ioctl_userfaultfd(2),
//! tuntap.rst, `linux/fs.h`.)

/// Bits that identify a request, which are all bits except those of the size.
pub(super) const MASK: u64 = 0xc000_ffff;

const KVM: u64 = 0xae;
const UFFD: u64 = 0xaa;

const fn io(group: u64, number: u64) -> u64 {
    group << 8 | number
}

const fn iow(group: u64, number: u64) -> u64 {
    1 << 30 | io(group, number)
}

const fn ior(group: u64, number: u64) -> u64 {
    2 << 30 | io(group, number)
}

const fn iowr(group: u64, number: u64) -> u64 {
    3 << 30 | io(group, number)
}

pub(super) const KVM_RUN: u64 = io(KVM, 0x80);
/// Requests for the state of a vCPU: to save and load it, to boot the vCPU, and to describe a
/// failed vCPU.
pub(super) const VCPU_STATE: &[u64] = &[
    io(KVM, 0xad),   // KVM_KVMCLOCK_CTRL
    ior(KVM, 0x81),  // KVM_GET_REGS
    iow(KVM, 0x82),  // KVM_SET_REGS
    ior(KVM, 0x83),  // KVM_GET_SREGS
    iow(KVM, 0x84),  // KVM_SET_SREGS
    iowr(KVM, 0x88), // KVM_GET_MSRS
    iow(KVM, 0x89),  // KVM_SET_MSRS
    ior(KVM, 0x8c),  // KVM_GET_FPU
    iow(KVM, 0x8d),  // KVM_SET_FPU
    ior(KVM, 0x8e),  // KVM_GET_LAPIC
    iow(KVM, 0x8f),  // KVM_SET_LAPIC
    iow(KVM, 0x90),  // KVM_SET_CPUID2
    iowr(KVM, 0x91), // KVM_GET_CPUID2
    ior(KVM, 0x98),  // KVM_GET_MP_STATE
    iow(KVM, 0x99),  // KVM_SET_MP_STATE
    ior(KVM, 0x9f),  // KVM_GET_VCPU_EVENTS
    iow(KVM, 0xa0),  // KVM_SET_VCPU_EVENTS
    ior(KVM, 0xa1),  // KVM_GET_DEBUGREGS
    iow(KVM, 0xa2),  // KVM_SET_DEBUGREGS
    io(KVM, 0xa2),   // KVM_SET_TSC_KHZ
    io(KVM, 0xa3),   // KVM_GET_TSC_KHZ
    ior(KVM, 0xa4),  // KVM_GET_XSAVE
    iow(KVM, 0xa5),  // KVM_SET_XSAVE
    ior(KVM, 0xcf),  // KVM_GET_XSAVE2
    ior(KVM, 0xa6),  // KVM_GET_XCRS
    iow(KVM, 0xa7),  // KVM_SET_XCRS
    iow(KVM, 0x9c),  // KVM_X86_SETUP_MCE
    iow(KVM, 0xab),  // KVM_GET_ONE_REG
    iow(KVM, 0xac),  // KVM_SET_ONE_REG
];
/// Requests for the state that all vCPUs share, for memory slots, and for dirty logs and dirty
/// rings.
pub(super) const MACHINE: &[u64] = &[
    io(KVM, 0x03),   // KVM_CHECK_EXTENSION
    iow(KVM, 0x46),  // KVM_SET_USER_MEMORY_REGION
    iow(KVM, 0x49),  // KVM_SET_USER_MEMORY_REGION2
    iowr(KVM, 0x62), // KVM_GET_IRQCHIP
    ior(KVM, 0x63),  // KVM_SET_IRQCHIP
    iow(KVM, 0x7b),  // KVM_SET_CLOCK
    ior(KVM, 0x7c),  // KVM_GET_CLOCK
    ior(KVM, 0x9f),  // KVM_GET_PIT2
    iow(KVM, 0xa0),  // KVM_SET_PIT2
    iow(KVM, 0xa3),  // KVM_ENABLE_CAP
    iow(KVM, 0x42),  // KVM_GET_DIRTY_LOG
    iowr(KVM, 0x05), // KVM_GET_SUPPORTED_CPUID: what a guest that comes may have been shown
    iow(KVM, 0xe1),  // KVM_SET_DEVICE_ATTR: a vCPU's TSC offset
    iow(KVM, 0xe2),  // KVM_GET_DEVICE_ATTR
    iow(KVM, 0xe3),  // KVM_HAS_DEVICE_ATTR
];
pub(super) const PAGEMAP_SCAN: u64 = iowr(0x66, 16);
/// Requests that protect pages again after their writes were recorded.
pub(super) const PROTECT: &[u64] = &[
    iowr(KVM, 0xc0), // KVM_CLEAR_DIRTY_LOG
    io(KVM, 0xc7),   // KVM_RESET_DIRTY_RINGS
    PAGEMAP_SCAN,
    iowr(UFFD, 0x06), // UFFDIO_WRITEPROTECT
];
/// Requests that change the protection of pages whose writers wait.
pub(super) const WRITE_PROTECT: &[u64] = &[
    iowr(UFFD, 0x06), // UFFDIO_WRITEPROTECT
];
/// Requests that raise the interrupt of a device.
pub(super) const INTERRUPT: &[u64] = &[
    iow(KVM, 0x61),  // KVM_IRQ_LINE
    iowr(KVM, 0x62), // KVM_GET_IRQCHIP: whether it was taken
    iow(KVM, 0xa5),  // KVM_SIGNAL_MSI
];
/// Requests that place pages in guest memory.
pub(super) const PLACE: &[u64] = &[
    ior(UFFD, 0x02),  // UFFDIO_WAKE
    ior(UFFD, 0x01),  // UFFDIO_UNREGISTER: when all pages are placed
    iowr(UFFD, 0x03), // UFFDIO_COPY
    iowr(UFFD, 0x04), // UFFDIO_ZEROPAGE
    iowr(UFFD, 0x05), // UFFDIO_MOVE
    iowr(UFFD, 0x07), // UFFDIO_CONTINUE
    iowr(UFFD, 0x08), // UFFDIO_POISON
];
/// Requests that register memory with a userfaultfd.
pub(super) const WATCH_MEMORY: &[u64] = &[
    io(UFFD, 0x00),   // USERFAULTFD_IOC_NEW
    iowr(UFFD, 0x3f), // UFFDIO_API
    iowr(UFFD, 0x00), // UFFDIO_REGISTER
    ior(UFFD, 0x01),  // UFFDIO_UNREGISTER
];
/// Requests of block devices.
pub(super) const BLOCK: &[u64] = &[
    ior(0x12, 114), // BLKGETSIZE64
    io(0x12, 104),  // BLKSSZGET
    io(0x12, 119),  // BLKDISCARD
    io(0x12, 127),  // BLKZEROOUT
];
/// Requests that make one open file a copy-on-write copy of another.
pub(super) const CLONE_FILE: &[u64] = &[
    iow(0x94, 9), // FICLONE
];
/// Requests of tap devices.
pub(super) const TAP: &[u64] = &[
    iow(0x54, 208), // TUNSETOFFLOAD
];
/// Requests for the properties of a network interface, by its name.
pub(super) const INTERFACE: &[u64] = &[
    io(0x89, 0x21), // SIOCGIFMTU
    io(0x89, 0x13), // SIOCGIFFLAGS
];
/// Requests for the settings of a terminal, without TIOCSTI, which inserts input.
pub(super) const TERMINAL: &[u64] = &[
    io(0x54, 0x01),  // TCGETS
    io(0x54, 0x02),  // TCSETS
    io(0x54, 0x03),  // TCSETSW
    io(0x54, 0x04),  // TCSETSF
    io(0x54, 0x0f),  // TIOCGPGRP
    io(0x54, 0x13),  // TIOCGWINSZ
    ior(0x54, 0x2a), // TCGETS2
    iow(0x54, 0x2b), // TCSETS2
];
/// Requests for the number of bytes that can be read.
pub(super) const UNREAD_BYTES: &[u64] = &[
    io(0x54, 0x1b), // FIONREAD
];
/// Requests that switch a descriptor between blocking and non-blocking.
pub(super) const BLOCKING: &[u64] = &[
    io(0x54, 0x21), // FIONBIO
];
