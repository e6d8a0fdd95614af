//! An HTTP client for services of the operator's: it trusts whom it is told to, and bounds what it waits for and reads.

use anyhow::{Context, Result};
use rustls::crypto::ring;
use std::sync::Arc;
use std::time::Duration;
use ureq::Agent;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// A client that gives a whole answer `patience`. `ca`, and the chain and the key of `own`, are PEM files' contents.
///
/// # Errors
/// If one of these is no PEM, or has no certificate in it.
pub(crate) fn agent(ca: Option<&[u8]>, own: Option<(&[u8], &[u8])>, patience: Duration) -> Result<Agent> {
    let mut tls = TlsConfig::builder().unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()));
    // Nobody at all is trusted unless it is said who.
    let roots = ca.map(certificates).transpose().context("ca")?.unwrap_or_default();
    tls = tls.root_certs(RootCerts::Specific(Arc::new(roots)));
    if let Some((chain, key)) = own {
        let chain = certificates(chain).context("cert")?;
        let key = PrivateKey::from_pem(key).context("key")?;
        tls = tls.client_cert(Some(ClientCert::new_with_certs(&chain, key)));
    }
    let config = Agent::config_builder()
        .timeout_global(Some(patience))
        // What the service says of an error stands in the body.
        .http_status_as_error(false)
        .max_redirects(0)
        // A proxy named in the environment is for other things.
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
    anyhow::ensure!(!found.is_empty(), "there is no certificate in it");
    Ok(found)
}
