//! A listening socket that is this user's alone.

use super::ServerError;
use rustix::fs::{Mode, fchmod};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen as start, socket_with,
};
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Connections that wait to be taken.
const BACKLOG: i32 = 64;

/// Listens at `path`, with mode 0600 from the first moment on. A socket that nobody listens at any more is replaced; one that somebody
/// does is not.
pub(super) fn listen(path: &Path) -> Result<UnixListener, ServerError> {
    let failed = |error: rustix::io::Errno| ServerError::Listen(path.into(), error.into());
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
    // Linux gives the file the mode that the socket has, less the umask: so there is no moment in which others could connect.
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
    // Connecting to what is no socket is refused, too.
    let socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    socket && UnixStream::connect(path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

/// Fails unless the other side is this user or root; by what the kernel says of it, whatever the file's mode has become.
pub(super) fn check_peer(stream: &UnixStream) -> Result<(), String> {
    let peer = rustix::net::sockopt::socket_peercred(stream)
        .map_err(|error| format!("it cannot be told who connects ({error}); refused"))?;
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
    fn the_socket_is_its_users_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api");
        let first = listen(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert!(matches!(listen(&path), Err(ServerError::Taken(_))), "somebody listens");
        drop(first);
        drop(listen(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(listen(&path), Err(ServerError::Taken(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious", "what is no socket stays");
        let missing = folder.path().join("no/folder");
        assert!(matches!(listen(&missing), Err(ServerError::Listen(..))));
        assert!(matches!(listen(Path::new(&"x".repeat(200))), Err(ServerError::Listen(..))));
    }

    #[test]
    fn this_user_and_root_and_nobody_else() {
        assert!(permitted(1000, 1000) && permitted(0, 1000) && permitted(0, 0));
        assert!(!permitted(1001, 1000) && !permitted(1000, 0));
        let (one, _other) = UnixStream::pair().unwrap();
        assert_eq!(check_peer(&one), Ok(()));
    }
}
