//! What each thread needs. A call that is not here is one that no run of the tests made and no code path leads to; each list says why
//! something is on it, where its name does not.

use super::policy::{Must, Policy};
use super::request;
use crate::Mode;
use libc::{
    SYS_accept4, SYS_access, SYS_bind, SYS_brk, SYS_capget, SYS_capset, SYS_clock_getres, SYS_clock_gettime,
    SYS_clock_nanosleep, SYS_clone, SYS_clone3, SYS_close, SYS_connect, SYS_epoll_create1, SYS_epoll_ctl,
    SYS_epoll_pwait, SYS_epoll_pwait2, SYS_epoll_wait, SYS_eventfd2, SYS_exit, SYS_exit_group, SYS_faccessat,
    SYS_faccessat2, SYS_fadvise64, SYS_fallocate, SYS_fchmod, SYS_fcntl, SYS_fdatasync, SYS_fstat,
    SYS_fstatfs, SYS_fsync, SYS_ftruncate, SYS_futex, SYS_getcwd, SYS_getdents64, SYS_getegid, SYS_geteuid,
    SYS_getgid, SYS_getpeername, SYS_getpgrp, SYS_getpid, SYS_getrandom, SYS_getsockname, SYS_getsockopt,
    SYS_gettid, SYS_gettimeofday, SYS_getuid, SYS_ioctl, SYS_listen, SYS_lseek, SYS_madvise, SYS_membarrier,
    SYS_memfd_create, SYS_mincore, SYS_mmap, SYS_mprotect, SYS_mremap, SYS_munmap, SYS_nanosleep,
    SYS_newfstatat, SYS_open, SYS_openat, SYS_openat2, SYS_pipe2, SYS_pkey_mprotect, SYS_poll, SYS_ppoll,
    SYS_prctl, SYS_pread64, SYS_preadv, SYS_preadv2, SYS_prlimit64, SYS_pwrite64, SYS_pwritev, SYS_pwritev2,
    SYS_read, SYS_readlink, SYS_readlinkat, SYS_readv, SYS_recvfrom, SYS_recvmsg, SYS_rename, SYS_renameat2,
    SYS_restart_syscall, SYS_rseq, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn,
    SYS_sched_getaffinity, SYS_sched_getattr, SYS_sched_setattr, SYS_sched_yield, SYS_seccomp, SYS_sendmmsg,
    SYS_sendmsg, SYS_sendto, SYS_set_robust_list, SYS_setsockopt, SYS_shutdown, SYS_sigaltstack, SYS_socket,
    SYS_socketpair, SYS_stat, SYS_statfs, SYS_statx, SYS_sync_file_range, SYS_sysinfo, SYS_tgkill, SYS_uname,
    SYS_unlink, SYS_unlinkat, SYS_userfaultfd, SYS_write, SYS_writev,
};
use vmferry_thread::Role;

/// Every thread, whatever it is for.
const COMMON: &[i64] = &[
    // Descriptors that it has; what it says on standard error.
    SYS_read,
    SYS_write,
    SYS_writev,
    SYS_close,
    // Locks, the allocator, stacks.
    SYS_futex,
    SYS_membarrier,
    SYS_brk,
    SYS_munmap,
    SYS_mremap,
    SYS_madvise,
    // Time and processors.
    SYS_clock_gettime,
    SYS_clock_getres,
    SYS_gettimeofday,
    SYS_clock_nanosleep,
    SYS_nanosleep,
    SYS_restart_syscall,
    SYS_sched_yield,
    SYS_sched_getaffinity,
    // Hash tables and keys.
    SYS_getrandom,
    // Being interrupted, panicking, ending.
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_sigaltstack,
    SYS_gettid,
    SYS_getpid,
    SYS_exit,
    SYS_exit_group,
];

/// What reaches files by their names. To a thread that opens none these fail: the allocator asks how many processors there are, a panic
/// for what its backtrace is to say, and both do without.
const NAMES: &[i64] = &[
    SYS_open,
    SYS_openat,
    SYS_openat2,
    SYS_stat,
    SYS_newfstatat,
    SYS_statx,
    SYS_access,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_readlink,
    SYS_readlinkat,
    SYS_getcwd,
];

/// A thread that reads what the kernel tells in files about the process (the map of its pages, its threads).
const READS: &[i64] = &[
    SYS_statx,
    SYS_fstat,
    SYS_newfstatat,
    SYS_getdents64,
    SYS_lseek,
    SYS_pread64,
    SYS_access,
    SYS_readlink,
    SYS_getcwd,
];

/// A connection that is there.
const STREAM: &[i64] = &[
    SYS_sendmsg,
    SYS_recvmsg,
    SYS_sendto,
    SYS_recvfrom,
    SYS_poll,
    SYS_ppoll,
    SYS_shutdown,
    SYS_setsockopt,
    SYS_getsockopt,
    SYS_getsockname,
    SYS_getpeername,
];

/// Which pages of guest memory there are, and giving them back to the host.
const PAGES: &[i64] = &[SYS_pread64, SYS_lseek, SYS_fallocate];

/// Giving way to those who are waited for, and not (`latency` in the engine).
const LATENCY: &[i64] = &[SYS_sched_getattr, SYS_sched_setattr];

/// The same of nobody but oneself: the kernel would let a thread change any process of its user.
fn own_latency() -> Policy {
    Policy::default().each(SYS_sched_getattr, (0, WHOLE), &[0]).each(SYS_sched_setattr, (0, WHOLE), &[0])
}

/// Starting a thread, which then confines itself. `clone3` fails (see `refusals`), and is tried first.
const SPAWN: &[i64] = &[SYS_clone3, SYS_set_robust_list, SYS_rseq, SYS_seccomp, SYS_capget, SYS_capset];

/// The machine's owner: what no other thread does.
const OWNER: &[i64] = &[
    // Guests in files: made under another name, and renamed when they are whole.
    SYS_open,
    SYS_openat,
    SYS_ftruncate,
    SYS_fsync,
    SYS_rename,
    SYS_renameat2,
    SYS_unlink,
    SYS_unlinkat,
    SYS_pwrite64,
    // Finding a peer by its name.
    SYS_uname,
    SYS_sendmmsg,
    // Going to it, or waiting for it.
    SYS_bind,
    SYS_listen,
    SYS_connect,
    // Watching memory; measuring a link with pages that are nobody's.
    SYS_userfaultfd,
    SYS_memfd_create,
    SYS_mincore,
    SYS_eventfd2,
    // Whose socket it is.
    SYS_geteuid,
    SYS_getuid,
    SYS_getegid,
    SYS_getgid,
];

/// What is needed until everything is set up, and by nobody afterwards.
const SETUP: &[i64] = &[
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_pipe2,
    SYS_fchmod,
    SYS_prlimit64,
    SYS_statfs,
    SYS_fstatfs,
    SYS_sysinfo,
    SYS_socketpair,
    // Whether the terminal is this process's to read.
    SYS_getpgrp,
];

/// Whom the owner starts once it has settled.
const OWNED: &[Role] = &[
    Role::Worker,
    Role::Disk,
    Role::Tracker,
    Role::Sender,
    Role::Receiver,
    Role::Control,
    Role::Listener,
    Role::Fault,
    Role::Snapshot,
    Role::Fence,
];

/// Who starts whom then.
#[cfg(test)]
pub(super) const STARTS: &[(Role, &[Role])] = &[
    (Role::Owner, &[Role::Owner]),
    (Role::Owner, OWNED),
    (Role::Listener, &[Role::Listener]),
    (Role::Api, &[Role::Api]),
    (Role::Metrics, &[Role::Metrics]),
    // Its library starts its threads itself, and they have its filters.
    (Role::Traces, &[Role::Traces]),
];

/// What fails, on every thread: libraries try it, and go on without.
pub(super) fn refusals(mode: Mode) -> Policy {
    // Its flags are in memory, where no filter sees them; glibc takes `clone` then.
    let policy = Policy::default().any(&[SYS_clone3]);
    if mode == Mode::Log {
        return policy;
    }
    // New code: modules of the resolver that were not loaded at start.
    let exec = Must::Have { argument: 2, mask: EXEC, value: EXEC };
    [SYS_mmap, SYS_mprotect, SYS_pkey_mprotect]
        .into_iter()
        .fold(policy, |policy, call| policy.when(call, exec.clone()))
}

/// What some thread needs at some time.
pub(super) fn base() -> Policy {
    let all = Role::ALL.into_iter().fold(Policy::default(), |policy, role| policy.and(self::role(role)));
    // Ending with the process that started this one.
    let all = all.each(SYS_prctl, (0, WHOLE), &[number(libc::PR_SET_PDEATHSIG)]);
    // Requests are told apart by the threads' own filters, and by what files can be reached: here that would be time for nothing.
    all.any(SETUP).any(&[SYS_ioctl, SYS_fcntl, SYS_mmap, SYS_mprotect, SYS_openat])
}

/// What fails on threads of this role; `None` if it opens files itself.
pub(super) fn unread(role: Role) -> Option<Policy> {
    (!opens(role)).then(|| Policy::default().any(NAMES))
}

const fn opens(role: Role) -> bool {
    matches!(role, Role::Owner | Role::Fence | Role::Api | Role::Metrics | Role::Traces)
}

/// What threads of this role may do.
pub(super) fn role(role: Role) -> Policy {
    let called = called(role);
    // Of a thread that opens no files these are on the list, and fail ([`unread`]).
    if opens(role) { called } else { called.any(NAMES) }
}

/// What threads of this role call and rely on.
pub(super) fn called(role: Role) -> Policy {
    let own = match role {
        Role::Owner => owner(),
        Role::Vcpu => vcpu(),
        Role::Worker => requests(&[]).any(PAGES),
        Role::Disk => disk(),
        Role::Network => network(),
        Role::Device => device(),
        // Reading rings, resetting them, and waking vCPUs.
        Role::Tracker => requests(&[request::PROTECT]),
        // The target's acknowledgements are read on the same thread; pages are protected before they are read.
        Role::Sender => requests(&[request::PROTECT]).any(STREAM).any(PAGES).and(own_latency()),
        Role::Receiver => requests(&[request::PLACE, SCAN]).any(STREAM).any(PAGES).and(own_latency()),
        // A link that is lost before the guest runs ends the watch over its memory, so that nobody waits there.
        Role::Control => requests(&[request::PLACE]).any(STREAM).any(PAGES),
        Role::Listener => {
            // Of a connection that is heard on a thread of its own another descriptor is kept, to end it by.
            let again = Policy::default().each(SYS_fcntl, (1, WHOLE), &[number(libc::F_DUPFD_CLOEXEC)]);
            // Each channel that shares a connection is a pair of local sockets of this process.
            let pair = Policy::default().each(SYS_socketpair, (0, WHOLE), &[number(libc::AF_UNIX)]);
            requests(&[request::BLOCKING])
                .any(&[SYS_accept4])
                .any(STREAM)
                .and(spawn())
                .and(unblock())
                .and(again)
                .and(pair)
        }
        // Asks the source for pages, or reads them out of a file. The thread that has the last page
        // takes the vCPUs' short slices back.
        Role::Fault => {
            requests(&[request::PLACE, SCAN]).any(STREAM).any(PAGES).any(LATENCY).any(&[SYS_fadvise64])
        }
        Role::Snapshot => {
            requests(&[request::PROTECT]).any(PAGES).any(&[SYS_pwrite64, SYS_fadvise64, SYS_sync_file_range])
        }
        Role::Fence | Role::Traces => asks(),
        Role::Api => serves().any(&[SYS_geteuid]),
        Role::Metrics => serves(),
        Role::Watch => {
            requests(&[request::INTERRUPT, SCAN]).any(PAGES).any(&[SYS_poll, SYS_ppoll, SYS_recvfrom])
        }
        // A role that is new here has what all have, until it is thought about.
        _ => Policy::default(),
    };
    let common = Policy::default()
        .any(COMMON)
        .each(SYS_tgkill, (0, WHOLE), &[std::process::id().into()])
        // A panic that cannot unwind aborts, which takes SIGABRT's handler away; SIGSYS keeps its own.
        .when(SYS_rt_sigaction, Must::Differ { argument: 0, value: libc::SIGSYS.unsigned_abs().into() })
        // What the standard library makes sure of before it closes a descriptor.
        .each(SYS_fcntl, (1, WHOLE), &[number(libc::F_GETFD), number(libc::F_GETFL)])
        .each(SYS_prctl, (0, WHOLE), &[number(libc::PR_GET_NAME)])
        .and(own);
    let data = Must::Have { argument: 2, mask: EXEC, value: 0 };
    [SYS_mmap, SYS_mprotect].into_iter().fold(common, |policy, call| policy.when(call, data.clone()))
}

const WHOLE: u64 = 0xffff_ffff;
/// Flags of an open file that say that it is made, or written.
const WRITES: u64 = number(libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC);
const EXEC: u64 = libc::PROT_EXEC.unsigned_abs() as u64;
/// Looking at which pages there are.
const SCAN: &[u64] = &[request::PAGEMAP_SCAN];

const fn number(value: i32) -> u64 {
    value.unsigned_abs() as u64
}

/// `ioctl`, with the requests of these groups, in their order.
fn requests(groups: &[&[u64]]) -> Policy {
    let each = |policy: Policy, group: &&[u64]| policy.each(SYS_ioctl, (1, request::MASK), group);
    groups.iter().fold(Policy::default(), each)
}

fn vcpu() -> Policy {
    // First what the thread does most.
    requests(&[&[request::KVM_RUN], request::INTERRUPT, request::PROTECT, request::VCPU_STATE, SCAN])
        // What a network driver agrees to the tap is told at once.
        .and(requests(&[request::TAP]))
        // Devices that are answered for at once: balloons give pages back, disks and taps without ioeventfd are written here.
        .any(PAGES)
        .any(DISK_IO)
        .any(&[SYS_readv])
}

/// Reading, writing, flushing and trimming a disk.
const DISK_IO: &[i64] = &[
    SYS_preadv,
    SYS_pwritev,
    SYS_preadv2,
    SYS_pwritev2,
    SYS_fdatasync,
    SYS_fsync,
    SYS_fallocate,
    SYS_fadvise64,
    SYS_sync_file_range,
    SYS_lseek,
];

fn disk() -> Policy {
    requests(&[request::INTERRUPT, request::BLOCK, SCAN]).any(DISK_IO).any(PAGES)
}

fn network() -> Policy {
    requests(&[request::INTERRUPT, request::TAP, request::INTERFACE, SCAN])
        .any(&[
            SYS_readv,
            SYS_epoll_ctl,
            SYS_epoll_wait,
            SYS_epoll_pwait,
            SYS_epoll_pwait2,
            SYS_poll,
            SYS_ppoll,
        ])
        .any(PAGES)
        // How large its packets are is asked on a socket, of which nothing is ever sent: it has no address.
        .each(SYS_socket, (0, WHOLE), &[number(libc::AF_INET)])
}

fn device() -> Policy {
    requests(&[request::INTERRUPT, SCAN]).any(PAGES).any(&[SYS_poll, SYS_ppoll])
}

/// Non-blocking sockets.
fn unblock() -> Policy {
    Policy::default().each(SYS_fcntl, (1, WHOLE), &[number(libc::F_SETFL)])
}

/// Answers clients, about everything, and passes what is to be done to devices and the owner.
fn serves() -> Policy {
    requests(&[request::BLOCKING, request::INTERRUPT, SCAN])
        .any(&[SYS_accept4])
        .any(STREAM)
        .any(PAGES)
        .any(READS)
        .and(spawn())
        .and(unblock())
        .each(SYS_openat, (2, WRITES), &[0])
}

fn spawn() -> Policy {
    let thread = number(libc::CLONE_THREAD | libc::CLONE_VM);
    Policy::default()
        .any(SPAWN)
        .each(SYS_clone, (0, thread), &[thread])
        .each(SYS_prctl, (0, WHOLE), &[number(libc::PR_SET_NAME), number(libc::PR_SET_NO_NEW_PRIVS)])
        // capabilities(7): which of them this kernel knows.
        .each(SYS_prctl, (0, WHOLE), &[number(libc::PR_CAPBSET_READ)])
}

/// Finds a service (a fence, a collector of traces) by its name, goes to it, and hears what it says; the HTTP client looks names up on a
/// thread of its own.
fn asks() -> Policy {
    requests(&[request::BLOCKING])
        .any(STREAM)
        .any(READS)
        .any(&[SYS_connect, SYS_bind, SYS_uname, SYS_sendmmsg])
        .and(spawn())
        .and(unblock())
        .each(SYS_open, (1, WRITES), &[0])
        .each(SYS_openat, (2, WRITES), &[0])
        .each(SYS_socket, (0, WHOLE), &FAMILIES)
}

/// Peers, local ones, and the kernel, which tells what addresses this host has.
const FAMILIES: [u64; 4] =
    [number(libc::AF_UNIX), number(libc::AF_INET), number(libc::AF_INET6), number(libc::AF_NETLINK)];

/// The owner, and what it starts.
fn owner() -> Policy {
    let started = OWNED.iter().fold(Policy::default(), |policy, role| policy.and(self::role(*role)));
    let descriptors = [
        libc::F_SETFD,
        libc::F_SETFL,
        libc::F_DUPFD_CLOEXEC,
        libc::F_OFD_SETLK,
        libc::F_OFD_GETLK,
        libc::F_ADD_SEALS,
        libc::F_GET_SEALS,
    ]
    .map(number);
    started
        // The owner starts the guest, and then gives the vCPUs short slices.
        .any(LATENCY)
        .and(requests(&[
            request::MACHINE,
            request::WATCH_MEMORY,
            request::TERMINAL,
            request::INTERRUPT,
            request::UNREAD_BYTES,
            // A guest that comes brings what its network driver has agreed to.
            request::TAP,
        ]))
        .any(OWNER)
        .any(READS)
        .and(spawn())
        .each(SYS_socket, (0, WHOLE), &FAMILIES)
        .each(SYS_fcntl, (1, WHOLE), &descriptors)
        // Executable memory is refused, not forbidden: see `refusals`.
        .any(&[SYS_mmap, SYS_mprotect])
}
