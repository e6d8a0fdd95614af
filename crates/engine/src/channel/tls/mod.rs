//! Encrypted connections: TLS 1.3, both sides with a certificate.
//!
//! What it is to keep out: whoever can read, change or redirect what goes over the network, and hosts that are not of the operator's own
//! certificate authority. Each channel is a TLS connection of its own. What binds the channels of a migration to each other: a token of 128
//! random bits that only the two ends of the control channel know, and that every other channel has to begin with; and the certificate
//! that the source showed on the control channel, which it has to show on every other one.

#[cfg(any(all(test, feature = "ring"), feature = "hostile"))]
#[cfg_attr(not(test), expect(clippy::unwrap_used, reason = "nothing that ships has it"))]
mod authority;
mod conn;
mod session;
#[cfg(all(test, feature = "ring"))]
mod tests;

pub(super) use session::Records;
#[cfg(feature = "hostile")]
pub use session::hostile::drive_tls;

use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why there can be no encrypted connections with what was given.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file has other things in it.
    #[error("{what} cannot be used: {why}; it must be in PEM's form (-----BEGIN ...)")]
    Pem {
        /// The certificate, the key, or the authorities.
        what: &'static str,
        /// What is wrong.
        why: String,
    },
    /// The certificate, the key and the authorities do not go together.
    #[error("{what} cannot be used: {why}")]
    Unusable {
        /// Which.
        what: &'static str,
        /// What is wrong.
        why: String,
    },
    /// Neither the caller nor the build has a provider of cryptography.
    #[error(
        "there is no provider of cryptography: build with the feature `ring`, pass a provider to `Tls::with_provider`, or install one as \
         the default of the process"
    )]
    NoProvider,
    /// A name that no certificate can have.
    #[error("'{name}' is neither a host's name nor an address")]
    Name {
        /// What was given.
        name: String,
    },
}

/// What one side of encrypted migrations needs: its certificate and key, and whose certificates it trusts.
///
/// A certificate serves for both directions, so a host needs one: sources show it as clients, targets as servers.
#[derive(Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    peer: Option<ServerName<'static>>,
}

impl std::fmt::Debug for Tls {
    // Nothing of the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// Returns the provider of a caller that passes none.
fn default_provider() -> Result<Arc<CryptoProvider>, TlsError> {
    CryptoProvider::get_default().cloned().or_else(built_in).ok_or(TlsError::NoProvider)
}

#[cfg(feature = "ring")]
fn built_in() -> Option<Arc<CryptoProvider>> {
    let mut provider = rustls::crypto::ring::default_provider();
    // The fastest first: guests are large, and 128 bits are not what is attacked.
    provider
        .cipher_suites
        .sort_by_key(|suite| suite.suite() != rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
    Some(Arc::new(provider))
}

#[cfg(not(feature = "ring"))]
fn built_in() -> Option<Arc<CryptoProvider>> {
    None
}

/// Refuses everything that is no certificate, instead of skipping it.
fn certificates(what: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |why: String| TlsError::Pem { what, why };
    let list: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let list = list.map_err(|error| wrong(error.to_string()))?;
    if list.is_empty() { Err(wrong("there is no certificate in it".into())) } else { Ok(list) }
}

impl Tls {
    /// From texts in PEM's form: this side's certificate (and those between it and the authority, in that order), its private key,
    /// and the certificates of the authorities whose hosts are trusted.
    ///
    /// The provider of cryptography is the default that the process has installed
    /// ([`CryptoProvider::install_default`]). Without one it is `ring`, if the feature `ring` is on.
    ///
    /// # Errors
    /// If one of them is not in that form, the key is not the certificate's, or it is of a kind that is not supported. Also if there
    /// is no provider.
    pub fn from_pem(certificate: &[u8], key: &[u8], authorities: &[u8]) -> Result<Self, TlsError> {
        Self::with_provider(default_provider()?, certificate, key, authorities)
    }

    /// The same as [`from_pem`](Self::from_pem), with a provider of cryptography of the caller's own, such as one that is
    /// certified for FIPS. The provider must know TLS 1.3. Its cipher suites are preferred in its order.
    ///
    /// # Errors
    /// As for [`from_pem`](Self::from_pem).
    pub fn with_provider(
        provider: Arc<CryptoProvider>,
        certificate: &[u8],
        key: &[u8],
        authorities: &[u8],
    ) -> Result<Self, TlsError> {
        let chain = certificates("the certificate", certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|error| TlsError::Pem { what: "the key", why: error.to_string() })?;
        let mut roots = RootCertStore::empty();
        for authority in certificates("the authority's certificate", authorities)? {
            roots.add(authority).map_err(|error| TlsError::Unusable {
                what: "the authority's certificate",
                why: error.to_string(),
            })?;
        }
        Self::new(provider, chain, key, Arc::new(roots))
    }

    /// The same from three files.
    ///
    /// # Errors
    /// Also if one of them cannot be read.
    pub fn load(certificate: &Path, key: &Path, authorities: &Path) -> Result<Self, TlsError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|source| TlsError::File { path: path.to_owned(), source })
        };
        Self::from_pem(&read(certificate)?, &read(key)?, &read(authorities)?)
    }

    /// Returns true if the provider and this configuration are approved for FIPS 140, as far as the provider tells.
    #[must_use]
    pub fn is_fips(&self) -> bool {
        self.client.fips() && self.server.fips()
    }

    /// Only the host of this name, or address, is to be at the other end. Without it a source wants the name that it connects to,
    /// and a target takes guests from every host whose certificate the authorities vouch for.
    ///
    /// # Errors
    /// If it is no name.
    pub fn expecting(mut self, name: &str) -> Result<Self, TlsError> {
        self.peer = Some(server_name(name)?);
        Ok(self)
    }

    fn new(
        provider: Arc<CryptoProvider>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        roots: Arc<RootCertStore>,
    ) -> Result<Self, TlsError> {
        let unusable = |what, why: String| TlsError::Unusable { what, why };
        let server_verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()
                .map_err(|error| unusable("the authority's certificate", error.to_string()))?;
        let client_verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|error| unusable("the authority's certificate", error.to_string()))?;
        let versions = &[&rustls::version::TLS13];
        let own = |error: rustls::Error| unusable("the certificate and its key", error.to_string());
        let too_old = |error: rustls::Error| unusable("the provider of cryptography", error.to_string());
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(too_old)?
            .with_webpki_verifier(server_verifier)
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(own)?;
        // Every connection proves both sides anew: a resumed session would show no certificate.
        client.resumption = rustls::client::Resumption::disabled();
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(too_old)?
            .with_client_cert_verifier(client_verifier)
            .with_single_cert(chain, key)
            .map_err(own)?;
        server.send_tls13_tickets = 0;
        server.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        Ok(Self { client: Arc::new(client), server: Arc::new(server), peer: None })
    }

    /// The name that the host at the other end of a connection to `host` has to have.
    fn name_of(&self, host: Option<&str>) -> Result<ServerName<'static>, rustls::Error> {
        match (&self.peer, host) {
            (Some(name), _) => Ok(name.clone()),
            (None, Some(host)) => {
                server_name(host).map_err(|error| rustls::Error::General(error.to_string()))
            }
            (None, None) => Err(rustls::Error::General(
                "the address has no host's name in it: say whose certificate the target has to show".into(),
            )),
        }
    }

    /// Fails unless `certificate` is of the host that was said to be expected.
    fn check_client(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let Some(name) = &self.peer else { return Ok(()) };
        verify_server_name(&ParsedCertificate::try_from(certificate)?, name)
    }
}

fn server_name(name: &str) -> Result<ServerName<'static>, TlsError> {
    ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name { name: name.to_owned() })
}
