//! `--tls-*`: encrypted connections, as the command line and the control socket say it.

use anyhow::{Context, Result};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use vmferry_engine::{Tls, TlsError};

#[derive(Debug, Clone, Args)]
pub(crate) struct TlsArgs {
    /// Encrypt connections: this host's certificate, and those between it and the authority, in PEM's form
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    tls_cert: Option<PathBuf>,
    /// Its private key
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_ca"])]
    tls_key: Option<PathBuf>,
    /// The certificates of the authorities whose hosts are trusted
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_key"])]
    tls_ca: Option<PathBuf>,
    /// The name in the other side's certificate; a source wants the name or address that it connects to if this is left out, a target
    /// takes guests from every host of the authorities
    #[arg(long, value_name = "NAME", requires = "tls_cert")]
    tls_peer: Option<String>,
}

/// What is needed for encrypted connections, as text: it is given to the process that has the guest, which need not be able to read the
/// files.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct TlsTexts {
    certificate: String,
    key: String,
    authorities: String,
    #[serde(default)]
    peer: Option<String>,
}

impl std::fmt::Debug for TlsTexts {
    // Keys are not for logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsTexts").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl TlsArgs {
    /// What the files say; `None` if none were given.
    pub(crate) fn texts(&self) -> Result<Option<TlsTexts>> {
        let (Some(certificate), Some(key), Some(authorities)) = (&self.tls_cert, &self.tls_key, &self.tls_ca)
        else {
            return Ok(None);
        };
        let texts = TlsTexts {
            certificate: read("--tls-cert", certificate)?,
            key: read("--tls-key", key)?,
            authorities: read("--tls-ca", authorities)?,
            peer: self.tls_peer.clone(),
        };
        // Said here, where the files are known, and not by somebody who was given texts.
        texts.build().with_context(|| {
            format!(
                "--tls-cert {}, --tls-key {}, --tls-ca {}",
                certificate.display(),
                key.display(),
                authorities.display()
            )
        })?;
        Ok(Some(texts))
    }

    /// The files that are named.
    pub(crate) fn files(&self) -> impl Iterator<Item = &PathBuf> {
        self.tls_cert.iter().chain(&self.tls_key).chain(&self.tls_ca)
    }

    /// The same, ready for use.
    pub(crate) fn load(&self) -> Result<Option<Tls>> {
        Ok(self.texts()?.map(|texts| texts.build()).transpose()?)
    }
}

impl TlsTexts {
    pub(crate) fn build(&self) -> Result<Tls, TlsError> {
        let tls =
            Tls::from_pem(self.certificate.as_bytes(), self.key.as_bytes(), self.authorities.as_bytes())?;
        match &self.peer {
            Some(name) => tls.expecting(name),
            None => Ok(tls),
        }
    }
}

fn read(option: &str, path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("{option} {}", path.display()))
}
