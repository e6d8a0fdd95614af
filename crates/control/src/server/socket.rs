//! Listening socket that only this user and root can use.

use super::ServerError;
use rustix::fs::{Mode, fchmod};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen as start, socket_with,
};
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// Listens at `path` with a socket that has the mode 0600 from the beginning. A socket at which no
/// process listens any more is replaced. A socket in use is not.
pub(super) fn listen(path: &Path) -> Result<UnixListener, ServerError> {
    let failed = |error: rustix::io::Errno| ServerError::Listen(path.into(), error.into());
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
    // Linux gives the file the mode of the socket, less the umask. Therefore other users cannot
    // connect, not even right after the call of `bind`.
    fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed)?;
    match bind(&socket, &address) {
        Err(rustix::io::Errno::ADDRINUSE) if abandoned(path) => {
            std::fs::remove_file(path).map_err(|error| ServerError::Listen(path.into(), error))?;
            bind(&socket, &address).map_err(failed)?;
        }
        Err(rustix::io::Errno::ADDRINUSE) => return Err(ServerError::Taken(path.into())),
        result => result.map_err(failed)?,
    }
    start(&socket, BACKLOG).map_err(failed)?;
    Ok(socket.into())
}

fn abandoned(path: &Path) -> bool {
    // Check the kind of the file, because a connection to a file that is not a socket is refused
    // with the same error.
    let socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    socket && UnixStream::connect(path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

/// Checks that the user of the client is this user or root. The kernel reports the user, so the
/// check does not depend on the mode of the file.
pub(super) fn check_peer(stream: &UnixStream) -> Result<(), String> {
    let peer = rustix::net::sockopt::socket_peercred(stream)
        .map_err(|error| format!("the user of the client is unknown ({error}); refused"))?;
    let (uid, own) = (peer.uid, rustix::process::geteuid());
    if permitted(uid.as_raw(), own.as_raw()) {
        return Ok(());
    }
    Err(format!(
        "user {} (process {}) may not control this guest; only user {} and root may",
        uid.as_raw(),
        peer.pid.as_raw_nonzero(),
        own.as_raw()
    ))
}

fn permitted(peer: u32, own: u32) -> bool {
    peer == own || peer == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn socket_has_mode_0600_and_replaces_only_an_abandoned_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api");
        let first = listen(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert!(matches!(listen(&path), Err(ServerError::Taken(_))), "a process listens");
        drop(first);
        drop(listen(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(listen(&path), Err(ServerError::Taken(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious", "a file that is not a socket stays");
        let missing = folder.path().join("no/folder");
        assert!(matches!(listen(&missing), Err(ServerError::Listen(..))));
        assert!(matches!(listen(Path::new(&"x".repeat(200))), Err(ServerError::Listen(..))));
    }

    #[test]
    fn only_this_user_and_root_are_permitted() {
        assert!(permitted(1000, 1000) && permitted(0, 1000) && permitted(0, 0));
        assert!(!permitted(1001, 1000) && !permitted(1000, 0));
        let (one, _other) = UnixStream::pair().unwrap();
        assert_eq!(check_peer(&one), Ok(()));
    }
}
