//! Inherited and passed descriptors, and the ones that may carry a migration.
//!
//! A descriptor comes in one of three ways: at start by `LISTEN_FDS` (sd_listen_fds(3)), at start
//! because the command line names it, or over the control socket (`getfd`). Each has one owner. A
//! number that a client of the control socket names otherwise could be any descriptor of this
//! process: its disk, a vCPU, the control socket itself.

use crate::api::Client;
use crate::usage::wrong_usage;
use anyhow::{Context, Result, bail};
use rustix::net::SocketType;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use vmferry_engine::Uri;

/// Most sockets that wait to be used. A migration has at most 130 channels.
const MOST: usize = 256;
/// The first descriptor that a service manager passes.
const FIRST: RawFd = 3;

/// Raises the limit of open files to what an unprivileged process may use. The usual limit of 1024
/// is for programs that use `select`. This process waits with `poll`, and may need more: for the
/// files of `--have`, and for clients, channels and taps besides.
pub(crate) fn raise_limit() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised) {
        tracing::warn!("the limit of open files stays at {:?}: {error}", limit.current);
    }
}

/// Descriptors that the command line or the service manager names, taken over before this process
/// has opened any.
#[derive(Debug)]
pub(crate) struct Inherited {
    open: BTreeMap<RawFd, OwnedFd>,
    /// Descriptors that the service manager passed.
    listed: Vec<RawFd>,
}

impl Inherited {
    /// Takes over the descriptors that belong to this process. `run` closes all others but the
    /// standard streams: landlock does not cover what is open. Must be called before anything is
    /// opened.
    pub(crate) fn take() -> Self {
        let words: Vec<_> =
            std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
        let runs = match words.first().map(String::as_str) {
            Some("run") => true,
            Some("migrate") => false,
            _ => return Self { open: BTreeMap::new(), listed: Vec::new() },
        };
        let variable = |name| std::env::var(name).ok();
        let listed = if runs { listed(variable("LISTEN_PID"), variable("LISTEN_FDS")) } else { Vec::new() };
        let opened = by_path(&words);
        let own: Vec<_> =
            passed(&words).chain(listed.iter().copied()).filter(|fd| !opened.contains(fd)).collect();
        if runs {
            vmferry_confine::close_inherited(&[&own[..], &opened].concat());
        }
        // SAFETY: this process has opened no descriptor yet, and this is called once.
        let open = unsafe { vmferry_confine::take_inherited(&own) };
        Self { open, listed }
    }

    /// Takes out the descriptor `number`.
    ///
    /// # Errors
    /// If the command line did not name it, or this process was started without it.
    pub(crate) fn remove(&mut self, number: RawFd) -> Result<OwnedFd> {
        if number < FIRST {
            bail!("descriptor {number} is a standard stream; pass another one");
        }
        let descriptor = self.open.remove(&number);
        descriptor
            .with_context(|| format!("this process was started without descriptor {number}; pass it open"))
    }
}

/// Numbers that `LISTEN_FDS` names, if it is meant for this process.
fn listed(pid: Option<String>, count: Option<String>) -> Vec<RawFd> {
    let own = pid.and_then(|pid| pid.parse().ok()) == Some(std::process::id());
    let count: Option<RawFd> = count.filter(|_| own).and_then(|count| count.parse().ok());
    let most = RawFd::try_from(MOST).unwrap_or(RawFd::MAX);
    (FIRST..FIRST + count.unwrap_or(0).clamp(0, most)).collect()
}

/// Numbers that follow `mark` in a word, also in the midst of it, with commas between them.
fn after<'a>(word: &'a str, mark: &'a str) -> impl Iterator<Item = RawFd> + 'a {
    word.split(mark).skip(1).flat_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != ',').unwrap_or(rest.len());
        rest[..end].split(',').filter_map(|number| number.parse().ok())
    })
}

/// Descriptors that the command line passes: `fd:3,4`, `--pass-fd 5`, `--pass-fd=6`, and those of a
/// successor.
fn passed(words: &[String]) -> impl Iterator<Item = RawFd> + '_ {
    let marks = ["fd:", "--pass-fd=", crate::net::DESCRIPTOR];
    let named = words.iter().flat_map(move |word| marks.into_iter().flat_map(|mark| after(word, mark)));
    let pairs = words.windows(2).filter(|pair| pair[0] == "--pass-fd");
    named.chain(pairs.filter_map(|pair| pair[1].parse().ok()))
}

/// Descriptors that the command line names as files: `/dev/fd/63`, `/proc/self/fd/9`.
fn by_path(words: &[String]) -> Vec<RawFd> {
    words.iter().flat_map(|word| after(word, "/fd/")).collect()
}

/// Sockets for migrations that were passed to this process, by name. Taking one out hands it over,
/// so that it is used once.
#[derive(Debug, Default)]
pub(crate) struct Descriptors(Mutex<BTreeMap<String, OwnedFd>>);

impl Descriptors {
    /// Keeps the descriptors of `inherited` that are for migrations: the service manager passed
    /// them, or `--pass-fd` or an address names them. Closes all others.
    ///
    /// # Errors
    /// If a number that `--pass-fd` names is not an open stream socket.
    pub(crate) fn at_start(mut inherited: Inherited, pass: &[RawFd], incoming: Option<&Uri>) -> Result<Self> {
        let mut all = BTreeMap::new();
        for number in pass {
            if *number < FIRST {
                wrong_usage!("--pass-fd {number}: the descriptor is a standard stream; pass another one");
            }
            let socket = inherited.remove(*number).and_then(socket);
            all.insert(number.to_string(), socket.with_context(|| format!("--pass-fd {number}"))?);
        }
        for number in std::mem::take(&mut inherited.listed) {
            let Some(descriptor) = inherited.open.remove(&number) else { continue };
            match socket(descriptor) {
                Ok(socket) => drop(all.insert(number.to_string(), socket)),
                Err(why) => tracing::warn!("LISTEN_FDS: descriptor {number} is closed: {why:#}"),
            }
        }
        if let Some(Uri::Fd(names)) = incoming {
            for name in names {
                // A descriptor that is missing, or is not a socket, is an error when it is used.
                let number = name.parse().ok().filter(|number| *number >= FIRST);
                let descriptor = number.and_then(|number| inherited.open.remove(&number));
                descriptor.map(|descriptor| all.insert(name.clone(), descriptor));
            }
        }
        Ok(Self(Mutex::new(all)))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a socket that came over the control socket. A socket that has the same name is closed.
    ///
    /// # Errors
    /// If the name is not permitted, the descriptor is not a stream socket, or too many sockets
    /// wait.
    pub(crate) fn add(&self, name: &str, descriptor: OwnedFd) -> Result<()> {
        let words = format!("fd:{name}").parse::<Uri>().is_ok_and(|uri| uri == Uri::Fd(vec![name.into()]));
        if !words || name.starts_with(|first: char| first.is_ascii_digit()) {
            bail!("a name is a letter or '_', and up to 63 more letters, digits, '_', '-', '.' or ':'");
        }
        let socket = socket(descriptor)?;
        let mut all = self.lock();
        if all.len() >= MOST && !all.contains_key(name) {
            bail!("{MOST} descriptors wait to be used; close some with closefd");
        }
        all.insert(name.to_owned(), socket);
        Ok(())
    }

    /// Takes the named sockets out: all, or none if one is missing.
    ///
    /// # Errors
    /// If a socket is missing.
    pub(crate) fn take(&self, names: &[String]) -> Result<Vec<OwnedFd>> {
        let mut all = self.lock();
        if let Some(missing) = names.iter().find(|name| !all.contains_key(*name)) {
            let known = all.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let known =
                if known.is_empty() { "none waits to be used".into() } else { format!("known: {known}") };
            bail!(
                "no descriptor '{missing}' was passed to this process, or it has been used ({known}); pass it at start with --pass-fd, or over \
                 the control socket with getfd"
            );
        }
        Ok(names.iter().filter_map(|name| all.remove(name)).collect())
    }
}

/// Returns the descriptor, if it is a stream socket.
fn socket(descriptor: OwnedFd) -> Result<OwnedFd> {
    match rustix::net::sockopt::socket_type(&descriptor) {
        Ok(SocketType::STREAM) => Ok(descriptor),
        Ok(_) => bail!("the descriptor is not a stream socket; pass a TCP or Unix stream socket"),
        Err(_) => bail!("the descriptor is not a socket; pass a TCP or Unix stream socket"),
    }
}

/// Descriptors of this process that were passed to another vmferry for a migration, under the names
/// that they have in that process.
pub(crate) struct PassedDescriptors(Vec<String>);

impl PassedDescriptors {
    /// Passes the descriptors that `uri` names by number to the vmferry that `client` is connected
    /// to. Returns the address with their names in that process. Names that are words refer to
    /// descriptors that the other vmferry has.
    ///
    /// # Errors
    /// If this process does not have a descriptor, or the other process refuses it.
    pub(crate) fn over(client: &mut Client, uri: &Uri, mut inherited: Inherited) -> Result<(Uri, Self)> {
        let Uri::Fd(names) = uri else { return Ok((uri.clone(), Self(Vec::new()))) };
        let (mut target_names, mut handed) = (Vec::new(), Self(Vec::new()));
        for name in names {
            let Ok(number) = name.parse() else {
                target_names.push(name.clone());
                continue;
            };
            let own = format!("vmferry-{}-{number}", std::process::id());
            let passed =
                inherited.remove(number).and_then(|descriptor| client.pass(&own, descriptor.as_fd()));
            if let Err(error) = passed {
                handed.take_back(client);
                return Err(error).with_context(|| uri.to_string());
            }
            handed.0.push(own.clone());
            target_names.push(own);
        }
        Ok((Uri::Fd(target_names), handed))
    }

    /// Makes the other process close the descriptors, because the migration did not begin.
    pub(crate) fn take_back(self, client: &mut Client) {
        for name in self.0 {
            // The other process does not have the descriptor any more if it began to use it.
            let _ = client.close(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn end() -> OwnedFd {
        UnixStream::pair().unwrap().0.into()
    }

    #[test]
    fn descriptors_are_found_where_the_command_line_names_them() {
        let numbers = |line: &str| passed(&words(line)).collect::<Vec<_>>();
        assert_eq!(numbers("run --incoming fd:3"), [3]);
        assert_eq!(numbers("run --incoming=fd:12,13,14"), [12, 13, 14]);
        assert_eq!(numbers("run --pass-fd 5 --pass-fd=6"), [6, 5]);
        assert_eq!(numbers("run --incoming fd:x --pass-fd x --pass-fd"), [0; 0]);
        assert_eq!(numbers("run --incoming tcp:127.0.0.1:7000"), [0; 0]);
        let arbiter = words("run --fence etcd:https://a:1,ca=/dev/fd/63,password=/proc/self/fd/9");
        assert_eq!(by_path(&arbiter), [63, 9]);
    }

    #[test]
    fn a_service_manager_passes_descriptors_to_the_process_that_it_names() {
        let own = Some(std::process::id().to_string());
        let count = |text: &str| Some(text.to_owned());
        assert_eq!(listed(own.clone(), count("2")), [3, 4]);
        assert_eq!(listed(count("1"), count("2")), [0; 0]);
        assert_eq!(listed(None, count("2")), [0; 0]);
        for wrong in ["-1", "x", ""] {
            assert_eq!(listed(own.clone(), count(wrong)), [0; 0]);
        }
        assert_eq!(listed(own, count("2000000000")).len(), MOST);
    }

    #[test]
    fn descriptor_is_used_once_and_a_missing_one_is_named_with_the_known_ones() {
        let all = Descriptors::default();
        all.add("one", end()).unwrap();
        all.add("two", end()).unwrap();
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let error = all.take(&names(&["one", "three"])).unwrap_err().to_string();
        assert!(error.contains("'three'") && error.contains("known: one, two"), "{error}");
        assert_eq!(all.take(&names(&["two", "one"])).unwrap().len(), 2, "none was taken before");
        let error = all.take(&names(&["one"])).unwrap_err().to_string();
        assert!(error.contains("none waits to be used"), "{error}");
    }

    #[test]
    fn only_stream_sockets_with_proper_names_are_kept() {
        let all = Descriptors::default();
        for name in ["", "3", "3x", "a,b", "a b", &"x".repeat(65)] {
            assert!(all.add(name, end()).is_err(), "{name}");
        }
        let null = std::fs::File::open("/dev/null").unwrap().into();
        assert!(all.add("null", null).unwrap_err().to_string().contains("not a socket"));
        let datagrams = std::os::unix::net::UnixDatagram::unbound().unwrap().into();
        assert!(all.add("datagrams", datagrams).unwrap_err().to_string().contains("not a stream socket"));
        assert!(all.lock().is_empty());
        (0..MOST).for_each(|number| all.add(&format!("fd-{number}"), end()).unwrap());
        assert!(all.add("more", end()).unwrap_err().to_string().contains("closefd"));
        all.add("fd-0", end()).unwrap();
    }

    #[test]
    fn errors_name_numbers_that_were_not_passed() {
        let nothing = || Inherited { open: BTreeMap::new(), listed: vec![3] };
        let error = format!("{:#}", Descriptors::at_start(nothing(), &[9], None).unwrap_err());
        assert!(error.contains("--pass-fd 9") && error.contains("started without descriptor 9"), "{error}");
        let error = format!("{:#}", Descriptors::at_start(nothing(), &[1], None).unwrap_err());
        assert!(error.contains("standard stream"), "{error}");
        let incoming = "fd:7".parse().unwrap();
        let none = Descriptors::at_start(nothing(), &[], Some(&incoming)).unwrap();
        assert!(none.take(&["7".into()]).unwrap_err().to_string().contains("'7'"));
        let open = BTreeMap::from([(7, end()), (8, end())]);
        let some = Descriptors::at_start(Inherited { open, listed: vec![8] }, &[], Some(&incoming)).unwrap();
        assert_eq!(some.lock().keys().collect::<Vec<_>>(), ["7", "8"]);
    }
}
