//! HTTP client for the operator's services. It trusts only the given authorities, and has limits on
//! time and bytes.

use anyhow::{Context, Result};
use rustls::crypto::ring;
use std::sync::Arc;
use std::time::Duration;
use ureq::Agent;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// Returns a client with the time limit `patience` for a whole answer. `ca`, and the certificate
/// chain and key of `own`, are the contents of PEM files.
///
/// # Errors
/// If one of them is not PEM, or contains no certificate.
pub(crate) fn agent(ca: Option<&[u8]>, own: Option<(&[u8], &[u8])>, patience: Duration) -> Result<Agent> {
    let mut tls = TlsConfig::builder().unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()));
    // Without `ca`, no server certificate is trusted.
    let roots = ca.map(certificates).transpose().context("ca")?.unwrap_or_default();
    tls = tls.root_certs(RootCerts::Specific(Arc::new(roots)));
    if let Some((chain, key)) = own {
        let chain = certificates(chain).context("cert")?;
        let key = PrivateKey::from_pem(key).context("key")?;
        tls = tls.client_cert(Some(ClientCert::new_with_certs(&chain, key)));
    }
    let config = Agent::config_builder()
        .timeout_global(Some(patience))
        // The body of an error answer contains the service's message.
        .http_status_as_error(false)
        .max_redirects(0)
        // A proxy from the environment is not meant for these services.
        .proxy(None)
        .max_response_header_size(16 << 10)
        .tls_config(tls.build());
    Ok(config.build().new_agent())
}

fn certificates(pem: &[u8]) -> Result<Vec<Certificate<'static>>> {
    let mut found = Vec::new();
    for item in parse_pem(pem) {
        if let PemItem::Certificate(certificate) = item? {
            found.push(certificate);
        }
    }
    anyhow::ensure!(!found.is_empty(), "it contains no certificate");
    Ok(found)
}
