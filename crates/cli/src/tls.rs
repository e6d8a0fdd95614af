//! Options `--tls-*`: credentials for encrypted connections, on the command line and on the control
//! socket.

use crate::args::heading;
use anyhow::{Context, Result};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use vmferry_engine::{Tls, TlsError};

#[derive(Debug, Clone, Args)]
pub(crate) struct TlsArgs {
    /// Certificate of this host (PEM); encrypts all connections
    ///
    /// If there are intermediate certificates between the certificate of the host and that of the
    /// authority, the file must also contain them.
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"], help_heading = heading::ENCRYPTION)]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_ca"], help_heading = heading::ENCRYPTION)]
    tls_key: Option<PathBuf>,
    /// Certificates of the trusted authorities (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_key"], help_heading = heading::ENCRYPTION)]
    tls_ca: Option<PathBuf>,
    /// Name that the certificate of the peer must contain
    ///
    /// Without the option, a source requires the name or address to which it connects. A target
    /// accepts every host whose certificate is from one of the authorities.
    #[arg(long, value_name = "NAME", requires = "tls_cert", help_heading = heading::ENCRYPTION)]
    tls_peer: Option<String>,
}

/// Credentials for encrypted connections, as text. The process that has the guest gets the text,
/// because it need not be able to read the files.
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
    // Keys must not be logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsTexts").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl TlsArgs {
    /// Reads the files; `None` if no files were given.
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
        // The texts are checked in this process, which knows the names of the files.
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

    /// Returns the named files.
    pub(crate) fn files(&self) -> impl Iterator<Item = &PathBuf> {
        self.tls_cert.iter().chain(&self.tls_key).chain(&self.tls_ca)
    }

    /// Reads the files and parses their contents.
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
    std::fs::read_to_string(path).with_context(|| format!("cannot read {} ({option})", path.display()))
}
