//! Encrypted connections: TLS 1.3, in which source and target both present a certificate.
//!
//! The encryption protects against attackers that can read, change or redirect network traffic, and
//! against hosts without a certificate of a trusted authority. Each channel is a separate TLS
//! connection. Two mechanisms bind the channels of a migration to each other:
//!
//! - Tokens of 128 random bits, which only the two ends of the control channel know. Every other
//!   channel must begin with the token of its role.
//! - The certificate that the source has presented on the control channel. The source must present
//!   the same certificate on every other channel.

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

/// Reason why encrypted connections cannot be set up with the given certificates.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the read.
        source: std::io::Error,
    },
    /// A file or text does not contain what is required.
    #[error("{what} cannot be used: {why}; it must be in PEM format (-----BEGIN ...)")]
    Pem {
        /// Name of the input: the certificate, the key, or the authorities.
        what: &'static str,
        /// Description of the error.
        why: String,
    },
    /// The certificate, the key or the authorities cannot be used, for example because the key does
    /// not belong to the certificate.
    #[error("{what} cannot be used: {why}")]
    Unusable {
        /// Name of the input that cannot be used.
        what: &'static str,
        /// Description of the error.
        why: String,
    },
    /// Neither the caller nor the build provides cryptography.
    #[error(
        "there is no provider of cryptography: build with the feature `ring`, pass a provider to `Tls::with_provider`, or install one as \
         the default of the process"
    )]
    NoProvider,
    /// The name cannot be the name of a certificate.
    #[error("'{name}' is neither a host name nor an address")]
    Name {
        /// The given name.
        name: String,
    },
}

/// Settings of encrypted channels: the certificate and key of this host, and the authorities that
/// it trusts.
///
/// The same settings serve a source, which presents the certificate as a client, and a target,
/// which presents it as a server.
#[derive(Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    peer: Option<ServerName<'static>>,
}

impl std::fmt::Debug for Tls {
    // The output must not contain any part of the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// Returns the provider of cryptography for a caller that does not pass one.
fn default_provider() -> Result<Arc<CryptoProvider>, TlsError> {
    CryptoProvider::get_default().cloned().or_else(built_in).ok_or(TlsError::NoProvider)
}

#[cfg(feature = "ring")]
fn built_in() -> Option<Arc<CryptoProvider>> {
    let mut provider = rustls::crypto::ring::default_provider();
    // AES-128-GCM comes first, because it is the fastest suite and guests are large. Keys of 128
    // bits are strong enough.
    provider
        .cipher_suites
        .sort_by_key(|suite| suite.suite() != rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
    Some(Arc::new(provider))
}

#[cfg(not(feature = "ring"))]
fn built_in() -> Option<Arc<CryptoProvider>> {
    None
}

/// Reads certificates in PEM format, of which there must be at least one. `what` is the name of the
/// input in errors.
fn certificates(what: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |why: String| TlsError::Pem { what, why };
    let list: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let list = list.map_err(|error| wrong(error.to_string()))?;
    if list.is_empty() { Err(wrong("there is no certificate in it".into())) } else { Ok(list) }
}

impl Tls {
    /// Creates the settings from texts in PEM format.
    ///
    /// - `certificate`: the certificate of this host, followed by the intermediate certificates up
    ///   to the authority, in that order.
    /// - `key`: the private key of the certificate.
    /// - `authorities`: the certificates of the authorities whose hosts are trusted.
    ///
    /// The provider of cryptography is the one that the process has installed as the default
    /// ([`CryptoProvider::install_default`]). If none is installed, it is `ring`, provided that the
    /// feature `ring` is enabled.
    ///
    /// # Errors
    /// If a text is not in PEM format, the key does not belong to the certificate, the kind of a
    /// key or certificate is not supported, or there is no provider of cryptography.
    pub fn from_pem(certificate: &[u8], key: &[u8], authorities: &[u8]) -> Result<Self, TlsError> {
        Self::with_provider(default_provider()?, certificate, key, authorities)
    }

    /// Creates the settings as [`from_pem`](Self::from_pem) does, but with the given provider of
    /// cryptography, for example one that is certified for FIPS. The provider must support TLS 1.3.
    /// The order of its cipher suites is the order of preference.
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

    /// Creates the settings as [`from_pem`](Self::from_pem) does, from three files.
    ///
    /// # Errors
    /// As for [`from_pem`](Self::from_pem), or if a file cannot be read.
    pub fn load(certificate: &Path, key: &Path, authorities: &Path) -> Result<Self, TlsError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|source| TlsError::File { path: path.to_owned(), source })
        };
        Self::from_pem(&read(certificate)?, &read(key)?, &read(authorities)?)
    }

    /// Returns true if the provider reports that it and this configuration are approved for FIPS
    /// 140.
    #[must_use]
    pub fn is_fips(&self) -> bool {
        self.client.fips() && self.server.fips()
    }

    /// Accepts only peers whose certificate contains the name or address `name`.
    ///
    /// Without this call, a source requires that the target's certificate contains the name that
    /// the source connects to. A target accepts guests from every host that has a certificate of a
    /// trusted authority.
    ///
    /// # Errors
    /// If `name` is neither a host name nor an IP address.
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
        // Source and target must authenticate each other on every connection, and neither would
        // present a certificate in a resumed session.
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

    /// Returns the name that the certificate of the target must contain for a connection to `host`.
    fn name_of(&self, host: Option<&str>) -> Result<ServerName<'static>, rustls::Error> {
        match (&self.peer, host) {
            (Some(name), _) => Ok(name.clone()),
            (None, Some(host)) => {
                server_name(host).map_err(|error| rustls::Error::General(error.to_string()))
            }
            (None, None) => Err(rustls::Error::General(
                "the address contains no host name; set the name that the target's certificate must have"
                    .into(),
            )),
        }
    }

    /// Returns an error if a name is expected and the source's `certificate` does not contain it.
    fn check_client(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let Some(name) = &self.peer else { return Ok(()) };
        verify_server_name(&ParsedCertificate::try_from(certificate)?, name)
    }
}

fn server_name(name: &str) -> Result<ServerName<'static>, TlsError> {
    ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name { name: name.to_owned() })
}
