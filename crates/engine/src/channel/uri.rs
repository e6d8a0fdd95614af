//! Where the other side is: `tcp:HOST:PORT`, `unix:PATH`, `fd:N`, `file:PATH`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Where a guest goes to or comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Uri {
    /// A TCP port.
    Tcp {
        /// Name or address; IPv6 without its brackets.
        host: String,
        /// Port; 0 when listening means any that is free.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
    /// An inherited listening socket, by number.
    Fd(i32),
    /// A file.
    File(PathBuf),
}

/// A text that is no URI of ours.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is no migration address ({why}); use tcp:HOST:PORT, unix:PATH, fd:N or file:PATH")]
pub struct UriError {
    text: String,
    why: &'static str,
}

impl FromStr for Uri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let wrong = |why| UriError { text: text.into(), why };
        let (scheme, rest) = text.split_once(':').ok_or(wrong("it has no scheme"))?;
        if rest.is_empty() {
            return Err(wrong("nothing follows the scheme"));
        }
        match scheme {
            "tcp" => {
                let (host, port) = rest.rsplit_once(':').ok_or(wrong("the port is missing"))?;
                let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
                if host.is_empty() {
                    return Err(wrong("the host is missing"));
                }
                let port = port.parse().map_err(|_| wrong("the port is not a number up to 65535"))?;
                Ok(Self::Tcp { host: host.into(), port })
            }
            "unix" => Ok(Self::Unix(rest.into())),
            "fd" => rest.parse().ok().filter(|fd| *fd >= 0).map(Self::Fd).ok_or(wrong("fd: wants a number")),
            "file" => Ok(Self::File(rest.into())),
            _ => Err(wrong("the scheme is unknown")),
        }
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Fd(fd) => write!(f, "fd:{fd}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses_are_read_and_written_alike() {
        for text in ["tcp:localhost:7000", "tcp:[::1]:7000", "unix:/run/x.sock", "fd:3", "file:/tmp/a:b"] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        for text in
            ["", "tcp", "tcp:", "tcp:host", "tcp::1", "tcp:h:99999", "unix:", "fd:-1", "fd:x", "http://x"]
        {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            assert!(error.contains("tcp:HOST:PORT"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_an_error_or_comes_back(text in ".{0,40}") {
            if let Ok(uri) = text.parse::<Uri>() {
                prop_assert_eq!(uri.to_string().parse::<Uri>().unwrap(), uri);
            }
        }
    }
}
