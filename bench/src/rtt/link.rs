//! Where requests travel: loopback, or a shaped veth pair between two network namespaces made for this run.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::RttError;

/// What the shaped link carries, in 10^9 bits a second, headers included.
pub(super) const SHAPED_GBPS: u32 = 2;

/// The shaper, a token bucket: its queue (20 ms deep) is the one before which postcopy's pages would wait.
fn shaper(gbps: u32) -> [String; 7] {
    ["tbf", "rate", &format!("{gbps}gbit"), "burst", "256kb", "latency", "20ms"].map(str::to_owned)
}

/// Inside the namespaces only: TEST-NET-1 (RFC 5737), which no real network uses.
const ADDRESSES: [(Ipv4Addr, &str); 2] =
    [(Ipv4Addr::new(192, 0, 2, 1), "192.0.2.1/30"), (Ipv4Addr::new(192, 0, 2, 2), "192.0.2.2/30")];

/// The device's name in either namespace.
const DEVICE: &str = "v0";

/// How long one call on a socket may take before the run counts as hung.
const IO_LIMIT: Duration = Duration::from_secs(10);

/// Numbers the links of this process, so that two at once (tests) do not share names.
static LINKS: AtomicU32 = AtomicU32::new(0);

/// The programs that make a shaped link.
#[derive(Debug, Clone)]
pub(super) struct Tools {
    pub(super) ip: OsString,
    pub(super) tc: OsString,
    pub(super) root: bool,
}

impl Tools {
    /// Those of this host, as this user.
    pub(super) fn here() -> Self {
        Tools { ip: "ip".into(), tc: "tc".into(), root: rustix::process::geteuid().is_root() }
    }
}

/// A way from the source to the destination.
#[derive(Debug)]
pub(super) enum Link {
    Loopback,
    Shaped(Shaped),
}

/// One connection: the two ends of it.
#[derive(Debug)]
pub(super) struct Pair {
    /// For the process that sends pages.
    pub(super) source: TcpStream,
    /// For the one that asks for them.
    pub(super) destination: TcpStream,
}

impl Pair {
    /// Has both ends use the TCP congestion control `name`; None: the host's default.
    pub(super) fn set_congestion(&self, name: Option<&str>) -> Result<(), RttError> {
        let Some(name) = name else { return Ok(()) };
        for socket in [&self.source, &self.destination] {
            rustix::net::sockopt::set_tcp_congestion(socket, name)
                .map_err(|source| RttError::Congestion { name: name.into(), source: source.into() })?;
        }
        Ok(())
    }
}

impl Link {
    /// Connects the destination to the source.
    pub(super) fn connect(&self) -> Result<Pair, RttError> {
        let [source, destination] = match self {
            Link::Loopback => [None, None],
            Link::Shaped(shaped) => [Some(&shaped.ends[0]), Some(&shaped.ends[1])],
        };
        let address = source.map_or(Ipv4Addr::LOCALHOST, |_| ADDRESSES[0].0);
        let listener =
            inside(source, move || TcpListener::bind((address, 0))).map_err(RttError::io("listen"))?;
        let to = listener.local_addr().map_err(RttError::io("listen"))?;
        let destination = inside(destination, move || TcpStream::connect_timeout(&to, IO_LIMIT))
            .map_err(RttError::io("connect to the source"))?;
        let from = destination.local_addr().map_err(RttError::io("connect to the source"))?;
        let source = accept(&listener, from).map_err(RttError::io("accept the destination"))?;
        for socket in [&source, &destination] {
            prepare(socket).map_err(RttError::io("set up a socket"))?;
        }
        Ok(Pair { source, destination })
    }
}

/// Takes the connection that comes from `from`; any process of this host can connect to loopback.
fn accept(listener: &TcpListener, from: SocketAddr) -> io::Result<TcpStream> {
    // It is established already, so it is in the queue, behind at most a queue of strangers.
    for _ in 0..1024 {
        let (socket, peer) = listener.accept()?;
        if peer == from {
            return Ok(socket);
        }
    }
    Err(io::Error::other("only strangers connect"))
}

fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(IO_LIMIT))?;
    socket.set_write_timeout(Some(IO_LIMIT))
}

/// Runs `make` in a namespace; None: in our own. A socket stays in the namespace that it was made in, wherever it is
/// used, so only a thread that ends right afterwards ever moves.
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

/// Two namespaces joined by a shaped veth pair; the source is in the first.
#[derive(Debug)]
pub(super) struct Shaped {
    ends: [Namespace; 2],
    tc: OsString,
}

impl Shaped {
    /// Makes it, for `gbps` 10^9 bits a second. What was made is removed when it goes, also if the rest cannot be made.
    ///
    /// # Errors
    /// Why this host or this user cannot have it.
    pub(super) fn new(tools: &Tools, gbps: u32) -> Result<Self, String> {
        if !tools.root {
            return Err("network namespaces need root: run it with sudo".into());
        }
        execute(&tools.ip, &["-V"])?;
        execute(&tools.tc, &["-V"])?;
        let number = LINKS.fetch_add(1, Ordering::Relaxed);
        let name = |end: &str| format!("vmferry-rtt-{}-{number}{end}", std::process::id());
        let ends = [Namespace::new(tools, name("a"))?, Namespace::new(tools, name("b"))?];
        let [first, second] = [&ends[0].name, &ends[1].name];
        let ip = |arguments: &[&str]| execute(&tools.ip, arguments);
        ip(&["-n", first, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", second])?;
        for (end, (_, address)) in [first, second].into_iter().zip(ADDRESSES) {
            ip(&["-n", end, "addr", "add", address, "dev", DEVICE])?;
            ip(&["-n", end, "link", "set", DEVICE, "up"])?;
        }
        let shaped = Shaped { ends, tc: tools.tc.clone() };
        shaped.shape("add", gbps)?;
        Ok(shaped)
    }

    /// From now on, the link carries so many 10^9 bits a second, either way.
    pub(super) fn change(&self, gbps: u32) -> Result<(), String> {
        self.shape("change", gbps)
    }

    fn shape(&self, how: &str, gbps: u32) -> Result<(), String> {
        let shaper = shaper(gbps);
        for end in &self.ends {
            let mut arguments = vec!["-n", &end.name, "qdisc", how, "dev", DEVICE, "root"];
            arguments.extend(shaper.iter().map(String::as_str));
            execute(&self.tc, &arguments)?;
        }
        Ok(())
    }
}

/// A named network namespace of ours, removed when dropped.
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
        // Its devices and sockets go with it once nothing holds it any more.
        if let Err(why) = execute(&self.ip, &["netns", "del", &self.name]) {
            eprintln!("bench rtt: {why}; remove it with: ip netns del {}", self.name);
        }
    }
}

/// Runs a program to its end. If it fails: what it said.
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
    use std::io::{Read, Write, stdout};

    #[test]
    fn what_is_missing_is_said() {
        let here = Tools::here();
        let why = Shaped::new(&Tools { root: false, ..here.clone() }, SHAPED_GBPS).unwrap_err();
        assert!(why.contains("root"), "{why}");
        let without = Tools { root: true, ip: "/nonexistent/ip".into(), ..here };
        let why = Shaped::new(&without, SHAPED_GBPS).unwrap_err();
        assert!(why.contains("/nonexistent/ip is not installed"), "{why}");
    }

    fn namespaces() -> Vec<String> {
        let ours = format!("vmferry-rtt-{}-", std::process::id());
        let entries = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
        entries
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .filter(|n| n.starts_with(&ours))
            .collect()
    }

    #[test]
    fn a_shaped_link_carries_and_leaves_nothing_behind() {
        let tools = Tools::here();
        let shaped = match Shaped::new(&tools, SHAPED_GBPS) {
            Ok(shaped) => shaped,
            Err(why) => return writeln!(stdout(), "not run: {why}").unwrap(),
        };
        let names = [shaped.ends[0].name.clone(), shaped.ends[1].name.clone()];
        assert!(names.iter().all(|name| namespaces().contains(name)));
        let mut pair = Link::Shaped(shaped).connect().unwrap();
        assert_eq!(pair.destination.peer_addr().unwrap().ip(), ADDRESSES[0].0);
        assert_eq!(pair.source.peer_addr().unwrap().ip(), ADDRESSES[1].0);
        pair.source.write_all(b"over").unwrap();
        let mut got = [0; 4];
        pair.destination.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"over");
        assert!(!names.iter().any(|name| namespaces().contains(name)), "{:?}", namespaces());

        // One that fails in the middle cleans up, too.
        let before = LINKS.load(Ordering::Relaxed);
        let folder = tempfile::tempdir().unwrap();
        let broken = folder.path().join("tc");
        std::fs::write(&broken, "#!/bin/sh\n[ \"$1\" = -V ] && exit 0\necho no shaper >&2\nexit 1\n")
            .unwrap();
        rustix::fs::chmod(&broken, rustix::fs::Mode::from_raw_mode(0o700)).unwrap();
        let why = Shaped::new(&Tools { tc: broken.into(), ..tools }, SHAPED_GBPS).unwrap_err();
        assert!(why.contains("no shaper"), "{why}");
        let made = format!("vmferry-rtt-{}-{before}", std::process::id());
        assert!(!namespaces().iter().any(|name| name.starts_with(&made)), "{:?}", namespaces());
    }
}
