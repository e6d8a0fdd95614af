//! Option `--fence`: the arbiter that decides who owns a guest when neither source nor target can
//! know.

mod answer;
mod etcd;

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use vmferry_engine::arbiter::{Arbiter, ArbiterError, ArbiterRequest, MigrationId, Ownership, Side};

/// Default prefix of the registers.
const PREFIX: &str = "/vmferry/";
/// Most addresses of one cluster.
const MOST_ENDPOINTS: usize = 16;
/// Most bytes of a prefix.
const MOST_PREFIX: usize = 256;

/// Arbiter as the command line names it:
/// `etcd:URL[,URL...][,prefix=PREFIX][,ca=FILE][,cert=FILE,key=FILE][,user=NAME,password=FILE]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ArbiterArg {
    endpoints: Vec<String>,
    prefix: String,
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    user: Option<String>,
    password: Option<PathBuf>,
}

impl FromStr for ArbiterArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = "write etcd:http://127.0.0.1:2379, or etcd:https://one:2379,https://two:2379,ca=FILE";
        let rest = text.strip_prefix("etcd:").ok_or_else(|| format!("'{text}' is not an arbiter; {form}"))?;
        let (ca, cert, key, user, password) = (None, None, None, None, None);
        let mut arg = Self { endpoints: Vec::new(), prefix: PREFIX.into(), ca, cert, key, user, password };
        for part in rest.split(',') {
            match part.split_once('=') {
                Some(("prefix", prefix)) => arg.prefix = self::prefix(prefix)?,
                Some(("ca", file)) => arg.ca = Some(file.into()),
                Some(("cert", file)) => arg.cert = Some(file.into()),
                Some(("key", file)) => arg.key = Some(file.into()),
                Some(("user", name)) => arg.user = Some(name.into()),
                Some(("password", file)) => arg.password = Some(file.into()),
                _ => arg
                    .endpoints
                    .push(endpoint(part).ok_or_else(|| format!("'{part}' is not a URL; {form}"))?),
            }
        }
        if arg.endpoints.is_empty() || arg.endpoints.len() > MOST_ENDPOINTS {
            return Err(format!("1 to {MOST_ENDPOINTS} URLs of one etcd are needed; {form}"));
        }
        goes_together(
            &arg.endpoints,
            (arg.ca.is_some(), arg.cert.is_some(), arg.key.is_some()),
            (arg.user.is_some(), arg.password.is_some()),
        )?;
        Ok(arg)
    }
}

/// Checks that the given parts fit together.
fn goes_together(
    endpoints: &[String],
    (ca, cert, key): (bool, bool, bool),
    (user, password): (bool, bool),
) -> Result<(), String> {
    if cert != key {
        return Err("only one of cert= and key= is given; give both, or neither".into());
    }
    if user != password {
        return Err(
            "only one of user= and password= (a file that holds it) is given; give both, or neither".into()
        );
    }
    if !ca && (cert || endpoints.iter().any(|at| at.starts_with("https:"))) {
        return Err("an etcd at https needs ca=FILE, the certificates of its authorities".into());
    }
    Ok(())
}

/// Returns the prefix with a final slash, so that the keys of two prefixes cannot collide.
fn prefix(text: &str) -> Result<String, String> {
    let prefix = format!("{}/", text.trim_end_matches('/'));
    if prefix.len() > MOST_PREFIX || !prefix.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(format!(
            "a prefix has at most {MOST_PREFIX} bytes, none of them a space or beyond ASCII"
        ));
    }
    Ok(prefix)
}

/// Returns a URL without a path; `None` if `text` is none.
fn endpoint(text: &str) -> Option<String> {
    let (scheme, rest) = text.split_once("://")?;
    let authority = rest.strip_suffix('/').unwrap_or(rest);
    let plain = |c: char| c.is_ascii_alphanumeric() || ".-_:[]".contains(c);
    let fits = matches!(scheme, "http" | "https") && !authority.is_empty() && authority.chars().all(plain);
    fits.then(|| format!("{scheme}://{authority}"))
}

/// Arbiter with the contents of its files. The process that has the guest gets these contents,
/// because it need not be able to read the files.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct ArbiterTexts {
    endpoints: Vec<String>,
    #[serde(default = "default_prefix")]
    prefix: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    authorities: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    certificate: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    password: Option<String>,
}

/// Arbiter in a request: with the contents of its files, or in the form of the command line. In the
/// second form the process that has the guest reads the files.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(crate) enum ArbiterConfig {
    Texts(Box<ArbiterTexts>),
    Said(String),
}

// Not derived, so that errors name the field.
impl<'de> Deserialize<'de> for ArbiterConfig {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(text) => Ok(Self::Said(text)),
            texts => serde_json::from_value(texts).map(Self::Texts).map_err(serde::de::Error::custom),
        }
    }
}

fn default_prefix() -> String {
    PREFIX.into()
}

impl fmt::Debug for ArbiterTexts {
    // Keys and passwords must not be logged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceTexts").field("endpoints", &self.endpoints).finish_non_exhaustive()
    }
}

impl ArbiterArg {
    /// Returns the named files.
    pub(crate) fn files(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.ca, &self.cert, &self.key, &self.password].into_iter().flatten()
    }

    /// Reads the named files.
    pub(crate) fn texts(&self) -> Result<ArbiterTexts> {
        let bytes = |file: &PathBuf| {
            std::fs::read(file).with_context(|| format!("--fence: cannot read {}", file.display()))
        };
        // Comments between certificates may be in any encoding.
        let read = |file: &Option<PathBuf>| {
            let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
            file.as_ref().map(bytes).transpose().map(|read| read.map(text))
        };
        let password = self.password.as_ref().map(bytes).transpose()?.map(String::from_utf8).transpose();
        let password = password.context("--fence: the password is not UTF-8")?;
        Ok(ArbiterTexts {
            endpoints: self.endpoints.clone(),
            prefix: self.prefix.clone(),
            authorities: read(&self.ca)?,
            certificate: read(&self.cert)?,
            key: read(&self.key)?,
            user: self.user.clone(),
            password: password.map(|text| text.trim_end_matches(['\r', '\n']).to_owned()),
        })
    }

    /// Returns the arbiter, without a request to it: see [`ArbiterTexts::build`].
    pub(crate) fn build(&self, insecure: bool) -> Result<Arc<dyn Arbiter>> {
        self.texts()?.build(insecure)
    }
}

impl ArbiterConfig {
    /// Returns whether the request contains a key or a password.
    pub(crate) fn has_secrets(&self) -> bool {
        matches!(self, Self::Texts(texts) if texts.key.is_some() || texts.password.is_some())
    }

    pub(crate) fn build(&self, insecure: bool) -> Result<Arc<dyn Arbiter>> {
        match self {
            Self::Texts(texts) => texts.build(insecure),
            Self::Said(text) => {
                let arg: ArbiterArg = text.parse().map_err(|error: String| anyhow!("--fence: {error}"))?;
                arg.build(insecure)
            }
        }
    }
}

impl ArbiterTexts {
    /// Returns the arbiter, without a request to it. Plain connections to other hosts need
    /// `insecure`: an attacker who can change the answers of etcd decides who runs the guest.
    pub(crate) fn build(&self, insecure: bool) -> Result<Arc<dyn Arbiter>> {
        let plain = |at: &&String| at.starts_with("http:") && !is_loopback(at);
        if let Some(at) = self.endpoints.iter().find(plain).filter(|_| !insecure) {
            bail!(
                "--fence: {at} is not on this host, and plain connections can be read and changed on the way; use https, or \
                 --insecure to allow it"
            );
        }
        // The texts may come from a request, so they are checked like those of a command line.
        let endpoints = self.endpoints.iter().map(|at| endpoint(at)).collect::<Option<Vec<_>>>();
        let endpoints = endpoints
            .filter(|all| !all.is_empty() && all.len() <= MOST_ENDPOINTS)
            .with_context(|| format!("--fence: 1 to {MOST_ENDPOINTS} URLs of one etcd are needed"))?;
        let prefix = self::prefix(&self.prefix).map_err(|error| anyhow!("--fence: {error}"))?;
        goes_together(
            &endpoints,
            (self.authorities.is_some(), self.certificate.is_some(), self.key.is_some()),
            (self.user.is_some(), self.password.is_some()),
        )
        .map_err(|error| anyhow!("--fence: {error}"))?;
        let bytes = |text: &Option<String>| text.as_ref().map(|text| text.clone().into_bytes());
        let access = etcd::Access {
            ca: bytes(&self.authorities),
            own: bytes(&self.certificate).zip(bytes(&self.key)),
            user: self.user.clone().zip(self.password.clone()),
        };
        Ok(Arc::new(etcd::Etcd::new(endpoints, prefix, access).context("--fence")?))
    }
}

fn is_loopback(endpoint: &str) -> bool {
    let authority = endpoint.split_once("://").map_or("", |(_, rest)| rest);
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Arbiter that is asked for operators, on a thread of its own: the threads of the control socket
/// may not connect to other hosts.
#[derive(Debug, Clone)]
pub(crate) struct ArbiterThread {
    arbiter: Arc<dyn Arbiter>,
    claims: Sender<(MigrationId, Sender<Result<Ownership, ArbiterError>>)>,
}

impl ArbiterThread {
    /// Starts the thread, which ends when this value is dropped. Only the machine's owner thread
    /// may start it.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(arbiter: Arc<dyn Arbiter>) -> Result<Self> {
        let (claims, asked) = channel::<(MigrationId, Sender<_>)>();
        let at = Arc::clone(&arbiter);
        let work = move || {
            for (migration, answer) in asked {
                // The caller may have gone.
                let _ = answer.send(at.request(migration, ArbiterRequest::Claim(Side::Source)));
            }
        };
        vmferry_thread::spawn(vmferry_thread::Role::Arbiter, "fence-people", work)?;
        Ok(Self { arbiter, claims })
    }

    fn claim(&self, migration: MigrationId) -> Result<Ownership, ArbiterError> {
        let (answer, answered) = channel();
        let gone = || ArbiterError::Unreachable("the thread that asks the arbiter has ended".into());
        self.claims.send((migration, answer)).map_err(|_| gone())?;
        answered.recv().map_err(|_| gone())?
    }
}

/// Arbiter of a migration of this process, and the migration's id.
#[derive(Debug, Clone)]
pub(crate) struct MigrationArbiter(pub(crate) ArbiterThread, pub(crate) MigrationId);

impl MigrationArbiter {
    /// Claims the guest for its source, at the operator's request. The source may run the guest
    /// only if this call succeeds.
    pub(crate) fn take(&self) -> Result<()> {
        let Self(asked, migration) = self;
        let register = asked.arbiter.register(*migration);
        match asked.claim(*migration) {
            Ok(Ownership::Source) => Ok(()),
            Ok(owner) => {
                bail!("the arbiter {owner}; the guest must not run at the source as well ({register})")
            }
            Err(error) => bail!("{error}; the guest may run at the target ({register})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl fmt::Display for ArbiterArg {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "etcd:{},prefix={}", self.endpoints.join(","), self.prefix)?;
            for (name, file) in [("ca", &self.ca), ("cert", &self.cert), ("key", &self.key)] {
                if let Some(file) = file {
                    write!(f, ",{name}={}", file.display())?;
                }
            }
            match (&self.user, &self.password) {
                (Some(user), Some(file)) => write!(f, ",user={user},password={}", file.display()),
                _ => Ok(()),
            }
        }
    }

    #[test]
    fn arbiter_address_is_one_argument() {
        let arg: ArbiterArg = "etcd:http://127.0.0.1:2379".parse().unwrap();
        assert_eq!(arg.to_string(), "etcd:http://127.0.0.1:2379,prefix=/vmferry/");
        assert_eq!(arg.to_string().parse(), Ok(arg));
        let all =
            "etcd:https://a:1/,https://[::1]:2,prefix=/x/y,ca=c.crt,cert=o.crt,key=o.key,user=u,password=p";
        let arg: ArbiterArg = all.parse().unwrap();
        assert_eq!((arg.endpoints.len(), arg.prefix.as_str()), (2, "/x/y/"));
        assert_eq!(arg.to_string().parse(), Ok(arg));
        for wrong in [
            "http://127.0.0.1:2379",
            "etcd:",
            "etcd:127.0.0.1:2379",
            "etcd:ftp://a:1",
            "etcd:http://user:pass@a:1",
            "etcd:http://a:1/path",
            "etcd:https://a:1",
            "etcd:http://a:1,cert=x",
            "etcd:http://a:1,user=x",
            "etcd:http://a:1,prefix=a b",
            "etcd:http://a:1,what=x",
        ] {
            assert!(wrong.parse::<ArbiterArg>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn plain_connection_to_another_host_must_be_allowed() {
        for (at, local) in [
            ("http://127.0.0.1:1", true),
            ("http://[::1]:1", true),
            ("http://localhost", true),
            ("http://192.0.2.1:1", false),
            ("http://127.0.0.1.example:1", false),
        ] {
            assert_eq!(is_loopback(at), local, "{at}");
            let arg: ArbiterArg = format!("etcd:{at}").parse().unwrap();
            assert_eq!(arg.build(false).is_ok(), local, "{at}");
            assert!(arg.build(true).is_ok(), "{at}");
        }
    }
}
