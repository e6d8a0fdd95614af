//! Attempts that confinement must refuse.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "every call here is one that must fail: a filter that lets it through ends the test, not an invariant"
)]

use std::ffi::CStr;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use vmferry_confine::InForce;
use vmferry_thread::Role;

/// An action of an intruder.
pub(crate) struct Attempt {
    pub(crate) name: &'static str,
    /// Returns whether a thread of this role needs the action.
    pub(crate) works: fn(Role) -> bool,
    make: fn(&Prepared) -> io::Result<()>,
}

/// Descriptors that are opened before the process is confined.
#[derive(Default)]
pub(crate) struct Prepared {
    kvm: Option<OwnedFd>,
    vcpu: Option<(OwnedFd, OwnedFd)>,
    why: String,
}

const fn no_role(_: Role) -> bool {
    false
}

pub(crate) const ATTEMPTS: &[Attempt] = &[
    Attempt { name: "execve", works: no_role, make: |_| execute() },
    Attempt { name: "fork", works: no_role, make: |_| fork() },
    Attempt { name: "read a file", works: no_role, make: |_| open(c"/etc/passwd", libc::O_RDONLY) },
    Attempt {
        name: "make a file",
        works: no_role,
        make: |_| open(c"/var/tmp/vmferry-forbidden", libc::O_CREAT | libc::O_WRONLY),
    },
    Attempt {
        name: "socket",
        works: |role| matches!(role, Role::Owner | Role::Network | Role::Arbiter | Role::Traces),
        make: |_| call(|| unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) }.into()),
    },
    Attempt {
        name: "raw socket",
        works: no_role,
        make: |_| call(|| unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0) }.into()),
    },
    Attempt {
        name: "ptrace",
        works: no_role,
        make: |_| call(|| unsafe { libc::ptrace(libc::PTRACE_SEIZE, parent(), 0, 0) }),
    },
    Attempt { name: "read another process", works: no_role, make: |_| peek() },
    Attempt { name: "kill", works: no_role, make: |_| call(|| unsafe { libc::kill(parent(), 0) }.into()) },
    Attempt {
        name: "signal a thread elsewhere",
        works: no_role,
        make: |_| system(libc::SYS_tgkill, parent().into(), parent().into(), 0),
    },
    Attempt { name: "mount", works: no_role, make: |_| mount() },
    Attempt {
        name: "unshare",
        works: no_role,
        make: |_| call(|| unsafe { libc::unshare(libc::CLONE_NEWUSER) }.into()),
    },
    Attempt { name: "setuid", works: no_role, make: |_| system(libc::SYS_setuid, 0, 0, 0) },
    Attempt { name: "bpf", works: no_role, make: |_| system(libc::SYS_bpf, 0, 0, 0) },
    Attempt { name: "io_uring", works: no_role, make: |_| system(libc::SYS_io_uring_setup, 1, 0, 0) },
    Attempt { name: "keyctl", works: no_role, make: |_| system(libc::SYS_keyctl, 0, 0, 0) },
    Attempt {
        name: "userfaultfd",
        works: |role| role == Role::Owner,
        make: |_| system(libc::SYS_userfaultfd, 1, 0, 0),
    },
    Attempt { name: "a new VM", works: no_role, make: new_vm },
    Attempt {
        name: "the size of unread data",
        works: |role| matches!(role, Role::Owner | Role::Arbiter | Role::Traces),
        make: |_| unread_bytes(),
    },
    Attempt { name: "memory made executable", works: no_role, make: |_| executable() },
    Attempt { name: "executable memory", works: no_role, make: |_| mapped_executable() },
    Attempt { name: "another handler of SIGSYS", works: no_role, make: |_| ignore_sigsys() },
    Attempt {
        name: "handling the signals of the owner",
        works: |role| role == Role::Owner,
        make: |_| takes_signals(),
    },
    Attempt { name: "nothing", works: |_| true, make: |_| useful() },
];

/// Opens the devices that the attempt needs.
pub(crate) fn prepare(name: &str) -> Prepared {
    parent();
    if !matches!(name, "a new VM" | "run a vCPU") {
        return Prepared::default();
    }
    let make = || -> io::Result<Prepared> {
        let kvm = file(unsafe { libc::open(c"/dev/kvm".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) })?;
        if name == "a new VM" {
            return Ok(Prepared { kvm: Some(kvm), ..Prepared::default() });
        }
        let vm = file(unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_CREATE_VM, 0) })?;
        let vcpu = file(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_CREATE_VCPU, 0) })?;
        Ok(Prepared { vcpu: Some((vm, vcpu)), ..Prepared::default() })
    };
    make().unwrap_or_else(|error| Prepared { why: format!("/dev/kvm: {error}"), ..Prepared::default() })
}

/// Makes the attempt, and prints its outcome.
pub(crate) fn attempt(name: &str, role: Role, prepared: Prepared, in_force: &InForce) {
    let outcome = |text: &str| {
        let _ = writeln!(io::stdout(), "{text}");
    };
    let reads = matches!(role, Role::Owner | Role::Arbiter | Role::Api | Role::Metrics | Role::Traces);
    if name.ends_with("a file") && reads && !in_force.landlock.in_force {
        // Without landlock, only the rights of the user protect the file.
        return outcome(&format!("not tried: {}", in_force.landlock.detail));
    }
    let result = match name {
        "panic" => panic!("out of luck"),
        "a new VM" if prepared.kvm.is_none() => return outcome(&format!("not tried: {}", prepared.why)),
        "run a vCPU" => match &prepared.vcpu {
            None => return outcome(&format!("not tried: {}", prepared.why)),
            Some((_, vcpu)) => run_once(vcpu),
        },
        _ => match ATTEMPTS.iter().find(|attempt| attempt.name == name) {
            Some(attempt) => (attempt.make)(&prepared),
            None => Err(io::Error::other("there is no such attempt")),
        },
    };
    match result {
        Ok(()) => outcome("it worked"),
        // The filters allowed the call, and the kernel refused it for another reason.
        Err(error) if name == "userfaultfd" && error.raw_os_error() == Some(libc::EPERM) => {
            outcome("it worked")
        }
        Err(error) => outcome(&format!("it failed: {error}")),
    }
}

const KVM_CREATE_VM: libc::c_ulong = 0xae01;
const KVM_CREATE_VCPU: libc::c_ulong = 0xae41;
const KVM_RUN: libc::c_ulong = 0xae80;

fn file(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}

fn call(make: impl FnOnce() -> i64) -> io::Result<()> {
    if make() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn system(number: i64, a: i64, b: i64, c: i64) -> io::Result<()> {
    call(|| unsafe { libc::syscall(number, a, b, c, 0, 0) })
}

fn parent() -> i32 {
    // The value is read before the process is confined: a confined thread may not read it.
    static PARENT: std::sync::OnceLock<i32> = std::sync::OnceLock::new();
    *PARENT.get_or_init(|| {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1)?.parse().ok()).unwrap_or(1)
    })
}

fn execute() -> io::Result<()> {
    let arguments = [c"/bin/true".as_ptr(), std::ptr::null()];
    call(|| unsafe { libc::execv(c"/bin/true".as_ptr(), arguments.as_ptr()) }.into())
}

fn fork() -> io::Result<()> {
    match unsafe { libc::fork() } {
        0 => unsafe { libc::_exit(0) },
        child => call(|| child.into()),
    }
}

fn open(path: &CStr, flags: i32) -> io::Result<()> {
    file(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC, 0o600) }).map(drop)
}

fn peek() -> io::Result<()> {
    let mut bytes = [0_u8; 8];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 8 };
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(0x40_0000), iov_len: 8 };
    call(|| unsafe { libc::process_vm_readv(parent(), &raw const local, 1, &raw const remote, 1, 0) as i64 })
}

fn mount() -> io::Result<()> {
    let none = c"none".as_ptr();
    call(|| unsafe { libc::mount(none, c"/mnt".as_ptr(), c"tmpfs".as_ptr(), 0, std::ptr::null()) }.into())
}

fn new_vm(prepared: &Prepared) -> io::Result<()> {
    let kvm = prepared.kvm.as_ref().ok_or(io::ErrorKind::NotFound)?;
    file(unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_CREATE_VM, 0) }).map(drop)
}

/// Runs a vCPU without state. Its KVM_RUN returns an error of KVM, not of a filter.
fn run_once(vcpu: &OwnedFd) -> io::Result<()> {
    unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_RUN, 0) };
    Ok(())
}

fn page(access: i32) -> io::Result<*mut libc::c_void> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, flags, -1, 0) };
    if page == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(page) }
}

fn executable() -> io::Result<()> {
    let page = page(libc::PROT_READ | libc::PROT_WRITE)?;
    call(|| unsafe { libc::mprotect(page, 4096, libc::PROT_READ | libc::PROT_EXEC) }.into())
}

fn mapped_executable() -> io::Result<()> {
    page(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC).map(drop)
}

fn ignore_sigsys() -> io::Result<()> {
    let previous = unsafe { libc::signal(libc::SIGSYS, libc::SIG_IGN) };
    if previous == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes a call of glibc's resolver. Standard output is a pipe to the test.
fn unread_bytes() -> io::Result<()> {
    let mut bytes = 0_i32;
    call(|| unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::FIONREAD, &raw mut bytes) }.into())
}

/// Fails if this thread blocks a signal whose handler only the owner can run.
fn takes_signals() -> io::Result<()> {
    let mut blocked: libc::sigset_t = unsafe { std::mem::zeroed() };
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut blocked) };
    let is_blocked = |signal: &i32| unsafe { libc::sigismember(&raw const blocked, *signal) } == 1;
    if [libc::SIGHUP, libc::SIGINT, libc::SIGTERM].iter().any(is_blocked) {
        return Err(io::Error::other("the signal is blocked"));
    }
    Ok(())
}

/// Makes calls that every thread needs.
fn useful() -> io::Result<()> {
    let memory = vec![1_u8; 8 << 20];
    let lock = std::sync::Mutex::new(memory.len());
    std::thread::sleep(std::time::Duration::from_micros(1));
    let map: std::collections::HashMap<_, _> = [(1, lock)].into();
    let mut text = io::stderr();
    writeln!(text, "{}", map.len())
}
