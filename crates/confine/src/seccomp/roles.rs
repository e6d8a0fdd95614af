//! System calls that each role needs. A call is on a list only if a run of the tests made it or a
//! code path leads to it. Comments give the reason if it is not clear from the name of the call.

use super::policy::{Must, Policy};
use super::request;
use crate::Mode;
use libc::{
    SYS_accept4, SYS_access, SYS_bind, SYS_brk, SYS_capget, SYS_capset, SYS_clock_getres, SYS_clock_gettime,
    SYS_clock_nanosleep, SYS_clone, SYS_clone3, SYS_close, SYS_connect, SYS_epoll_create1, SYS_epoll_ctl,
    SYS_epoll_pwait, SYS_epoll_pwait2, SYS_epoll_wait, SYS_eventfd2, SYS_exit, SYS_exit_group, SYS_faccessat,
    SYS_faccessat2, SYS_fadvise64, SYS_fallocate, SYS_fchmod, SYS_fcntl, SYS_fdatasync, SYS_fstat,
    SYS_fstatfs, SYS_fsync, SYS_ftruncate, SYS_futex, SYS_getcpu, SYS_getcwd, SYS_getdents64, SYS_getegid,
    SYS_geteuid, SYS_getgid, SYS_getpeername, SYS_getpgrp, SYS_getpid, SYS_getrandom, SYS_getsockname,
    SYS_getsockopt, SYS_gettid, SYS_gettimeofday, SYS_getuid, SYS_ioctl, SYS_listen, SYS_lseek, SYS_madvise,
    SYS_membarrier, SYS_memfd_create, SYS_mincore, SYS_mmap, SYS_mprotect, SYS_mremap, SYS_munmap,
    SYS_nanosleep, SYS_newfstatat, SYS_open, SYS_openat, SYS_openat2, SYS_pipe2, SYS_pkey_mprotect, SYS_poll,
    SYS_ppoll, SYS_prctl, SYS_pread64, SYS_preadv, SYS_preadv2, SYS_prlimit64, SYS_pwrite64, SYS_pwritev,
    SYS_pwritev2, SYS_read, SYS_readlink, SYS_readlinkat, SYS_readv, SYS_recvfrom, SYS_recvmsg, SYS_rename,
    SYS_renameat2, SYS_restart_syscall, SYS_rseq, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn,
    SYS_sched_getaffinity, SYS_sched_getattr, SYS_sched_setattr, SYS_sched_yield, SYS_seccomp, SYS_sendmmsg,
    SYS_sendmsg, SYS_sendto, SYS_set_robust_list, SYS_setsockopt, SYS_shutdown, SYS_sigaltstack, SYS_socket,
    SYS_socketpair, SYS_stat, SYS_statfs, SYS_statx, SYS_sync_file_range, SYS_sysinfo, SYS_tgkill, SYS_uname,
    SYS_unlink, SYS_unlinkat, SYS_userfaultfd, SYS_write, SYS_writev,
};
use vmferry_thread::Role;

/// Calls of every thread.
const COMMON: &[i64] = &[
    // Descriptors that the thread has, and its output on standard error.
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
    SYS_getcpu,
    // Hash tables and keys.
    SYS_getrandom,
    // Signals, panics and the end of the thread.
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_sigaltstack,
    SYS_gettid,
    SYS_getpid,
    SYS_exit,
    SYS_exit_group,
];

/// Calls that access files by name. They fail on a thread that opens no files. The allocator makes
/// them to find the number of processors, and a panic makes them for its backtrace. Both continue
/// if the calls fail.
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

/// Calls of a thread that reads the kernel's files about the process, such as its pagemap and its
/// list of threads.
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

/// Calls on an established connection.
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

/// Calls that find the present pages of guest memory, and that give pages back to the host.
const PAGES: &[i64] = &[SYS_pread64, SYS_lseek, SYS_fallocate];

/// Calls that change a thread's scheduling slice (`latency` in the engine).
const LATENCY: &[i64] = &[SYS_sched_getattr, SYS_sched_setattr];

/// Allows [`LATENCY`] for the calling thread only. The kernel would let a thread change every
/// process of its user.
fn own_latency() -> Policy {
    Policy::default().each(SYS_sched_getattr, (0, WHOLE), &[0]).each(SYS_sched_setattr, (0, WHOLE), &[0])
}

/// Calls that start a thread, which then confines itself. glibc tries `clone3` first, which fails
/// (see `refusals`).
const SPAWN: &[i64] = &[SYS_clone3, SYS_set_robust_list, SYS_rseq, SYS_seccomp, SYS_capget, SYS_capset];

/// Calls that only the owner of the guest makes.
const OWNER: &[i64] = &[
    // Snapshots: a file is created under another name, and renamed when it is complete.
    SYS_open,
    SYS_openat,
    SYS_ftruncate,
    SYS_fsync,
    SYS_rename,
    SYS_renameat2,
    SYS_unlink,
    SYS_unlinkat,
    SYS_pwrite64,
    // Name resolution for a peer.
    SYS_uname,
    SYS_sendmmsg,
    // Connecting to a peer, and listening for one.
    SYS_bind,
    SYS_listen,
    SYS_connect,
    // Registering memory with userfaultfd; memory for the measurement of a link, which belongs to
    // no guest.
    SYS_userfaultfd,
    SYS_memfd_create,
    SYS_mincore,
    SYS_eventfd2,
    // Finding out whether memory that another process shares consists of huge pages.
    SYS_fstatfs,
    // Comparing the owner of a socket with this user.
    SYS_geteuid,
    SYS_getuid,
    SYS_getegid,
    SYS_getgid,
];

/// Calls that only the setup of the process makes.
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
    // Whether this process is in the foreground of its terminal.
    SYS_getpgrp,
];

/// Roles of the threads that the owner starts after it has confined itself.
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
    Role::Arbiter,
];

/// Roles whose threads start other threads after that, with the roles of the started threads.
#[cfg(test)]
pub(super) const STARTS: &[(Role, &[Role])] = &[
    (Role::Owner, &[Role::Owner]),
    (Role::Owner, OWNED),
    (Role::Listener, &[Role::Listener]),
    (Role::Api, &[Role::Api]),
    (Role::Metrics, &[Role::Metrics]),
    // The library of traces starts its own threads, which inherit the filters.
    (Role::Traces, &[Role::Traces]),
];

/// Returns the calls that fail on every thread. Libraries try these calls, and continue if they
/// fail.
pub(super) fn refusals(mode: Mode) -> Policy {
    // The flags of `clone3` are in memory that no filter sees. After the failure, glibc uses
    // `clone`.
    let policy = Policy::default().any(&[SYS_clone3]);
    if mode == Mode::Log {
        return policy;
    }
    // Executable memory: the resolver tries to load modules that were not loaded at the start.
    let exec = Must::Have { argument: 2, mask: EXEC, value: EXEC };
    [SYS_mmap, SYS_mprotect, SYS_pkey_mprotect]
        .into_iter()
        .fold(policy, |policy, call| policy.when(call, exec.clone()))
}

/// Returns the calls that at least one thread needs at some time.
pub(super) fn base() -> Policy {
    let all = Role::ALL.into_iter().fold(Policy::default(), |policy, role| policy.and(self::role(role)));
    // `--die-with-parent` sets the signal for the death of the parent.
    let all = all.each(SYS_prctl, (0, WHOLE), &[number(libc::PR_SET_PDEATHSIG)]);
    // The requests of `ioctl` and `fcntl` are restricted by the filters of the threads and by the
    // reachable files. If this filter checked them too, every call would take longer.
    all.any(SETUP).any(&[SYS_ioctl, SYS_fcntl, SYS_mmap, SYS_mprotect, SYS_openat])
}

/// Returns the calls that fail on threads of this role, or `None` if the role opens files.
pub(super) fn unread(role: Role) -> Option<Policy> {
    (!opens(role)).then(|| Policy::default().any(NAMES))
}

const fn opens(role: Role) -> bool {
    matches!(role, Role::Owner | Role::Arbiter | Role::Api | Role::Metrics | Role::Traces)
}

/// Returns the calls that pass the filter of this role.
pub(super) fn role(role: Role) -> Policy {
    let called = called(role);
    // For a thread that opens no files, `NAMES` is also on the list, because [`unread`] already
    // makes these calls fail.
    if opens(role) { called } else { called.any(NAMES) }
}

/// Returns the calls that threads of this role make and rely on.
pub(super) fn called(role: Role) -> Policy {
    let own = match role {
        Role::Owner => owner(),
        Role::Vcpu => vcpu(),
        Role::Worker => requests(&[]).any(PAGES),
        Role::Disk => disk(),
        Role::Network => network(),
        Role::Device => device(),
        // Reading dirty rings, resetting them, and waking vCPUs.
        Role::Tracker => requests(&[request::PROTECT]),
        // The sender's thread also reads the target's acknowledgements. Pages are protected before
        // they are read.
        Role::Sender => requests(&[request::PROTECT]).any(STREAM).any(PAGES).and(own_latency()),
        Role::Receiver => requests(&[request::PLACE, SCAN]).any(STREAM).any(PAGES).and(own_latency()),
        // If the link is lost before the guest runs, this thread unregisters the guest memory, so
        // that no thread waits for a page.
        Role::Control => requests(&[request::PLACE]).any(STREAM).any(PAGES),
        Role::Listener => {
            // The thread duplicates the descriptor of a connection that another thread reads, to
            // shut the connection down.
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
        // Requests pages from the source, or reads them from a file. The thread that places the
        // last page takes the short scheduling slices from the vCPUs. For a snapshot, copies pages
        // that the guest writes, and lifts their protection.
        Role::Fault => requests(&[request::PLACE, request::WRITE_PROTECT, SCAN])
            .any(STREAM)
            .any(PAGES)
            .any(LATENCY)
            .any(&[SYS_fadvise64]),
        Role::Snapshot => {
            requests(&[request::PROTECT]).any(PAGES).any(&[SYS_pwrite64, SYS_fadvise64, SYS_sync_file_range])
        }
        Role::Arbiter | Role::Traces => network_client(),
        Role::Api => serves().any(&[SYS_geteuid]),
        Role::Metrics => serves(),
        Role::Watch => {
            requests(&[request::INTERRUPT, SCAN]).any(PAGES).any(&[SYS_poll, SYS_ppoll, SYS_recvfrom])
        }
        // `Role` is non-exhaustive. A new role has only the common calls until it is added here.
        _ => Policy::default(),
    };
    let common = Policy::default()
        .any(COMMON)
        .each(SYS_tgkill, (0, WHOLE), &[std::process::id().into()])
        // A panic that cannot unwind aborts, and abort(3) resets the handler of SIGABRT. The
        // handler of SIGSYS must stay.
        .when(SYS_rt_sigaction, Must::Differ { argument: 0, value: libc::SIGSYS.unsigned_abs().into() })
        // The standard library checks a descriptor before it closes it.
        .each(SYS_fcntl, (1, WHOLE), &[number(libc::F_GETFD), number(libc::F_GETFL)])
        .each(SYS_prctl, (0, WHOLE), &[number(libc::PR_GET_NAME)])
        .and(own);
    let data = Must::Have { argument: 2, mask: EXEC, value: 0 };
    [SYS_mmap, SYS_mprotect].into_iter().fold(common, |policy, call| policy.when(call, data.clone()))
}

const WHOLE: u64 = 0xffff_ffff;
/// Flags of open(2) that create or write a file.
const WRITES: u64 = number(libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC);
const EXEC: u64 = libc::PROT_EXEC.unsigned_abs() as u64;
/// Requests that scan which pages are present.
const SCAN: &[u64] = &[request::PAGEMAP_SCAN];

const fn number(value: i32) -> u64 {
    value.unsigned_abs() as u64
}

/// Allows `ioctl` with the requests of these groups, in their order.
fn requests(groups: &[&[u64]]) -> Policy {
    let each = |policy: Policy, group: &&[u64]| policy.each(SYS_ioctl, (1, request::MASK), group);
    groups.iter().fold(Policy::default(), each)
}

fn vcpu() -> Policy {
    // The most frequent requests come first.
    requests(&[&[request::KVM_RUN], request::INTERRUPT, request::PROTECT, request::VCPU_STATE, SCAN])
        // The features that a network driver negotiates are set on the tap at once.
        .and(requests(&[request::TAP]))
        // Device requests that the vCPU's thread serves itself: balloons give pages back, and disks
        // and taps without ioeventfd write.
        .any(PAGES)
        .any(DISK_IO)
        .any(&[SYS_readv])
}

/// Calls that read, write, flush and trim a disk.
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
        // A socket that is never connected serves to ask for the MTU of an interface.
        .each(SYS_socket, (0, WHOLE), &[number(libc::AF_INET)])
}

fn device() -> Policy {
    requests(&[request::INTERRUPT, SCAN]).any(PAGES).any(&[SYS_poll, SYS_ppoll])
}

/// Allows to make sockets non-blocking.
fn unblock() -> Policy {
    Policy::default().each(SYS_fcntl, (1, WHOLE), &[number(libc::F_SETFL)])
}

/// Returns the calls of a thread that serves clients, and that passes their commands to devices and
/// to the machine's owner.
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
        // capabilities(7): the capabilities that this kernel has.
        .each(SYS_prctl, (0, WHOLE), &[number(libc::PR_CAPBSET_READ)])
}

/// Returns the calls of a thread that resolves the name of a service (an arbiter or a collector of
/// traces), connects to the service, and reads its answers. The HTTP client resolves names on
/// another thread.
fn network_client() -> Policy {
    // glibc's resolver asks for the size of an answer before it reads the answer.
    requests(&[request::BLOCKING, request::UNREAD_BYTES])
        .any(STREAM)
        .any(READS)
        .any(&[SYS_connect, SYS_bind, SYS_uname, SYS_sendmmsg])
        .and(spawn())
        .and(unblock())
        .each(SYS_open, (1, WRITES), &[0])
        .each(SYS_openat, (2, WRITES), &[0])
        .each(SYS_socket, (0, WHOLE), &FAMILIES)
}

/// Families of sockets for peers, for local sockets, and for the kernel, which lists this host's
/// addresses.
const FAMILIES: [u64; 4] =
    [number(libc::AF_UNIX), number(libc::AF_INET), number(libc::AF_INET6), number(libc::AF_NETLINK)];

/// Returns the calls of the owner and of the threads that the owner starts.
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
        // The owner starts the guest, and then gives the vCPUs short scheduling slices.
        .any(LATENCY)
        .and(requests(&[
            request::MACHINE,
            request::WATCH_MEMORY,
            request::TERMINAL,
            request::INTERRUPT,
            request::UNREAD_BYTES,
            // The state of an arriving guest has the features that its network driver negotiated.
            request::TAP,
            // The disks of a guest that is branched are copied into files that a client has passed.
            request::CLONE_FILE,
        ]))
        .any(OWNER)
        .any(READS)
        .and(spawn())
        .each(SYS_socket, (0, WHOLE), &FAMILIES)
        .each(SYS_fcntl, (1, WHOLE), &descriptors)
        // `refusals` makes executable memory fail.
        .any(&[SYS_mmap, SYS_mprotect])
}
