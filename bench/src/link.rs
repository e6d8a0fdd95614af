//! Links that pages travel over: loopback, or a shaped veth pair between two network namespaces
//! that exist for one run.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Properties of a shaped link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Capacity in each direction in bits per second, including headers.
    pub bits_per_s: u64,
    /// TCP congestion control of sockets in the two namespaces that select none. `None` means the
    /// host's default.
    pub congestion: Option<&'static str>,
}

impl Shape {
    /// Returns the arguments of `tc` for a token bucket filter.
    ///
    /// Its queue holds 20 ms of data, and postcopy's pages wait in this queue. Its bucket holds
    /// tokens for about one millisecond, which is what a late timer lets pass at once.
    fn words(self) -> Vec<String> {
        let (rate, burst) = (format!("{}bit", self.bits_per_s), format!("{}b", self.bits_per_s / 8 / 950));
        ["tbf", "rate", &rate, "burst", &burst, "latency", "20ms"].map(String::from).into()
    }
}

/// End of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// End of the process that sends pages.
    Source,
    /// End of the process that receives pages.
    Destination,
}

/// Error of a socket operation.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}: {source}")]
pub struct LinkError {
    action: &'static str,
    source: io::Error,
}

impl LinkError {
    fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| LinkError { action, source }
    }
}

/// Addresses inside the namespaces: TEST-NET-1 (RFC 5737), which no real network uses.
const ADDRESSES: [(Ipv4Addr, &str); 2] =
    [(Ipv4Addr::new(192, 0, 2, 1), "192.0.2.1/30"), (Ipv4Addr::new(192, 0, 2, 2), "192.0.2.2/30")];

/// Name of the device in each namespace.
const DEVICE: &str = "v0";

/// Time after which one call on a socket counts as hung.
const IO_LIMIT: Duration = Duration::from_secs(10);

/// Number of the next link of this process, so that two links at the same time (in tests) have
/// distinct names.
static LINKS: AtomicU32 = AtomicU32::new(0);

/// Programs and privileges that create a shaped link.
#[derive(Debug, Clone)]
pub struct Tools {
    pub(crate) ip: OsString,
    pub(crate) tc: OsString,
    pub(crate) root: bool,
}

impl Tools {
    /// Returns the tools of this host, with the privileges of this process.
    pub fn here() -> Self {
        Tools { ip: "ip".into(), tc: "tc".into(), root: rustix::process::geteuid().is_root() }
    }
}

/// Link between the source and the target.
#[derive(Debug)]
pub enum Link {
    /// Loopback, without a shaper or namespaces.
    Loopback,
    /// Two namespaces with a shaper at each end.
    Shaped(Shaped),
}

/// Both ends of one connection.
#[derive(Debug)]
pub(crate) struct Pair {
    /// Socket of the process that sends pages.
    pub(crate) source: TcpStream,
    /// Socket of the process that requests pages.
    pub(crate) destination: TcpStream,
}

impl Link {
    /// Creates a link of the shape `shape`, or loopback for `None`.
    ///
    /// # Errors
    ///
    /// As for [`Shaped::new`].
    pub(crate) fn of(tools: &Tools, shape: Option<Shape>) -> Result<Self, String> {
        shape.map_or(Ok(Link::Loopback), |shape| Shaped::new(tools, shape).map(Link::Shaped))
    }

    fn namespace(&self, end: End) -> Option<&Namespace> {
        match self {
            Link::Loopback => None,
            Link::Shaped(shaped) => Some(&shaped.ends[end as usize]),
        }
    }

    /// Returns the address of an end. It is valid in both namespaces.
    pub fn address(&self, end: End) -> Ipv4Addr {
        self.namespace(end).map_or(Ipv4Addr::LOCALHOST, |_| ADDRESSES[end as usize].0)
    }

    /// Returns the capacity in each direction in bits per second, including headers. `None` if the
    /// link is not shaped.
    pub fn bits_per_s(&self) -> Option<u64> {
        match self {
            Link::Loopback => None,
            Link::Shaped(shaped) => Some(shaped.shape.bits_per_s),
        }
    }

    /// Makes a process that has yet to be started run at an end. Only its network differs. Files,
    /// and sockets in the file system, stay the same.
    ///
    /// # Errors
    ///
    /// Fails if the process is out of file descriptors.
    pub fn enter(&self, end: End, command: &mut Command) -> io::Result<()> {
        let Some(namespace) = self.namespace(end) else { return Ok(()) };
        let handle = OwnedFd::from(namespace.handle.try_clone()?);
        let enter = move || Ok(move_into_link_name_space(handle.as_fd(), Some(LinkNameSpaceType::Network))?);
        // SAFETY: between fork and exec only async-signal-safe work is allowed. The closure makes
        // one system call on a descriptor that it owns. Its error is a number, for which nothing is
        // allocated.
        unsafe { command.pre_exec(enter) };
        Ok(())
    }

    /// Connects the target to the source.
    pub(crate) fn connect(&self) -> Result<Pair, LinkError> {
        let [source, destination] = [End::Source, End::Destination].map(|end| self.namespace(end));
        let address = self.address(End::Source);
        let listener =
            inside(source, move || TcpListener::bind((address, 0))).map_err(LinkError::io("listen"))?;
        let to = listener.local_addr().map_err(LinkError::io("listen"))?;
        let destination = inside(destination, move || TcpStream::connect_timeout(&to, IO_LIMIT))
            .map_err(LinkError::io("connect to the source"))?;
        let from = destination.local_addr().map_err(LinkError::io("connect to the source"))?;
        let source = accept(&listener, from).map_err(LinkError::io("accept the destination"))?;
        for socket in [&source, &destination] {
            prepare(socket).map_err(LinkError::io("set up a socket"))?;
        }
        Ok(Pair { source, destination })
    }
}

/// Accepts the connection from `from`, and closes others, because any process of this host can
/// connect to loopback.
fn accept(listener: &TcpListener, from: SocketAddr) -> io::Result<TcpStream> {
    // The connection is established already. It is in the queue, behind at most a full queue of
    // other connections.
    for _ in 0..1024 {
        let (socket, peer) = listener.accept()?;
        if peer == from {
            return Ok(socket);
        }
    }
    Err(io::Error::other("only other connections arrive"))
}

fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(IO_LIMIT))?;
    socket.set_write_timeout(Some(IO_LIMIT))
}

/// Runs `make` in a namespace, or in the current one if `namespace` is `None`.
///
/// A socket stays in the namespace in which it was created. Therefore only a thread that ends right
/// afterwards changes its namespace.
fn inside<T: Send>(
    namespace: Option<&Namespace>,
    make: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    let Some(namespace) = namespace else { return make() };
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            move_into_link_name_space(namespace.handle.as_fd(), Some(LinkNameSpaceType::Network))?;
            make()
        });
        worker.join().unwrap_or_else(|_| Err(io::Error::other("the thread that makes sockets panicked")))
    })
}

/// Two namespaces joined by a shaped veth pair. The source is in the first one.
#[derive(Debug)]
pub struct Shaped {
    shape: Shape,
    ends: [Namespace; 2],
    tc: OsString,
}

impl Shaped {
    /// Creates the namespaces and the shapers. They are removed on drop, and also if a later step
    /// fails.
    ///
    /// # Errors
    ///
    /// Returns the reason why this host or this user cannot create the link.
    pub fn new(tools: &Tools, shape: Shape) -> Result<Self, String> {
        if !tools.root {
            return Err("network namespaces need root: run it with sudo".into());
        }
        execute(&tools.ip, &["-V"])?;
        execute(&tools.tc, &["-V"])?;
        let number = LINKS.fetch_add(1, Ordering::Relaxed);
        let name = |end: &str| format!("vmferry-link-{}-{number}{end}", std::process::id());
        let ends = [Namespace::new(tools, name("a"))?, Namespace::new(tools, name("b"))?];
        let [first, second] = [&ends[0].name, &ends[1].name];
        let ip = |arguments: &[&str]| execute(&tools.ip, arguments);
        ip(&["-n", first, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", second])?;
        for (end, (_, address)) in [first, second].into_iter().zip(ADDRESSES) {
            ip(&["-n", end, "addr", "add", address, "dev", DEVICE])?;
            ip(&["-n", end, "link", "set", DEVICE, "up"])?;
        }
        if let Some(congestion) = shape.congestion {
            ends.iter().try_for_each(|end| set_congestion(end, congestion))?;
        }
        let shaped = Shaped { shape, ends, tc: tools.tc.clone() };
        shaped.shape("add", shape)?;
        Ok(shaped)
    }

    /// Changes the capacity of each direction to `bits_per_s` bits per second. Data in the queues
    /// is kept.
    ///
    /// # Errors
    ///
    /// Returns the message of `tc`. The two ends may then differ.
    pub(crate) fn change(&mut self, bits_per_s: u64) -> Result<(), String> {
        let shape = Shape { bits_per_s, ..self.shape };
        self.shape("change", shape)?;
        self.shape = shape;
        Ok(())
    }

    /// Adds or changes the shapers of both ends.
    fn shape(&self, how: &str, shape: Shape) -> Result<(), String> {
        let shaper = shape.words();
        for end in &self.ends {
            let qdisc = ["-n", &end.name, "qdisc", how, "dev", DEVICE, "root"];
            let words: Vec<&str> = qdisc.into_iter().chain(shaper.iter().map(String::as_str)).collect();
            execute(&self.tc, &words)?;
        }
        Ok(())
    }
}

/// Sets the TCP congestion control of sockets that will be created in a namespace.
fn set_congestion(namespace: &Namespace, name: &str) -> Result<(), String> {
    // Under /proc/sys/net a thread sees the settings of its own namespace.
    let write = || std::fs::write("/proc/sys/net/ipv4/tcp_congestion_control", name);
    inside(Some(namespace), write).map_err(|error| {
        let hint = match error.kind() {
            // A namespace may only use the algorithms that the initial namespace allows to all.
            std::io::ErrorKind::PermissionDenied => {
                format!("; sysctl net.ipv4.tcp_allowed_congestion_control must have {name} in it")
            }
            _ => String::new(),
        };
        format!("TCP congestion control {name}: {error}{hint}")
    })
}

/// Named network namespace, which is removed on drop.
#[derive(Debug)]
struct Namespace {
    name: String,
    ip: OsString,
    handle: File,
}

impl Namespace {
    fn new(tools: &Tools, name: String) -> Result<Self, String> {
        execute(&tools.ip, &["netns", "add", &name])?;
        match File::open(format!("/run/netns/{name}")) {
            Ok(handle) => Ok(Namespace { name, ip: tools.ip.clone(), handle }),
            Err(error) => {
                let _ = execute(&tools.ip, &["netns", "del", &name]);
                Err(format!("cannot open the namespace {name}: {error}"))
            }
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The kernel removes the namespace's devices and sockets when its last user is gone.
        if let Err(why) = execute(&self.ip, &["netns", "del", &self.name]) {
            eprintln!("vmferry-bench: {why}; remove it with: ip netns del {}", self.name);
        }
    }
}

/// Runs a program to its end. Its standard error becomes the error.
fn execute(program: &OsString, arguments: &[&str]) -> Result<(), String> {
    let shown = || format!("{} {}", program.display(), arguments.join(" "));
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    match output {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(format!("{} is not installed: it is in iproute2", program.display()))
        }
        Err(error) => Err(format!("cannot run {}: {error}", shown())),
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{}: {}", shown(), String::from_utf8_lossy(&output.stderr).trim())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn shaper_holds_tokens_for_one_millisecond() {
        let words = Shape { bits_per_s: 2_000_000_000, congestion: None }.words().join(" ");
        assert_eq!(words, "tbf rate 2000000000bit burst 263157b latency 20ms");
    }

    const SHAPE: Shape = Shape { bits_per_s: 2_000_000_000, congestion: Some("reno") };

    #[test]
    fn missing_privilege_or_program_is_reported() {
        let here = Tools::here();
        let why = Shaped::new(&Tools { root: false, ..here.clone() }, SHAPE).unwrap_err();
        assert!(why.contains("root"), "{why}");
        let without = Tools { root: true, ip: "/nonexistent/ip".into(), ..here };
        let why = Shaped::new(&without, SHAPE).unwrap_err();
        assert!(why.contains("/nonexistent/ip is not installed"), "{why}");
    }

    fn namespaces() -> Vec<String> {
        let ours = format!("vmferry-link-{}-", std::process::id());
        let entries = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
        entries
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .filter(|n| n.starts_with(&ours))
            .collect()
    }

    #[test]
    fn shaped_link_changes_its_rate_at_both_ends() {
        let tools = Tools::here();
        let mut shaped = match Shaped::new(&tools, SHAPE) {
            Ok(shaped) => shaped,
            Err(why) => return vmferry_testkit::skip(vmferry_testkit::Need::Root, why),
        };
        let rates = |shaped: &Shaped| {
            shaped.ends.each_ref().map(|end| {
                let show = ["-n", &end.name, "qdisc", "show", "dev", DEVICE];
                let output = Command::new(&tools.tc).args(show).output().unwrap();
                let text = String::from_utf8(output.stdout).unwrap();
                text.split_whitespace().skip_while(|word| *word != "rate").nth(1).unwrap().to_owned()
            })
        };
        assert_eq!(rates(&shaped), ["2Gbit", "2Gbit"]);
        shaped.change(1_000_000_000).unwrap();
        assert_eq!(rates(&shaped), ["1Gbit", "1Gbit"]);
        // A rate that the shaper rejects leaves the old rate in place.
        shaped.change(0).unwrap_err();
        assert_eq!(rates(&shaped), ["1Gbit", "1Gbit"]);
        assert_eq!(Link::Shaped(shaped).bits_per_s(), Some(1_000_000_000));
    }

    #[test]
    fn shaped_link_carries_data_and_is_removed_completely() {
        let tools = Tools::here();
        let shaped = match Shaped::new(&tools, SHAPE) {
            Ok(shaped) => shaped,
            Err(why) => return vmferry_testkit::skip(vmferry_testkit::Need::Root, why),
        };
        let names = [shaped.ends[0].name.clone(), shaped.ends[1].name.clone()];
        assert!(names.iter().all(|name| namespaces().contains(name)));
        let link = Link::Shaped(shaped);
        assert_eq!(link.bits_per_s(), Some(SHAPE.bits_per_s));
        let mut child = Command::new("cat");
        child.arg("/proc/sys/net/ipv4/tcp_congestion_control");
        link.enter(End::Destination, &mut child).unwrap();
        assert_eq!(child.output().unwrap().stdout, b"reno\n");
        let mut pair = link.connect().unwrap();
        drop(link);
        assert_eq!(pair.destination.peer_addr().unwrap().ip(), ADDRESSES[0].0);
        assert_eq!(pair.source.peer_addr().unwrap().ip(), ADDRESSES[1].0);
        pair.source.write_all(b"over").unwrap();
        let mut got = [0; 4];
        pair.destination.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"over");
        assert!(!names.iter().any(|name| namespaces().contains(name)), "{:?}", namespaces());

        // A link whose creation fails halfway is removed too.
        let before = LINKS.load(Ordering::Relaxed);
        let folder = tempfile::tempdir().unwrap();
        let broken = folder.path().join("tc");
        std::fs::write(&broken, "#!/bin/sh\n[ \"$1\" = -V ] && exit 0\necho no shaper >&2\nexit 1\n")
            .unwrap();
        rustix::fs::chmod(&broken, rustix::fs::Mode::from_raw_mode(0o700)).unwrap();
        let why = Shaped::new(&Tools { tc: broken.into(), ..tools }, SHAPE).unwrap_err();
        assert!(why.contains("no shaper"), "{why}");
        let made = format!("vmferry-link-{}-{before}", std::process::id());
        assert!(!namespaces().iter().any(|name| name.starts_with(&made)), "{:?}", namespaces());
    }
}
