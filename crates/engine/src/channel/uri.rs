//! Addresses of migrations: `tcp:HOST:PORT`, `unix:PATH`, `fd:N`, `file:PATH`.

use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Address at which a guest is sent or received.
///
/// The text form is `tcp:HOST:PORT` (`tcp:[::1]:7000` for an IPv6 address), `unix:PATH`, `fd:N` or
/// `fd:N,M,...`, or `file:PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Uri {
    /// TCP port on a host.
    Tcp {
        /// Name or address of the host. An IPv6 address has no brackets in this field.
        host: String,
        /// Port number. For a listener, 0 means any free port.
        port: u16,
    },
    /// Path of a Unix socket.
    Unix(PathBuf),
    /// Sockets that the caller passes ([`Sockets`](crate::Sockets),
    /// [`Listener::passed`](crate::Listener::passed)). The strings are the caller's names for the
    /// sockets: numbers, or names that begin with a letter or an underscore.
    Fd(Vec<String>),
    /// Path of a file.
    File(PathBuf),
}

/// Error for a text that is not a migration address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a migration address ({why}); use tcp:HOST:PORT, unix:PATH, fd:N or file:PATH")]
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
            "fd" => {
                let names: Vec<_> = rest.split(',').map(str::to_owned).collect();
                if !names.iter().all(|name| is_name(name)) {
                    return Err(wrong("a descriptor is a number, or a name that begins with a letter"));
                }
                let mut seen = HashSet::new();
                if !names.iter().all(|name| seen.insert(name)) {
                    return Err(wrong("a descriptor is named twice"));
                }
                Ok(Self::Fd(names))
            }
            "file" => Ok(Self::File(rest.into())),
            // Other tools have the scheme `tls`, so users may try it.
            "tls" if cfg!(feature = "tls") => {
                Err(wrong("encryption is enabled by certificates, not by the address"))
            }
            "tls" => Err(wrong(
                "encryption is enabled by certificates, not by the address; it needs the feature `tls`, which this build does not have",
            )),
            _ => Err(wrong("the scheme is unknown")),
        }
    }
}

/// Returns true if `name` is valid for a descriptor: a number without leading zeros, or a name of
/// at most 64 characters.
fn is_name(name: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || "_-.:".contains(c);
    match name.chars().next() {
        Some('0'..='9') => name.parse::<i32>().is_ok_and(|number| number.to_string() == name),
        Some(first) => {
            (first.is_ascii_alphabetic() || first == '_') && name.len() <= 64 && name.chars().all(word)
        }
        None => false,
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Fd(names) => write!(f, "fd:{}", names.join(",")),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses_survive_parsing_and_formatting() {
        for text in [
            "tcp:localhost:7000",
            "tcp:[::1]:7000",
            "unix:/run/x.sock",
            "fd:3",
            "fd:3,14,name_1",
            "file:/tmp/a:b",
        ] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "tcp",
            "tcp:",
            "tcp:host",
            "tcp::1",
            "tcp:h:99999",
            "unix:",
            "fd:-1",
            "fd:03",
            "fd:3,",
            "fd:3,3",
            "fd:3x",
            "http://x",
            "tls:h:1",
        ] {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            assert!(error.contains("tcp:HOST:PORT"), "{error}");
        }
    }

    #[test]
    fn tls_scheme_is_refused_and_a_missing_feature_is_named() {
        let error = "tls:host:1".parse::<Uri>().unwrap_err().to_string();
        assert!(error.contains("certificates"), "{error}");
        assert_eq!(error.contains("the feature `tls`"), !cfg!(feature = "tls"), "{error}");
    }

    proptest! {
        #[test]
        fn any_text_is_an_error_or_survives_formatting(text in ".{0,40}") {
            if let Ok(uri) = text.parse::<Uri>() {
                prop_assert_eq!(uri.to_string().parse::<Uri>().unwrap(), uri);
            }
        }
    }
}
